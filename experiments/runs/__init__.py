"""Finished runs: opened again, compared, drawn."""
