"""Names run directories: the hash of the config identifies a run, a readable tag describes it.

The tag is a function of the config, but does not identify a run: its wording may change between
versions, and a run is still found under an older tag or without one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.config.yaml_files import as_typed, default_files, values_of

LONGEST = 60  # characters of a tag, without the "_more" at its end
_WORD = 24  # characters of one word of a tag
_SHORT = {"learning_rate": "lr", "batch_size": "batch"}


def find(parent: Path, digest: str, seed: int, name: Callable[[], str]) -> Path:
    """`<parent>/<name>-<digest>/seed<seed>`, or the existing directory with this digest under any
    name; if there are several, one that has this seed."""
    there = sorted(parent.glob(f"*-{digest}"), key=lambda p: (not (p / f"seed{seed}").exists(), p))
    folder = there[0] if there else parent / f"{name()}-{digest}"
    return folder / f"seed{seed}"


def name(method: dict[str, Any], model: dict[str, Any], train: dict[str, Any], more: str) -> str:
    """The readable tag: the method with its non-default options, then the config files of `model`
    and `train` closest to these values with the differences from them, then `more`. It consists of
    letters, digits and `._+-`, so that it needs no quotes in a shell or as `run=DIR`."""
    words = []
    for group, values in (("method", method), ("model", model), ("train", train)):
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
    """A word for each key of `known` that has another value here; interpolated defaults are
    skipped."""
    words = []
    for key, default in known.items():
        value = values.get(key, default)
        if value != default and not str(default).startswith("${"):
            for long, short in _SHORT.items():
                key = key.replace(long, short)
            said = re.sub(r"[^\w.+-]+", "_", as_typed(value), flags=re.A).strip("_.")
            words.append(f"{key}_{said}"[:_WORD].rstrip("_."))
    return words
