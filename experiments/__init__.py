"""Drivers, trainer, data and benchmarks; run as modules, `python -m experiments.pretrain`."""

import os
from importlib.util import find_spec
from pathlib import Path

# Threads that wait for work sleep. Those that spin hold the cores that other programs, or the
# threads they wait for, want: small models then train some ten times slower. It is read when torch
# is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

for _name in ("common_kernels", "methods", "models"):
    _found, _here = find_spec(_name), Path(__file__).resolve().parents[1]
    if _found and _found.origin and _here not in Path(_found.origin).resolve().parents:
        raise ImportError(
            f"import {_name} finds {Path(_found.origin).parent}, which hides sparse24's package in "
            f"{_here}: run elsewhere, rename that folder, or begin PYTHONPATH with {_here}"
        )
