"""Perplexity: the `evaluate` module."""
