"""Write docs/configuration.md from the dataclasses: `python docs/make_configuration.py`."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import GenericAlias
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import methods  # noqa: E402
from experiments.config.initial import HFConfig  # noqa: E402
from experiments.config.settings import ImplConfig, TrainConfig  # noqa: E402
from experiments.config.yaml_files import CONF, as_typed, parts_of  # noqa: E402
from experiments.data.corpus import DataConfig  # noqa: E402
from experiments.data.mlm import MLMConfig  # noqa: E402
from experiments.data.parallel import PairsConfig  # noqa: E402
from experiments.finetuning.config import Recipe  # noqa: E402
from experiments.images.dataset import ImageConfig  # noqa: E402
from methods.nn import base  # noqa: E402
from models.bert import BertConfig  # noqa: E402
from models.dino import DinoConfig  # noqa: E402
from models.gpt2 import GPTConfig  # noqa: E402
from models.transformer import TransformerConfig  # noqa: E402
from models.vit import ViTConfig  # noqa: E402

PAGE = ROOT / "docs" / "configuration.md"
INTRODUCTION = """\
# Configuration reference

<!-- written by python docs/make_configuration.py -->

Every key that a config of a training can have, with its type and the default of its dataclass. A
key is set on the command line as `group.key=value`. The files of a group (`group=CHOICE`) are in
`experiments/conf/` and set most keys to something else; *required* keys are always set by such a
file. `--help` of a driver shows the values that a choice of files gives; `--cfg job` prints the
whole config. Python takes the same names: `methods.build("s_ste", gamma=0.5)`.
"""
# The heading, the dataclass, and the files of conf/ whose comments say what a key means.
GROUPS: list[tuple[str, type, list[str]]] = [
    ("train", TrainConfig, ["train/_common", "train/nano"]),
    ("impl", ImplConfig, ["impl/default"]),
    ("data: causal text", DataConfig, ["data/_text", "data/stdlib"]),
    ("data: masked text", MLMConfig, ["data/_mlm", "data/stdlib_mlm"]),
    ("data: pairs of sentences", PairsConfig, ["data/_pairs", "data/numbers"]),
    ("data: images", ImageConfig, ["data/imagenet", "data/digits"]),
    ("model: gpt2", GPTConfig, ["model/_gpt2"]),
    ("model: bert", BertConfig, ["model/_bert"]),
    ("model: transformer", TransformerConfig, ["model/_transformer"]),
    ("model: vit", ViTConfig, ["model/_vit"]),
    ("model: hf", HFConfig, ["model/hf"]),
    ("dino", DinoConfig, ["dino/nano"]),
    ("recipe, of finetune", Recipe, ["recipe/nano"]),
]


def comments(path: Path) -> dict[str, str]:
    """The comments after the options of a yaml file and of the files in its defaults list, by
    dotted key."""
    if not path.is_file():
        return {}
    found = {k: v for part in parts_of(path) for k, v in comments(part).items()}
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


def default(field: dataclasses.Field[Any]) -> str:
    """The default of a field as one types it on the command line."""
    value = field.default
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    if value is not dataclasses.MISSING:
        return f"`{as_typed(list(value) if isinstance(value, tuple) else value)}`"
    return "*required*"


def section(title: str, schema: type, files: list[str], without: frozenset[str]) -> Iterator[str]:
    """The lines of one dataclass: heading and table of the fields but for `without`."""
    said: dict[str, str] = {}
    for name in files:
        said |= comments(CONF / f"{name}.yaml")
    yield f"\n## {title}"
    rows = [field for field in dataclasses.fields(schema) if field.name not in without]
    if not rows:
        yield ""
        yield "No keys but those of every method."
        return
    yield ""
    yield "| key | type | default | meaning |"
    yield "|---|---|---|---|"
    for field in rows:
        generic = isinstance(field.type, GenericAlias)  # tuple[str, ...] is named tuple
        name = field.type if generic else getattr(field.type, "__name__", field.type)
        kind = str(name).replace("|", "\\|")
        meaning = said.get(field.name, "").replace("|", "\\|").replace("<", "&lt;")
        yield f"| `{field.name}` | {kind} | {default(field)} | {meaning} |"


def page() -> str:
    """The whole page."""
    lines = [INTRODUCTION.rstrip()]
    for title, schema, files in GROUPS:
        lines += section(title, schema, files, frozenset())
    common = base.Config
    lines += section("method: every method", common, ["method/_common"], frozenset())
    shared = frozenset(field.name for field in dataclasses.fields(common))
    for name in methods.available():
        schema = methods.module(name).Config
        lines += section(f"method: {name}", schema, [f"method/{name}"], shared)
    return "\n".join(line.rstrip() for line in lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
