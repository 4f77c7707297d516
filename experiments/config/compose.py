"""Turns hydra's composed config into plain values and dataclasses, and its errors into one line."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeVar

from experiments.config.command_line import CONF
from experiments.support.errors import UserError, closest, meant

T = TypeVar("T")


def composed(config_name: str, typed: Callable[[Any], T], overrides: list[str] | None = None) -> T:
    """`typed` of the config that `experiments/conf/<config_name>.yaml` and hydra overrides compose.

    Raises:
        UserError: an override that does not fit, in one line.
    """
    with one_line_errors(config_name):
        return typed(_compose(config_name, overrides or []))


def _compose(config_name: str, overrides: list[str]) -> Any:
    """The `DictConfig` that hydra composes.

    It takes hydra 0.1 s to merge the files, and a report needs hundreds of configs. So the files
    are merged once for each choice of them, and values are then set in a copy, as hydra does.
    """
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    files = tuple(override for override in overrides if not _sets_value(override))
    try:
        values = _parsed([override for override in overrides if _sets_value(override)])
        config = copy.deepcopy(_merged(config_name, files))
        for key, value in values:
            OmegaConf.update(config, key, value, merge=True)
        return config
    except (HydraException, OmegaConfBaseException):
        return _by_hydra(config_name, overrides)  # its error is about the overrides as given


def _sets_value(override: str) -> bool:
    """True for `key=value` and `group.key=value`, which choose no file, add no key and delete
    none."""
    key, equals, _ = override.partition("=")
    return bool(equals) and key.replace(".", "_").isidentifier() and not (CONF / key).is_dir()


def _parsed(overrides: list[str]) -> list[tuple[str, Any]]:
    """Keys and values of overrides.

    Raises:
        HydraException: one of them cannot be parsed, or has several values.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parsed = OverridesParser.create().parse_overrides(overrides)
    if any(override.is_sweep_override() for override in parsed):
        raise HydraException("several values")
    return [(override.key_or_group, override.value()) for override in parsed]


@lru_cache(maxsize=64)
def _merged(config_name: str, files: tuple[str, ...]) -> Any:
    """The config of a choice of files. It is shared, so callers change a copy."""
    return _by_hydra(config_name, files)


def _by_hydra(config_name: str, overrides: Sequence[str]) -> Any:
    from hydra import compose, initialize_config_module

    with initialize_config_module("experiments.conf", version_base="1.3"):
        return compose(config_name, overrides=list(overrides))


def plain(composed: Any, *needed: str) -> dict[str, Any]:
    """A composed `DictConfig` as plain values.

    Raises:
        UserError: one of the keys that are `needed` is gone, or one has no value.
    """
    from omegaconf import OmegaConf

    if missing := sorted(OmegaConf.missing_keys(composed)):
        raise UserError(f"{missing[0]} has no value; give it one, {missing[0]}=VALUE")
    values: Any = OmegaConf.to_container(composed, resolve=True)
    if missing := [key for key in needed if key not in values]:
        raise UserError(f"the config has no {missing[0]}: leave ~{missing[0]} out")
    return values


def typed(schema: type, group: str, values: Any) -> Any:
    """The dataclass `schema` with these values, a dict.

    Raises:
        UserError: a key that it does not have, or a value of the wrong kind.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    known = {f.name for f in dataclasses.fields(schema)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise UserError(
            f"{group} has no key {', '.join(unknown)}; it takes {', '.join(sorted(known))}"
        )
    try:
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), values))
    except OmegaConfBaseException as error:
        key, reason = f"{group}.{error.full_key}", str(error).splitlines()[0]
        if "is not a ListConfig" in reason:
            raise UserError(f"{key} must be a list, as in '{key}=[VALUE]'") from error
        raise UserError(f"{key}: {reason}") from error


@contextmanager
def one_line_errors(config_name: str | None = None) -> Iterator[None]:
    """Turn the errors of hydra and omegaconf, and a dataclass's ValueError, into a `UserError`.

    config_name: the primary config, from which similar keys are suggested for one that is unknown.
    """
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        yield
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        parts = [str(error)]
        if isinstance(error.__cause__, OmegaConfBaseException):
            parts.append(str(error.__cause__))
        lines = [line.strip().rstrip(".") for line in "\n".join(parts).splitlines()]
        kept = [x for x in dict.fromkeys(lines) if x and not x.startswith(_NOISE)]
        text = "; ".join(kept)
        if "Could not find 'hydra/launcher/submitit" in text:
            text = (
                "+cluster needs hydra's submitit launcher: pip install -e '.[slurm]' in the "
                "checkout"
            )
        absent = r"Could not find '(.+)/(.+)'; Available options in '\1':; (.*)"
        if found := re.search(absent, text):
            known = [name for name in found[3].split("; ") if not name.startswith("_")]
            there = ", ".join(known)
            text = f"there is no {found[1]}={found[2]}{meant(found[2], known)}; there is {there}"
        if found := re.match(r"Ambiguous value for argument '([^=]+)=(.*)'; 1\. ", text):
            key, value = found[1], found[2]
            text = (
                f"{key}={value} has several values: for a sweep add -m; one value with commas is "
                f"{key}=[{value}] if it is a list, \"{key}='{value}'\" if it is a text"
            )
        if found := re.match(r"Error parsing override '(.*)'; missing EQUAL at '<EOF>'", text):
            takes_run = config_name in ("evaluate", "export", "finetune", "generate")
            suggestion = f"; run={found[1]} may be meant" if takes_run else ""
            text = f"{found[1]} is no KEY=VALUE{suggestion}"
        if found := re.match(r"Could not override '([^']+)'", text):
            text = f"there is no {found[1]} here{_similar(found[1], config_name)}"
        raise UserError(text) from error


def _similar(key: str, config_name: str | None) -> str:
    """The end of a sentence that suggests keys of a primary config close to `key`; ""
    without one."""
    if config_name is None:
        return ""
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf

    def leaves(node: Any, prefix: str) -> Iterator[str]:
        if not OmegaConf.is_dict(node):
            yield prefix.removesuffix(".")
            return
        for name in node:
            yield from leaves(node._get_node(name), f"{prefix}{name}.")

    with initialize_config_module("experiments.conf", version_base="1.3"):
        known = [*leaves(compose(config_name), "")]
    last = {name.rpartition(".")[2] for name in known}
    near = closest(key.rpartition(".")[2], last)
    found = [name for name in known if name.rpartition(".")[2] == near]
    found = [name for name in found if name != key]  # another choice of a group has it
    return f"; {' or '.join(found)} may be meant" if found else ""


# Lines of hydra's messages that do not help a user.
_NOISE = (
    *("To append to your config", "Key '", "full_key", "object_type", "Config search path"),
    *("provider=", "_common", "_distillation"),
)
