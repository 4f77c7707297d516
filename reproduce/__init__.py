"""Turns finished runs into tables beside the papers' values; holds no training code."""
