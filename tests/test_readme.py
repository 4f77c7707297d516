"""Tests that what the README shows works as it stands there; test_docs.py checks it with the other
pages."""

import re
from pathlib import Path

import torch

import methods
from models.gpt2 import GPT, GPTConfig

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
LOOP, _ = re.findall(r"```python\n(.*?)```", README, re.S)  # the other is that of transformers


def test_the_loop_runs_and_ends_sparse():
    assert len([line for line in LOOP.splitlines() if line.strip()]) <= 12
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=16, vocab_size=32, block_size=8))
    tokens = torch.randint(0, 32, (3, 4, 9))
    names = {
        "torch": torch,
        "model": model,
        "steps": 3,
        "batches": iter([{"input": t[:, :-1], "target": t[:, 1:]} for t in tokens]),
    }
    exec(LOOP, names)
    weight = model.transformer.h[0].mlp.c_fc.weight
    assert type(model.transformer.h[0].mlp.c_fc) is torch.nn.Linear
    assert int((weight.reshape(-1, 4) != 0).sum(1).max()) <= 2


def test_the_tree_names_every_package():
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    tree = contributing.split("## The tree")[1].split("```")[1]
    named = set(re.findall(r"^(\w+)/", tree, re.M))
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} | {"tests"}
    assert named == packages


def test_every_method_has_a_row():
    """Here, but for the baseline, and a section in the page of the methods."""
    table = README.split("| method | in one line |")[1].split("\n\n")[0]
    rows = [name for row in re.findall(r"^\| (`.*?) \|", table, re.M) for name in row.split(", ")]
    assert {"dense"} | {name.strip("`") for name in rows} == set(methods.available())
    page = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^## (\w+)$", page, re.M)) == set(methods.available())
