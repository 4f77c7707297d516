"""Reads the yaml files of conf/: their values, and their texts, which explain them."""

import dataclasses
import functools
import json
import re
from pathlib import Path
from typing import Any

import methods

CONF = Path(__file__).parents[1] / "conf"


def text_of(path: Path) -> str:
    """The text of a yaml file, with its comments, after those of the files in its defaults list."""
    return "\n".join([*map(text_of, parts_of(path)), path.read_text(encoding="utf-8")])


def parts_of(path: Path) -> list[Path]:
    """The files that the defaults list of a yaml file names, but those of groups."""
    from omegaconf import OmegaConf

    content: Any = OmegaConf.load(path)
    names = [n for n in content.get("defaults", []) if isinstance(n, str) and n != "_self_"]
    folders = [CONF if name.startswith("/") else path.parent for name in names]
    names = [f"{name.removesuffix('@_here_').lstrip('/')}.yaml" for name in names]
    return [folder / name for folder, name in zip(folders, names, strict=True)]


def values_of(group: str) -> dict[str, dict[str, Any]]:
    """The values of each config file of a group, by name (`folder.file` in a subfolder), and of
    registered methods. Files that are only parts of others (`_*.yaml`) are left out."""
    return _files(group) | (registered_methods() if group == "method" else {})


@functools.cache
def _files(group: str) -> dict[str, dict[str, Any]]:
    folder = CONF / group
    paths = {path.relative_to(folder).with_suffix(""): path for path in folder.rglob("[!_]*.yaml")}
    return {".".join(name.parts): _read(path) for name, path in sorted(paths.items())}


def registered_methods() -> dict[str, dict[str, Any]]:
    """The content of a file of the group `method` for each method from outside, by name."""
    common = {field.name for field in dataclasses.fields(methods.Method.Config)}
    return {
        name: {"name": name} | {k: v for k, v in vars(own.Config()).items() if k not in common}
        for name, own in methods.own().items()
    }


def _read(path: Path) -> dict[str, Any]:
    from omegaconf import OmegaConf

    content: Any = OmegaConf.to_container(OmegaConf.load(path))
    content.pop("defaults", None)
    return {k: v for part in parts_of(path) for k, v in _read(part).items()} | content


@functools.cache
def default_files() -> dict[str, str]:
    """The default file of each group in pretrain.yaml."""
    from omegaconf import OmegaConf

    content: Any = OmegaConf.to_container(OmegaConf.load(CONF / "pretrain.yaml"), resolve=False)
    return {k: v for choice in content["defaults"] if choice != "_self_" for k, v in choice.items()}


def as_typed(value: Any) -> str:
    """A value as one types it on the command line: `null`, `true`, `[1,2]`."""
    if isinstance(value, list):
        return f"[{','.join(map(as_typed, value))}]"
    said = "null" if value is None else str(value)
    return said.lower() if isinstance(value, bool) else said


# ---- names of run directories

LONGEST = 60  # characters of a tag, without the "_more" at its end
_WORD = 24  # characters of one word of a tag
_SHORT = {"learning_rate": "lr", "batch_size": "batch"}


def tag(groups: dict[str, dict[str, Any]], more: str) -> str:
    """The readable tag: the method with its non-default options, then the config files of `model`
    and `train` closest to these values with the differences from them, then `more`. It consists of
    letters, digits and `._+-`, so that it needs no quotes in a shell or as `run=DIR`. It does not
    identify a run: its wording may change between versions."""
    words = []
    for group, values in groups.items():
        values = json.loads(json.dumps(values))  # tuples as lists, as in a file
        found = {
            file: _differing(values, known)
            for file, known in values_of(group).items()
            if values.get("name") == known.get("name")
        }
        default = default_files()[group]
        file = min(found, key=lambda file: (len(found[file]), file != default, file), default=None)
        if file is not None:
            words += [file] if group == "method" or file != default else []
            words += found[file]
    first, *rest = dict.fromkeys([*words, *([more] if more else [])])
    kept: list[str] = []
    for number, word in enumerate(rest):
        if len("-".join([*kept, word])) > LONGEST:
            kept.append(f"{len(rest) - number}_more")
            break
        kept.append(word)
    return "-".join([first, *kept])


def _differing(values: dict[str, Any], known: dict[str, Any]) -> list[str]:
    """A word for each key of `known` with another value here, interpolated defaults excepted."""
    words = []
    for key, default in known.items():
        value = values.get(key, default)
        if value != default and not str(default).startswith("${"):
            for long, short in _SHORT.items():
                key = key.replace(long, short)
            said = re.sub(r"[^\w.+-]+", "_", as_typed(value), flags=re.A).strip("_.")
            words.append(f"{key}_{said}"[:_WORD].rstrip("_."))
    return words
