"""Reads the specs: tables, blocks and claims, and the papers' published values."""
