"""Writes the page of all results: `python -m reproduce report`.

gather.py collects the data. html.py and figures.py write elements and figures. claims.py, blocks.py
(with block_curves.py), tables.py and speed.py make the sections, and page.py assembles the page.
"""
