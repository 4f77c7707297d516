"""Benchmarks that check what they measure; see `__main__.py` for the command."""
