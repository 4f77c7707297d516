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
    try:
        for split, names in {"train": TRAIN, "dev": DEV}.items():
            modules, size = [*_modules(names)], SIZES[split]
            _table(building / "SST-2" / f"{split}.tsv", "sentence\tlabel", _kinds(modules, size))
            header = "index\tsentence1\tsentence2\tlabel"
            _table(building / "RTE" / f"{split}.tsv", header, _followers(modules, size))
            _json(building / f"{split}-v1.1.json", _questions(modules, size))
            if split == "dev":
                _lm_eval(building / "lm_eval", folder / "lm_eval", modules, size)
        (building / "text.txt").write_text("\n".join(*_modules([TEXT])), encoding="utf-8")
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            from experiments.support.checkpoint import publish  # which imports torch

            publish(building, folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process has written it meanwhile
                raise
    finally:
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
    for label, some in enumerate((comments, code)):
        generator.shuffle(some)
        some[:] = [f"{line}\t{label}" for line in some[: size // 2]]
    pairs = [line for pair in zip(comments, code, strict=False) for line in pair]
    yield from (line.split("\t") for line in pairs)


def _followers(modules: list[list[str]], size: int) -> Iterator[list[str]]:
    """Yields [number, line, second line, label]; the second line is the next one or a random one
    of the module."""
    generator = random.Random(1)
    for number in range(size):
        module = generator.choice(modules)
        at = generator.randrange(len(module) - 1)
        follows = number % 2 == 0
        second = module[at + 1] if follows else generator.choice(module)
        yield [str(number), module[at], second, "entailment" if follows else "not_entailment"]


def _questions(modules: list[list[str]], size: int) -> dict[str, Any]:
    """Questions in the format of SQuAD 1.1: the context is a few lines of code, the answer the name
    of the function that they define."""
    found = []
    for module in modules:
        for at, line in enumerate(module):
            name = DEFINITION.match(line)
            context = " ".join(module[max(0, at - 1) : at + 3])
            if name and len(DEFINITION.findall(context)) == 1:
                start = context.index(name.group()) + len("def ")
                answer = {"text": name.group(1), "answer_start": start}
                found.append({"context": context, "answers": [answer]})
    random.Random(2).shuffle(found)
    paragraphs = [
        {
            "context": entry["context"],
            "qas": [
                {
                    "id": f"q{number}",
                    "question": "Which function is defined?",
                    "answers": entry["answers"],
                }
            ],
        }
        for number, entry in enumerate(found[:size])
    ]
    return {"version": "1.1", "data": [{"title": "stdlib", "paragraphs": paragraphs}]}


def _lm_eval(folder: Path, final: Path, modules: list[list[str]], size: int) -> None:
    """Write a multiple-choice task of lm-eval with its data. final: the path that the folder will
    have when all files are written."""
    generator, documents = random.Random(3), []
    for number in range(size):
        module = generator.choice(modules)
        at = generator.randrange(len(module) - 1)
        right, wrong = module[at + 1], generator.choice(module)
        choices = [right, wrong] if number % 2 else [wrong, right]
        documents.append({"text": module[at], "choices": choices, "label": choices.index(right)})
    folder.mkdir(parents=True)
    data = "\n".join(map(json.dumps, documents)) + "\n"
    (folder / "documents.jsonl").write_text(data, encoding="utf-8")
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
    _json(folder / f"{TASK}.yaml", task)  # JSON is YAML


def _table(path: Path, header: str, rows: Iterator[list[str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    clean = ["\t".join(" ".join(field.split()) for field in row) for row in rows]
    path.write_text("\n".join([header, *clean]) + "\n", encoding="utf-8")


def _json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
