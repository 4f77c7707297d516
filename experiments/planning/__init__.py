"""Estimates of what a training will need, made before it is begun and without a GPU."""
