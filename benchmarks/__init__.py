"""Runs against peers and over the grid of models and budgets: ``python -m benchmarks.peers``."""
