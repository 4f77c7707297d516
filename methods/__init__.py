"""2:4 training methods, one file each.

    from methods import s_ste
    method = s_ste.Method(s_ste.Config(fp8="paper"))

or by name: `methods.build("s_ste", fp8="paper")`. The protocol is described
in `methods/base.py`.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from typing import Any

from .base import Method, Report, refresh

__all__ = ["Method", "Report", "available", "build", "refresh"]

_NOT_METHODS = {
    "base", "calibration", "compressed", "conversion", "distillation", "fp8_gemms", "gemms",
    "slorb", "sparsegpt",
}  # fmt: skip


def available() -> list[str]:
    """Names that `build` takes: the files of this folder that hold a method."""
    return sorted({m.name for m in pkgutil.iter_modules(__path__)} - _NOT_METHODS)


def build(name: str, **options: Any) -> Method:
    """The method of file `methods/<name>.py` with these options of its `Config`.

    Raises:
        ValueError: no such method, no such option, or a value outside its range.
    """
    if name not in available():
        raise ValueError(f"no method {name!r}; choose one of {', '.join(available())}")
    module = importlib.import_module(f"{__name__}.{name}")
    fields = [f.name for f in dataclasses.fields(module.Config)]
    unknown = sorted(set(options) - set(fields))
    if unknown:
        raise ValueError(f"{name} has no option {', '.join(unknown)}; it takes {', '.join(fields)}")
    return module.Method(module.Config(**options))
