"""Metrics shipped with the project, loaded by `evaluate` from their folders without network."""
