"""Writes small evaluation tasks for the smoke tiers, made from the source of the Python standard
library.

The files have the formats of GLUE, SQuAD, WikiText and lm-eval, so that the real loaders read them,
and questions that a tiny model can learn on a CPU. They are not these benchmarks, and results on
them cannot be compared with results on the benchmarks. They depend only on the version of Python;
nothing is downloaded.

    SST-2    is this line code, or is it from a comment?
    RTE      does the second line follow the first in the file?
    SQuAD    which function does this piece of code define?
    text     the source of one more module, for perplexity
    lm-eval  which of two lines comes next?
"""

from __future__ import annotations

import json
import random
import re
import shutil
import sysconfig
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

TRAIN = ("argparse", "inspect", "tarfile", "typing", "ast", "pickle", "zipfile/__init__", "zipfile")
DEV = ("optparse", "configparser", "textwrap", "shlex", "pprint")
TEXT = "shutil"
SIZES = {"train": 128, "dev": 64}  # greatest number of examples
TASK = "stdlib_next_line"
COMMENT, DEFINITION = re.compile(r"#+ "), re.compile(r"def (\w+)\(")
CODE = re.compile(r"(if|for|return|self\.|def|\w+ =) ?.*[:)\]]$")


def write(folder: Path) -> Path:
    """Write the files into `folder`, unless it exists already, and return it."""
    if folder.exists():
        return folder
    building = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    for split, names in {"train": TRAIN, "dev": DEV}.items():
        modules, size = [*_modules(names)], SIZES[split]
        _table(building / "SST-2" / f"{split}.tsv", "sentence\tlabel", _kinds(modules, size))
        header = "index\tsentence1\tsentence2\tlabel"
        _table(building / "RTE" / f"{split}.tsv", header, _followers(modules, size))
        _write(building / f"{split}-v1.1.json", json.dumps(_questions(modules, size)))
    _lm_eval(building / "lm_eval", folder / "lm_eval", modules, size)
    _write(building / "text.txt", "\n".join(*_modules([TEXT])))
    with suppress(OSError):  # another process has written it meanwhile
        building.rename(folder)
    shutil.rmtree(building, ignore_errors=True)
    return folder


def _modules(names: Any) -> Iterator[list[str]]:
    """Yields the lines, without indentation, of each module that this version of Python has."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for name in names:
        path = root / f"{name}.py"
        if path.is_file():
            lines = path.read_text(encoding="utf-8").splitlines()
            yield [" ".join(line.split()) for line in lines if line.strip()]


def _kinds(modules: list[list[str]], size: int) -> Iterator[list[str]]:
    """Yields [line, label] for comments (0) and lines of code (1), as many of each."""
    lines = [line for module in modules for line in module if len(line) > 12]
    comments = [COMMENT.sub("", line) for line in lines if COMMENT.match(line)]
    code = [line for line in lines if CODE.match(line)]
    generator = random.Random(0)
    for some in (comments, code):
        generator.shuffle(some)
    for comment, line in zip(comments[: size // 2], code, strict=False):
        yield from ([comment, "0"], [line, "1"])


def _followers(modules: list[list[str]], size: int) -> Iterator[list[str]]:
    """Yields [number, line, second line, label]; the second line is the next one or a random one
    of the module."""
    generator = random.Random(1)
    for number in range(size):
        first, following, other = _next(modules, generator)
        second, label = (other, "not_entailment") if number % 2 else (following, "entailment")
        yield [str(number), first, second, label]


def _next(modules: list[list[str]], generator: random.Random) -> tuple[str, str, str]:
    """A random line, the next one, and another one of the same module."""
    module = generator.choice(modules)
    at = generator.randrange(len(module) - 1)
    return module[at], module[at + 1], generator.choice(module)


def _questions(modules: list[list[str]], size: int) -> dict[str, Any]:
    """Questions in the format of SQuAD 1.1: the context is a few lines of code, the answer the name
    of the function that they define."""
    paragraphs: list[dict[str, Any]] = []
    for module in modules:
        for at in range(len(module)):
            name = DEFINITION.match(module[at])
            context = " ".join(module[max(0, at - 1) : at + 3])
            if name and len(DEFINITION.findall(context)) == 1:
                start = context.index(name.group()) + len("def ")
                question = {
                    "id": f"q{len(paragraphs)}",
                    "question": "Which function is defined?",
                    "answers": [{"text": name.group(1), "answer_start": start}],
                }
                paragraphs.append({"context": context, "qas": [question]})
    random.Random(2).shuffle(paragraphs)
    return {"version": "1.1", "data": [{"title": "stdlib", "paragraphs": paragraphs[:size]}]}


def _lm_eval(folder: Path, final: Path, modules: list[list[str]], size: int) -> None:
    """Write a multiple-choice task of lm-eval with its data. final: the path that the folder will
    have when all files are written."""
    generator, documents = random.Random(3), []
    for number in range(size):
        first, right, wrong = _next(modules, generator)
        choices = [right, wrong] if number % 2 else [wrong, right]
        documents.append({"text": first, "choices": choices, "label": choices.index(right)})
    _write(folder / "documents.jsonl", "\n".join(map(json.dumps, documents)))
    task = {
        "task": TASK,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"validation": str(final.resolve() / "documents.jsonl")}},
        "output_type": "multiple_choice",
        "validation_split": "validation",
        "doc_to_text": "{{text}}",
        "target_delimiter": " ",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{label}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    _write(folder / f"{TASK}.yaml", json.dumps(task))  # JSON is YAML


def _table(path: Path, header: str, rows: Iterator[list[str]]) -> None:
    _write(path, "\n".join([header, *("\t".join(row) for row in rows)]))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")
