"""Writes the page of all results: `python -m reproduce report`.

blocks.py collects the data of blocks, figures.py draws with matplotlib, and page.py fills the
templates in templates/, in which the page's words stand.
"""
