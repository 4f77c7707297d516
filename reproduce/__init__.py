"""Runs the papers' experiments with the drivers of `experiments`; writes tables with the papers'
values and ours, verdicts on the papers' claims, and a page of all results."""

from importlib.util import find_spec
from pathlib import Path

_found, _here = find_spec("experiments"), Path(__file__).resolve().parents[1]
if _found and _found.origin and _here not in Path(_found.origin).resolve().parents:
    raise ImportError(
        f"import experiments finds {Path(_found.origin).parent}, which hides sparse24's package in "
        f"{_here}: run elsewhere, rename that folder, or begin PYTHONPATH with {_here}"
    )
