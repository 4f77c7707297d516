"""The benchmarks of a user's own loop, of several ranks with gloo, and of prefill and generation
with packed weights, whose products are emulated on the CPU."""

import json
from dataclasses import replace

import pytest
import torch

from experiments.bench import loop, serve
from models.packed import Limits
from tests.experiments.conftest import bench

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="times a CPU")


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    small = {"": loop.llama(1, 64, 128, 320, (2, 8))}
    monkeypatch.setattr(loop, "QUICK", small)
    monkeypatch.setattr(loop, "CALLS", 1)
    nano, counts = serve.SIZES["nano"], {"text": (8,), "prefill": (8,), "generation": (2,)}
    shape = {**nano.shape, "num_hidden_layers": 1}
    monkeypatch.setitem(serve.SIZES, "nano", replace(nano, shape=shape, counts=counts))
    monkeypatch.setattr(serve, "CONTEXT", 4)
    monkeypatch.setattr(serve, "NEW", 3)


def test_every_row_that_runs_here_stands_beside_dense(tmp_path):
    out = tmp_path / "cpu.json"
    assert bench("loop", out) == 0
    record = json.loads(out.read_text())["benchmarks"]["loop"]
    rows = {row["name"]: row for row in record["rows"]}
    assert list(rows) == [*loop.HOSTS, *loop.METHODS]
    for name, row in rows.items():
        assert row["peers"].keys() == {"dense"} and row["peers"]["dense"] > 0
        if name in loop.HOSTS:
            assert row["shape"] == "64 x 64 -> 64" and row["figures"].keys() == {"F.linear us"}
        else:
            assert row["shape"] == "LLaMA, 1 x 64 -> 128, 2 x 8"
            assert row["figures"]["tokens/s"] == pytest.approx(16e3 / row["ms"])
    left_out = " ".join(record["left_out"])
    assert all(name in left_out for name in loop.NAMES if name.endswith(loop.COMPILED))


def test_what_is_missing_is_made(tmp_path):
    out = tmp_path / "cpu.json"
    assert bench("loop", out, "--only", "slope") == 0
    (row,) = json.loads(out.read_text())["benchmarks"]["loop"]["rows"]
    assert bench("loop", out, "--only", "s_ste", "slope", "--missing") == 0
    rows = json.loads(out.read_text())["benchmarks"]["loop"]["rows"]
    assert [one["name"] for one in rows] == ["slope", "s_ste"] and rows[0] == row


ROWS = ["dense, ddp", "slope, ddp", "fst, fsdp2"]


def test_two_ranks_stand_beside_dense_of_their_kind(tmp_path, run_on_two_ranks):
    out = tmp_path / "cpu.json"
    globs = [f"{row}, GPT-2*" for row in ROWS]
    options = ["ranks", "--quick", "--threads", "1", "--repeats", "2", "--out", out]
    run_on_two_ranks("experiments.bench.__main__", *options, "--only", *globs)
    rows = json.loads(out.read_text())["benchmarks"]["ranks"]["rows"]
    assert {row["name"] for row in rows} == {*ROWS}
    for row in rows:
        figures = row["figures"]
        assert row["peers"].keys() == ({"dense"} if "ddp" in row["name"] else set())
        assert row["backend"].endswith(f"2 x {row['name'].split(', ')[-1]}")
        assert figures["tokens/s per GPU"] == pytest.approx(64e3 / row["ms"])
        assert 0 < figures["min ms"] <= row["ms"] <= figures["max ms"]


def test_every_variant_that_runs_here_has_its_rows(tmp_path, monkeypatch):
    """The limits, which only a GPU has, are set."""
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
            assert row["backend"] == {"dense": "dense", "packed": "cusparselt_sm90"}.get(
                variant, "cusparselt_sm90" if variant == "chosen" else "few"
            )
            assert row["figures"]["tokens/s"] == pytest.approx(1e3 * made / row["ms"])
            assert row["peers"].keys() == {"dense"}
    # 64 -> 32 has too few rows for cuSPARSELt, and stays dense.
    assert rows.pop(("few", "LLaMA nano, 64 -> 32"))["figures"] == {}
    assert rows.pop(("crossover", "LLaMA nano, 64 -> 128"))["figures"] == {"tokens": 5}
    assert len(rows) == 6
