"""Writes small evaluation tasks for the smoke tiers from the source of Python's standard library.

The files have the formats of GLUE, SQuAD, WikiText and lm-eval, so that the real loaders read them,
and questions that a tiny model can learn on a CPU. Results cannot be compared with those of these
benchmarks. The files depend only on the version of Python; nothing is downloaded.

    SST-2    is this line code, or is it from a comment?
    RTE      does the second line follow the first in the file?
    SQuAD    which function does this piece of code define?
    text     the source of one more module, for perplexity
    lm-eval  which of two lines comes next?
"""

import json
import random
import re
import shutil
import sysconfig
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from experiments.support.checkpoint import write_text

MODULES = {
    "train": ("argparse", "inspect", "tarfile", "typing", "ast", "pickle"),
    "dev": ("optparse", "configparser", "textwrap", "shlex", "pprint"),
}
TEXT = "shutil"
SIZES = {"train": 128, "dev": 64}  # number of examples
TASK = "stdlib_next_line"
LM_EVAL = Path(__file__).parents[1] / "specs" / f"{TASK}.yaml"  # the task for lm-eval
COMMENT, DEFINITION = re.compile(r"#+ "), re.compile(r"def (\w+)\(")
CODE = re.compile(r"(if|for|return|self\.|def|\w+ =) ?.*[:)\]]$")


def write(folder: Path) -> Path:
    """Write the files into `folder`, unless it exists already, and return it."""
    if folder.exists():
        return folder
    building = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    texts = {"text.txt": "\n".join(lines_of(TEXT))}
    texts |= {path: text for split in MODULES for path, text in tasks(split).items()}
    task, path = LM_EVAL.read_text(encoding="utf-8"), json.dumps(str(folder.resolve()))[1:-1]
    texts[f"lm_eval/{TASK}.yaml"] = task.replace("{folder}", path)
    for name, text in texts.items():
        write_text(building / name, text + "\n")
    with suppress(OSError):  # another process has written it meanwhile
        building.rename(folder)
    shutil.rmtree(building, ignore_errors=True)
    return folder


def lines_of(module: str) -> list[str]:
    """The lines of a module of the standard library that are not empty, without indentation."""
    path = Path(sysconfig.get_paths()["stdlib"], f"{module}.py")
    lines = path.read_text(encoding="utf-8").splitlines()
    return [" ".join(line.split()) for line in lines if line.strip()]


def tasks(split: str) -> dict[str, str]:
    """The texts of the files of a split, by path."""
    modules, size, chance = [*map(lines_of, MODULES[split])], SIZES[split], random.Random(0)
    lines = [line for module in modules for line in module if len(line) > 12]
    comments = [COMMENT.sub("", line) for line in lines if COMMENT.match(line)]
    code = [line for line in lines if CODE.match(line)]
    kinds = zip(*(chance.sample(some, size // 2) for some in (comments, code)), strict=True)
    kind_rows = [f"{line}\t{label}" for pair in kinds for label, line in enumerate(pair)]
    rows, documents = [], []
    for number in range(size):
        module, wrong = chance.choice(modules), number % 2
        at = chance.randrange(len(module) - 1)
        first, two = module[at], [module[at + 1], chance.choice(module)]
        label = "not_entailment" if wrong else "entailment"
        rows.append(f"{number}\t{first}\t{two[wrong]}\t{label}")
        choices = two[::-1] if wrong else two
        documents.append(json.dumps({"text": first, "choices": choices, "label": wrong}))
    return {
        f"SST-2/{split}.tsv": "\n".join(["sentence\tlabel", *kind_rows]),
        f"RTE/{split}.tsv": "\n".join(["index\tsentence1\tsentence2\tlabel", *rows]),
        f"{split}-v1.1.json": json.dumps(questions(modules, size)),
        f"lm_eval/{split}.jsonl": "\n".join(documents),
    }


def questions(modules: list[list[str]], size: int) -> dict[str, Any]:
    """Questions in the format of SQuAD 1.1: the context is a few lines of code, the answer the name
    of the function that they define."""
    paragraphs: list[dict[str, Any]] = []
    for module in modules:
        for at, line in enumerate(module):
            context = " ".join(module[max(0, at - 1) : at + 3])
            if (name := DEFINITION.match(line)) and len(DEFINITION.findall(context)) == 1:
                start = context.index(name.group()) + len("def ")
                question = {
                    "id": f"q{len(paragraphs)}",
                    "question": "Which function is defined?",
                    "answers": [{"text": name.group(1), "answer_start": start}],
                }
                paragraphs.append({"context": context, "qas": [question]})
    random.Random(2).shuffle(paragraphs)
    return {"version": "1.1", "data": [{"title": "stdlib", "paragraphs": paragraphs[:size]}]}
