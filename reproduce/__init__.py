"""Turns runs into "paper vs ours" tables; holds no training code."""
