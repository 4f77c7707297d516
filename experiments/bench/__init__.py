"""Benchmarks, which check results before they measure times; `__main__.py` has the commands."""
