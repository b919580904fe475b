"""Accuracy on masked tokens: the `evaluate` module."""
