"""The benchmark of several ranks, with gloo."""

import json

import pytest
import torch

from experiments.bench.__main__ import main

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="times a CPU")
ROWS = ["dense, ddp", "slope, ddp", "fst, fsdp2"]
OPTIONS = ["ranks", "--quick", "--threads", "1", "--repeats", "2"]


def test_two_ranks_stand_beside_dense_of_their_kind(tmp_path, run_on_two_ranks):
    out = tmp_path / "cpu.json"
    globs = [f"{row}, GPT-2*" for row in ROWS]
    run_on_two_ranks("experiments.bench.__main__", *OPTIONS, "--out", out, "--only", *globs)
    rows = json.loads(out.read_text())["benchmarks"]["ranks"]["rows"]
    assert {row["name"] for row in rows} == {*ROWS}
    for row in rows:
        figures = row["figures"]
        assert row["peers"].keys() == ({"dense"} if "ddp" in row["name"] else set())
        assert row["backend"].endswith(f"2 x {row['name'].split(', ')[-1]}")
        assert figures["tokens/s per GPU"] == pytest.approx(64e3 / row["ms"])
        assert 0 < figures["min ms"] <= row["ms"] <= figures["max ms"]
    kernels = json.loads((tmp_path / "cpu_kernels.json").read_text())
    assert kernels.keys() == {"GPT-2 nano, 2 x 32", "GPT-2 nano, 2 x 32, host"}
    assert all(found.keys() == {*ROWS} for found in kernels.values())


def test_without_torchrun_one_device_is_alone(tmp_path):
    out = tmp_path / "cpu.json"
    assert main([*OPTIONS, "--out", str(out), "--only", "s_ste, alone, GPT*"]) == 0
    (row,) = json.loads(out.read_text())["benchmarks"]["ranks"]["rows"]
    assert (row["name"], row["backend"]) == ("s_ste, alone", "dense; FusedAdamW; 1 x alone")
