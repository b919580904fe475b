"""ROUGE: the `evaluate` module."""
