"""What the README shows works as it stands there."""

import re
from pathlib import Path

import torch

import methods
from common_kernels import nm_mask
from models.gpt2 import GPT, GPTConfig

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
LOOP, ACCELERATION, PACKING = re.findall(r"```python\n(.*?)```", README, re.S)


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


def test_acceleration_is_asked_for_as_shown(capsys, monkeypatch):
    """Where nothing is faster, nothing changes."""
    monkeypatch.delenv("SPARSE24_MATMUL", raising=False)
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=64, vocab_size=32, block_size=8))
    exec(
        ACCELERATION,
        {"torch": torch, "model": model, "method": methods.build("t_sr_ste", total_steps=6)},
    )
    assert "transformer.h.0.mlp.c_fc" in capsys.readouterr().out


def test_a_matrix_is_packed_and_multiplied_as_shown():
    torch.manual_seed(0)
    w, x = torch.randn(64, 128).bfloat16(), torch.randn(3, 5, 128).bfloat16()
    names = {"w": w, "x": x, "bias": torch.ones(64).bfloat16()}
    exec(PACKING, names)
    pruned = torch.where(nm_mask(w), w, 0)
    want = x.float() @ pruned.float().t() + 1
    assert (names["y"].float() - want).abs().max() <= 2**-8 * want.abs().max()
    assert torch.equal(names["weight"].to_dense(), pruned)


def test_the_tree_names_every_folder_of_the_house():
    tree = README.split("## The house")[1].split("```")[1]
    named = set(re.findall(r"^(\w+)/", tree, re.M))
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} | {"tests"}
    assert named == packages


def test_every_method_has_a_row():
    """Here, and a section in the page of the methods."""
    table = README.split("## The methods")[1].split("## In your own loop")[0]
    rows = [name for row in re.findall(r"^\| (`.*?) \|", table, re.M) for name in row.split(", ")]
    assert {re.match(r"`(\w+)`", name)[1] for name in rows} == set(methods.available())
    page = (ROOT / "methods" / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^## (\w+)$", page, re.M)) == set(methods.available())
