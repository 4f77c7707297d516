"""Turns hydra's composed config into plain values and dataclasses, and its errors into one line."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from experiments.support.errors import UserError, closest, meant

T = TypeVar("T")


def composed(config_name: str, typed: Callable[[Any], T], overrides: list[str] | None = None) -> T:
    """`typed` of the config that `experiments/conf/<config_name>.yaml` and hydra overrides compose.

    Raises:
        UserError: an override that does not fit, in one line.
    """
    from hydra import compose, initialize_config_module

    context = initialize_config_module("experiments.conf", version_base="1.3")
    with one_line_errors(config_name), context:
        return typed(compose(config_name, overrides=overrides or []))


def plain(composed: Any, *needed: str) -> dict[str, Any]:
    """A composed `DictConfig` as plain values.

    Raises:
        UserError: one of the keys that are `needed` is gone.
    """
    from omegaconf import OmegaConf

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
