"""Helpers that every part of experiments/ uses: one-line errors, progress, atomic files, hashes."""
