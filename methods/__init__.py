"""2:4 training methods, one file each.

    from methods import s_ste
    method = s_ste.Method(s_ste.Config(fp8="paper"))

or by name: `methods.build("s_ste", fp8="paper")`. `methods/nn/base.py` describes how a training
loop calls a method; the other modules of `methods/nn` hold code that methods share.
"""

import dataclasses
import importlib
import pkgutil
from difflib import get_close_matches
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any

from . import released
from .nn.base import Config, Method, Report
from .nn.check import check
from .nn.linear import refresh
from .nn.optimizer import FusedAdamW

__all__ = [
    "FusedAdamW",
    "Method",
    "Report",
    "available",
    "build",
    "check",
    "module",
    "refresh",
    "register",
]


_registered: dict[str, ModuleType] = {}


def register(module: ModuleType) -> None:
    """Make a method of your own known in this process, by the last part of its module's name. An
    installed package makes its method known to every command as an entry point of the group
    `sparse24.methods`, with the method's name and its module. Raises ValueError if the module has
    no `Config` and `Method`, or there is a method of this name."""
    name = module.__name__.rpartition(".")[2]
    wanted = {"Config": Config, "Method": Method}
    if not all(issubclass(vars(module).get(word, object), base) for word, base in wanted.items()):
        raise ValueError(f"{module.__name__} needs a Config and a Method, as methods/ste.py has")
    if name in available() and _registered.get(name) is not module:
        raise ValueError(f"there is a method {name!r} already; give {module.__name__} another name")
    _registered[name] = module


def own() -> dict[str, ModuleType]:
    """The methods from outside this folder, by name. Raises ImportError if the module of an
    installed package cannot be imported."""
    return {entry.name: _loaded(entry) for entry in _installed()} | _registered


def _loaded(entry: EntryPoint) -> ModuleType:
    try:
        return entry.load()
    except Exception as error:
        package = f" of the package {entry.dist.name}" if entry.dist else ""
        raise ImportError(
            f"the method {entry.name}{package} cannot be imported, {type(error).__name__}: {error};"
            f' mend or uninstall it (where it fails: python -c "import {entry.module}")'
        ) from error


@cache
def _installed() -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group="sparse24.methods"))


def available() -> list[str]:
    """The names that `build` takes: the files of this folder, and the methods that are `own`."""
    return sorted({*_files(), *own()})


def _files() -> list[str]:
    return [m.name for m in pkgutil.iter_modules(__path__) if not m.ispkg]


def module(name: str) -> ModuleType:
    """The module of a method: `methods/<name>.py`, one of `methods/released` by dotted name, or one
    from outside. Raises ValueError if there is no such method."""
    defective = {f"released.{m.name}" for m in pkgutil.iter_modules(released.__path__)}
    if name in {*_files(), *defective}:
        return importlib.import_module(f"{__name__}.{name}")
    if name in own():
        return own()[name]
    raise ValueError(f"no method {name!r}; {_choose(name, available(), 'choose one of')}")


def _choose(given: str, names: list[str], words: str) -> str:
    near = get_close_matches(given.replace("-", "_"), names, 1)
    return f"{f'did you mean {near[0]}? ' if near else ''}{words} {', '.join(names)}"


def build(name: str, **options: Any) -> Method:
    """The method `name`, built with these options of its `Config`. Raises ValueError if there is no
    such method or option, or a value is out of range."""
    file = module(name)
    fields = [f.name for f in dataclasses.fields(file.Config)]
    unknown = sorted(set(options) - set(fields))
    if unknown:
        choices = _choose(unknown[0], fields, "it takes")
        raise ValueError(f"{name} has no option {', '.join(unknown)}; {choices}")
    return file.Method(file.Config(**options))
