"""Reads a driver's command line before hydra does: plain-text arguments and `--help`."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import methods
from experiments.support.errors import UserError

WIDTH = 79
CONF = Path(__file__).parents[1] / "conf"
_COLUMN = 30  # the column in which the descriptions of options begin
_LAST = """\
`GROUP=CHOICE --help` shows the options of that choice. hydra's own flags: -m
sweeps over `key=1,2`, --cfg job prints the config, --hydra-help lists more."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see --help")


def parse(arguments: Sequence[str], texts: Sequence[str] = ()) -> argparse.Namespace:
    """The command line: `help`, hydra's flags as `hydra`, `overrides`, and each plain text by name.

    `NAME=TEXT`, `--NAME=TEXT` and `--NAME TEXT` give the text as it is typed, with quotation marks,
    brackets, equals signs and line breaks.

    Raises:
        UserError: an unknown flag, or a text that is missing, given twice, or not UTF-8.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--help", "-h", action="store_true")
    for names in (("--multirun", "-m"), ("--resolve",), ("--hydra-help",)):
        parser.add_argument(*names, dest="hydra", action="append_const", const=names[0], default=[])
    parser.add_argument("--cfg", "-c", choices=("job", "hydra", "all"))
    parser.add_argument("overrides", nargs="*")
    for name in texts:
        parser.add_argument(f"--{name}", action="append")
    as_flags = [f"--{a}" if a.partition("=")[0] in texts else a for a in arguments]
    found = parser.parse_intermixed_args(as_flags)
    found.hydra += ["--cfg", found.cfg] if found.cfg else []
    for name in texts:
        text, *more = getattr(found, name) or [None]
        setattr(found, name, text)
        if more:
            raise UserError(f"{name} is given twice; give it once")
        if text and (wrong := re.search("[\ud800-\udfff]", text)):  # how Python reads other bytes
            raise UserError(f"{name} is not UTF-8 (character {wrong.start() + 1})")
    return found


# ------------------------------------------------------------------ --help


def help_text(
    module: str, docstring: str, config_name: str, overrides: list[str], groups: Sequence[str] = ()
) -> str:
    """The text of `--help`: the driver's docstring, then its options with their present values and
    the comments on them in conf/, at most 79 characters a line.

    Args:
        docstring: the driver's; its first line has the form "What it does: `example`.".
        groups: the config groups that the driver reads; () = its whole config.
    """
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf, open_dict

    with initialize_config_module("experiments.conf", version_base="1.3"):
        composed = compose(config_name, overrides, return_hydra_config=True)
    choices = {
        group.partition("@")[0]: choice
        for group, choice in composed.hydra.runtime.choices.items()
        if not group.startswith("hydra/")
    }
    with open_dict(composed):
        del composed["hydra"]
    values: Any = OmegaConf.to_container(composed, resolve=True)
    own = {key: values[key] for key in values if key not in choices and not groups}
    does, _, example = docstring.partition("\n")[0].partition(": `")
    _, *blocks = docstring.strip().split("\n\n")
    parts = [
        f"usage:   python -m {module} [KEY=VALUE ...] [GROUP=CHOICE ...]\n"
        f"example: {example.rstrip('`.')}",
        f"{does}.",
        *map(_wrapped, blocks),
    ]
    if own:
        said = comments(CONF / f"{config_name}.yaml")
        parts.append("\n".join(["options:", *_options(own, "", said)]))
    # Groups without values of their own, such as experiment, come last.
    for group in groups or sorted(choices, key=[*values, *choices].index):
        files = sorted((CONF / group).glob("*.yaml"))
        known = [file.stem for file in files if not file.stem.startswith("_")]
        names = " ".join(sorted({*known, *(methods.own() if group == "method" else ())}))
        chosen = choices[group] or "null"
        said = comments(CONF / group / f"{chosen}.yaml")
        line = _filled(f"{group}={chosen}, one of: {names}", "", "  ")
        parts.append("\n".join([line, *_options(values.get(group) or {}, f"{group}.", said)]))
    return "\n\n".join([*parts, _LAST])


def _filled(text: str, first: str, later: str) -> str:
    return textwrap.fill(
        " ".join(text.split()),
        WIDTH,
        initial_indent=first,
        subsequent_indent=later,
        break_long_words=False,
        break_on_hyphens=False,
    )


def comments(path: Path) -> dict[str, str]:
    """The comments after the options of a yaml file and of the files in its defaults list, by
    dotted key."""
    if not path.is_file():
        return {}
    from omegaconf import OmegaConf

    found: dict[str, str] = {}
    content: Any = OmegaConf.load(path)
    for name in content.get("defaults", []):
        if isinstance(name, str):
            found |= comments(named(name, path))
    parents: list[str] = []
    last = None
    for line in path.read_text(encoding="utf-8").splitlines():
        if option := re.match(r"( *)(\w+):(.*?)(?:\s+# *(.*))?$", line):
            del parents[len(option[1]) // 2 :]
            parents.append(option[2])
            last = ".".join(parents) if option[4] else None
            if last is not None:
                found[last] = option[4]
        elif last is not None and (more := re.match(r" +# *(.*)", line)):
            found[last] += f" {more[1]}"
        else:
            last = None
    return found


def named(default: str, path: Path) -> Path:
    """The path of the file that the entry `default` in the defaults list of `path` refers to."""
    folder = CONF if default.startswith("/") else path.parent
    return folder / f"{default.removesuffix('@_here_').lstrip('/')}.yaml"


def _options(values: dict[str, Any], prefix: str, said: dict[str, str]) -> Iterator[str]:
    """Yields the lines of `--help` on each option of a group and of its subgroups."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            inner = {k.removeprefix(f"{key}."): text for k, text in said.items()}
            yield from _options(value, f"{prefix}{key}.", inner)
            continue
        option = f"  {prefix}{key}={as_typed(value)}"
        if len(option) > WIDTH:
            option = f"{option[: WIDTH - 3]}..."
        text = said.get(key, "")
        if len(option) > _COLUMN - 2 and text:
            yield option
            option = ""
        text = _filled(text, " " * _COLUMN, " " * _COLUMN)
        yield f"{option:<{_COLUMN}}{text[_COLUMN:]}".rstrip()


def as_typed(value: Any) -> str:
    """A value as one types it on the command line: `null`, `true`, `[1,2]`."""
    if isinstance(value, list):
        return f"[{','.join(map(as_typed, value))}]"
    said = "null" if value is None else str(value)
    return said.lower() if isinstance(value, bool) else said


def _wrapped(block: str) -> str:
    """A paragraph of a docstring, wrapped. In an indented paragraph each line is a separate entry,
    deeper lines continue it, and two spaces separate its key from its text."""
    if not block.startswith(" "):
        return _filled(block, "", "")
    lines = []
    for entry in re.split(r"\n(?= {4}\S)", block):
        about, gap, text = re.fullmatch(r"( +\S+(?: \S+)*)(?:( {2,})(.*))?", entry, re.S).groups("")  # type: ignore[union-attr]
        indent = " " * len(about + gap)
        lines.append(about + gap + _filled(text, indent, indent)[len(indent) :])
    return "\n".join(lines)
