"""The report, one page of everything that was measured: `python -m reproduce report`.

gather.py collects, html.py and figures.py know how to write elements and figures, sections.py and
tables.py make the parts of the page, page.py puts them together.
"""
