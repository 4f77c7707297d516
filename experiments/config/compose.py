"""Composes hydra's overrides into plain values and dataclasses, with one-line errors."""

import copy
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeVar

from experiments.config import yaml_files
from experiments.config.yaml_files import CONF
from experiments.support.errors import UserError, installing, suggestion

T = TypeVar("T")


def composed(config_name: str, typed: Callable[[Any], T], overrides: Sequence[str] = ()) -> T:
    """`typed` of the config that `experiments/conf/<config_name>.yaml` and hydra overrides compose,
    which records the command line if it can. Raises a `UserError` if something does not fit."""
    with one_line_errors():
        config: Any = typed(compose(config_name, overrides))
    if hasattr(config, "with_command"):
        line = shlex.join(["python", "-m", f"experiments.{config_name}", *overrides])
        return config.with_command(line)
    return config


def compose(config_name: str, overrides: Sequence[str]) -> Any:
    """The `DictConfig` that hydra composes. Merging the files takes hydra 0.1 s, and a report needs
    hundreds of configs, so it is done once for each choice of files; values are set in a copy."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    files, values = [], []
    for text in overrides:
        override = _parsed(config_name, text)
        key = override.key_or_group
        if override.is_sweep_override():
            value = text.partition("=")[2]
            raise UserError(
                f"{text} has several values: for a sweep add -m; one value with commas is "
                f"{key}=[{value}] if it is a list, \"{key}='{value}'\" if it is a text"
            )
        top, base = re.split("[./]", key)[0], _merged(config_name, ())
        if text[0] == "+" and top not in {"hydra", *base} and not (CONF / top).is_dir():
            raise UserError(_unknown(key, base))
        sets = text[0] not in "+~" and not (CONF / key).is_dir() and top != "hydra"
        values.append((key, override.value())) if sets else files.append(text)
    config = copy.deepcopy(_merged(config_name, tuple(files)))
    for key, value in values:
        try:
            OmegaConf.update(config, key, value, merge=True)
        except OmegaConfBaseException as error:
            raise UserError(_unknown(key, config)) from error
    return config


@lru_cache(maxsize=1024)
def _parsed(config_name: str, text: str) -> Any:
    """One override, parsed; a `UserError` says why it cannot be."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(text)
    except HydraException as error:
        key, equals, value = text.partition("=")
        run = f"; run={text} may be meant" if "run" in _merged(config_name, ()) else ""
        says = f"{text} is no KEY=VALUE{run}"
        if equals:
            says = f"{text} cannot be read ({_first_line(error)}); a text is \"{key}='{value}'\""
        raise UserError(says) from error


def store_methods() -> None:
    """Give hydra the methods from outside as files of its group `method`. Raises a `UserError` if
    the module of an installed one cannot be imported."""
    from hydra.core.config_store import ConfigStore

    try:
        registered = yaml_files.registered_methods()
    except ImportError as error:
        raise UserError(str(error)) from error
    for name, options in registered.items():
        node = {"defaults": ["_common", "_self_"], **options}
        ConfigStore.instance().store(f"{name}.yaml", node, group="method")


@lru_cache(maxsize=1024)
def _merged(config_name: str, files: tuple[str, ...]) -> Any:
    """The config of a choice of files. It is shared, so callers change a copy."""
    import hydra
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import MissingConfigException

    store_methods()
    running = GlobalHydra.instance().hydra  # in a job of a sweep
    GlobalHydra.instance().hydra = None
    try:
        with hydra.initialize_config_module("experiments.conf", version_base="1.3"):
            return hydra.compose(config_name, overrides=list(files))
    except MissingConfigException as error:
        file = str(error.missing_cfg_file)
        group, _, name = file.rpartition("/") if file[:6] == "hydra/" else file.partition("/")
        known = [option for option in error.options or () if not option.startswith("_")]
        text = f"there is no {group}={name}{suggestion(name, known)}; there is {', '.join(known)}"
        if (new := name.replace("t_sr_ste", "fst")) != name:
            text = f"{group}={name} is called {group}={new} now"
        if name.startswith("submitit"):
            text = f"+cluster needs hydra's submitit launcher: {installing('slurm')}"
        raise UserError(text) from error
    finally:
        GlobalHydra.instance().hydra = running


def _unknown(key: str, config: Any) -> str:
    """Says that a config has no `key`, and which other may be meant."""
    return f"there is no {key} here{suggestion(key, _keys(config, ''))}"


def _keys(node: Any, prefix: str) -> Iterator[str]:
    """The dotted keys of a config and of its groups."""
    from omegaconf import OmegaConf

    for name in node:
        yield f"{prefix}{name}"
        if OmegaConf.is_dict(inner := node._get_node(name)):
            yield from _keys(inner, f"{prefix}{name}.")


def plain(composition: Any, *needed: str) -> dict[str, Any]:
    """A composed `DictConfig` as plain values."""
    from omegaconf import OmegaConf

    if missing := sorted(OmegaConf.missing_keys(composition)):
        raise UserError(f"{missing[0]} has no value; give it one, {missing[0]}=VALUE")
    values: Any = OmegaConf.to_container(composition, resolve=True)
    if missing := [key for key in needed if key not in values]:
        raise UserError(f"the config has no {missing[0]}: leave ~{missing[0]} out")
    return values


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn the errors of hydra and omegaconf, and a dataclass's ValueError, into a `UserError`."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        yield
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        text = _first_line(error)
        if isinstance(error.__cause__, OmegaConfBaseException):
            text += f"; {_first_line(error.__cause__)}"
        raise UserError(text) from error


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0].rstrip(".")
