"""Compressed 2:4 matrices: `naive.py` is the specification of the formats, `kernel.py` prunes and
packs in one read for cuSPARSELt on compute capability 9.0.
"""
