"""The benchmarks of linears and training steps: what they compare, and their gates."""

import importlib.util
import json

import pytest
import torch

from experiments.bench import gates, jobs, linear, profile, train, variants
from experiments.bench.variants import VARIANTS
from experiments.support.errors import UserError
from tests.experiments.conftest import bench

CPU = torch.device("cpu")
SHAPE = (64, 16, 32)  # tokens, in, out; FP8 products take multiples of 16
HERE = [
    name for name in VARIANTS if name != variants.TORCHAO or importlib.util.find_spec("torchao")
]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(linear, "CPU_SHAPES", (SHAPE,))
    monkeypatch.setattr(jobs, "CPU_JOBS", {"tiny": jobs.gpt2("nano", 2, 8)})


def run(benchmark, tmp_path, *arguments):
    """The rows by name."""
    out = tmp_path / "cpu.json"
    assert bench(benchmark, out, *arguments) == 0
    rows = json.loads(out.read_text())["benchmarks"][benchmark]["rows"]
    return {row["name"]: row for row in rows}


def test_linear_has_every_variant_with_its_parts(tmp_path):
    rows = run("linear", tmp_path)
    assert list(rows) == HERE
    for name, row in rows.items():
        network = name in variants.NETWORKS
        shape = "64 x 16 -> 32 -> 16" if network else "64 x 16 -> 32"
        assert (row["shape"], row["dtype"]) == (shape, "float32") and row["limit_ms"] > 0
        peers = {variants.RELU2, variants.RELU2_FP8} if network else {"dense"}
        assert row["peers"].keys() == peers
        searching = {"hooks, masks chosen ms"} if name.startswith("fst") else set()
        held = {f"{part} MiB" for part in ("weights", "masks", "packed", "operands")}
        assert row["figures"].keys() == {"products ms", "hooks ms"} | searching | held
    backends = {"dense fp8": "scaled_mm", "s_ste, fp8": "simulated", "s_ste": "dense"}
    assert {name: rows[name]["backend"] for name in backends} == backends


def test_train_has_times_memory_and_a_profile(tmp_path):
    rows = run("train", tmp_path, "--only", "dense", "fst", "--fused", "--profile")
    assert list(rows) == ["dense", "fst"]
    assert rows["dense"]["figures"]["tokens/s"] == pytest.approx(16e3 / rows["dense"]["ms"])
    names = {"tokens/s", "held over dense", "weights MiB", "optimizer MiB", "held MiB", "kernels"}
    found = {name: row["figures"].keys() for name, row in rows.items()}
    assert names <= found["dense"] & found["fst"]
    searching = {"step, masks chosen ms", "step with its share of that ms"}
    assert searching <= found["fst"] - found["dense"]
    assert rows["fst"]["peers"].keys() == {"dense"}
    assert rows["fst"]["backend"] == "dense; FusedAdamW"
    own = rows["fst"]["figures"]
    kinds = [f"{kind} ms" for kind in profile.KINDS if f"{kind} ms" in own]
    assert own["kernels ms"] == pytest.approx(sum(own[kind] for kind in kinds))
    listed = json.loads((tmp_path / "cpu_kernels.json").read_text())["tiny"]["fst"]
    assert sum(kernel["ms"] for kernel in listed) == pytest.approx(own["kernels ms"])
    # 511,000 tokens of 124 million parameters in a second
    assert train.share_of_peak(6 * 124e6 * 511e3, 1000) == pytest.approx(48.1, abs=0.1)


def test_the_gate_sees_each_product(monkeypatch):
    """One that is off by a percent, with FP8, too: what that rounds is part of what is expected.
    A method without a setup has its default options."""
    expected, wrong = gates.expected, ""
    monkeypatch.setattr(gates, "expected",
        lambda *a: {k: v * (1.01 if k == wrong else 1) for k, v in expected(*a).items()},
    )  # fmt: skip
    for name in ("dense", "fst", "slope", "dense fp8", "s_ste, fp8", variants.SIMULATED, "sr_ste"):
        for wrong in variants.PRODUCTS:
            with pytest.raises(UserError, match=f"gives {wrong} for tokens"):
                linear.gate(name, SHAPE, torch.float32, CPU, "dense")
