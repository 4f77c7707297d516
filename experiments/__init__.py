"""Drivers, trainer, data, evaluation and benchmarks. Run them as modules: `python -m experiments.pretrain`."""
