"""Runs the papers' experiments with the drivers of `experiments`; writes tables with the papers'
values and ours, verdicts on the papers' claims, and a page of all results."""
