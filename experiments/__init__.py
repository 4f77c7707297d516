"""Drivers, trainer, data and benchmarks; run as modules, `python -m experiments.pretrain`."""
