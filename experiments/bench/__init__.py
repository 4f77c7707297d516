"""Benchmarks that check what they measure; `__main__.py` has the commands."""
