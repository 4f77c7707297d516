"""The benchmark of prefill and generation with packed weights; products are emulated on the CPU."""

import json
from dataclasses import replace

import pytest
import torch

from experiments.bench import serve
from models.packed import Limits, PackedProduct
from tests.experiments.conftest import bench

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="emulates what a GPU runs")


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    shape = {**serve.SIZES["nano"].shape, "num_hidden_layers": 1}
    size = replace(serve.SIZES["nano"], shape=shape, tokens=(8,), sequences=(2,))
    monkeypatch.setitem(serve.SIZES, "nano", size)
    monkeypatch.setattr(serve, "CONTEXT", 4)
    monkeypatch.setattr(serve, "NEW", 3)


def test_every_variant_that_runs_here_has_its_rows(tmp_path, monkeypatch, capsys):
    """The limits, which only a GPU has, are set. Wrong products get no time."""
    pack = serve.pack
    monkeypatch.setattr(
        serve, "pack", lambda model, limits, graphs: pack(model, limits or Limits(1, 5))
    )
    out = tmp_path / "cpu.json"
    assert bench("serve", out, "--thorough") == 0
    record = json.loads(out.read_text())["benchmarks"]["serve"]
    rows = {(row["name"], row["shape"]): row for row in record["rows"]}
    for work, shape, made in (
        ("text", "8 tokens and 3 new ones", 3), ("prefill", "8 tokens", 8),
        ("generation", "2 sequences", 2),
    ):  # fmt: skip
        for variant in serve.THOROUGH[work]:
            row = rows.pop((f"{work}, {variant}", f"LLaMA nano, {shape}"))
            assert row["backend"] == {"dense": "dense", "few": "few", "int4": "few"}.get(
                variant, "cusparselt_sm90"
            )
            assert row["figures"]["tokens/s"] == pytest.approx(1e3 * made / row["ms"])
            assert row["peers"].keys() == {"dense"}
    # 64 -> 32 has too few rows for cuSPARSELt, and stays dense.
    assert rows.pop(("few", "LLaMA nano, 64 -> 32"))["figures"] == {}
    assert rows.pop(("crossover", "LLaMA nano, 64 -> 128"))["figures"] == {"tokens": 5}
    assert len(rows) == 6
    monkeypatch.setattr(PackedProduct, "forward", lambda self, x: 0 * x @ self.weight.t())
    assert bench("serve", tmp_path / "wrong.json", "--only", "prefill, packed") == 1
    assert "packed disagrees with dense: off by" in capsys.readouterr().err
    assert not (tmp_path / "wrong.json").exists()
