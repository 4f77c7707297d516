"""2:4 training methods, one file each.

    from methods import s_ste
    method = s_ste.Method(s_ste.Config(fp8="paper"))

or by name: `methods.build("s_ste", fp8="paper")`. `methods/nn/base.py` describes how a training
loop calls a method; the other modules of `methods/nn` hold code that methods share.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from types import ModuleType
from typing import Any

from . import released
from .nn.base import Method, Report
from .nn.check import check
from .nn.linear import refresh
from .nn.optimizer import FusedAdamW

__all__ = ["FusedAdamW", "Method", "Report", "available", "build", "check", "module", "refresh"]


def available() -> list[str]:
    """The names that `build` takes: the files of this folder."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.ispkg)


def module(name: str) -> ModuleType:
    """The module of a method: `methods/<name>.py`, or one of `methods/released` by dotted name.

    Raises:
        ValueError: there is no such method.
    """
    defective = {f"released.{m.name}" for m in pkgutil.iter_modules(released.__path__)}
    if name not in {*available(), *defective}:
        raise ValueError(f"no method {name!r}; choose one of {', '.join(available())}")
    return importlib.import_module(f"{__name__}.{name}")


def build(name: str, **options: Any) -> Method:
    """The method `name`, built with these options of its `Config`.

    Raises:
        ValueError: there is no such method or option, or a value is out of range.
    """
    file = module(name)
    fields = [f.name for f in dataclasses.fields(file.Config)]
    unknown = sorted(set(options) - set(fields))
    if unknown:
        raise ValueError(f"{name} has no option {', '.join(unknown)}; it takes {', '.join(fields)}")
    return file.Method(file.Config(**options))
