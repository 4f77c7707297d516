"""The benchmarks of the operators, clocks, records and tables."""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from experiments.bench import decode, operators, ops, report, timing
from experiments.bench.__main__ import main
from experiments.bench.operators import OPS
from experiments.bench.report import Report, Row
from experiments.bench.timing import Time, in_turns, quantiles
from experiments.support.errors import UserError
from tests.experiments.conftest import bench

CPU = torch.device("cpu")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_every_operator_has_a_row(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ops, "CPU_SHAPE", (48, 32))
    out = tmp_path / "deep" / "cpu.json"
    assert bench("ops", out) == 0 and main(["report", str(out)]) == 0
    assert "| transposable_mask24 |" in capsys.readouterr().out
    record = json.loads(out.read_text())
    rows = {row["name"]: row for row in record["benchmarks"]["ops"]["rows"]}
    assert rows.keys() == {name for name, op in OPS.items() if not op.gpu_only}
    (left_out,) = record["benchmarks"]["ops"]["left_out"]
    assert all(name in left_out for name in OPS.keys() - rows.keys())
    for row in rows.values():
        assert (row["dtype"], row["shape"], row["clock"]) == ("float32", "48 x 32", "host")
        assert row["backend"] == "cpu" and row["p20"] <= row["ms"] <= row["p80"]
        assert row["device"] == record["device"] and row["torch"] == torch.__version__
        assert row["share"] == pytest.approx(row["limit_ms"] / row["ms"])
    # It reads numbers of four bytes and writes a byte for each; a clone moves eight.
    row = rows["nm_mask"]
    assert row["limit_ms"] == pytest.approx(row["peers"]["clone"] * 5 / 8)
    assert "| nm_mask | float32 | 48 x 32 | cpu |" in out.with_suffix(".md").read_text()
    monkeypatch.setattr(decode, "fastest", lambda *_: None)
    for most, used in ((decode.MOST, "cpu"), (2, "cusparselt_sm90")):  # four tokens are few, many
        monkeypatch.setattr(decode, "MOST", most)
        assert bench("decode", out, "--only", "4 *") == 0
        rows = json.loads(out.read_text())["benchmarks"]["decode"]["rows"]
        of = {row["name"]: row for row in rows if row["backend"] == used}
        bits = {"": 9, ", int8": 5.125, ", int4": 3.125} if used == "cpu" else {"": 9}
        assert of.keys() == {f"4 tokens{kind}" for kind in bits}
        for kind, share in bits.items():
            row = of[f"4 tokens{kind}"]
            assert row["shape"] == "128 -> 64"
            assert row["limit_ms"] == pytest.approx(row["peers"]["dense"] * share / 16)


def test_an_operator_that_differs_from_plain_pytorch_gets_no_time(monkeypatch):
    w = torch.randn(64, 64)
    for name, op in OPS.items():

        def wrong(*arguments, backend=None, op=op):
            output = op.run(*arguments, backend=backend)
            if backend != "cpu":
                first = output[-1] if isinstance(output, tuple) else output
                first = getattr(first, "buffer", first).view(-1)
                first.data[0] = first.data[0] == 0
            return output

        operators.check(name, w)
        monkeypatch.setitem(OPS, name, replace(op, run=wrong))
        with pytest.raises(UserError, match=f"{name} differs from plain PyTorch"):
            operators.check(name, w)


def test_what_a_gpu_runs_runs_here_as_well(tmp_path):
    """On the CPU; what only a GPU has is left out with its reason."""
    collected = Report("ops", CPU, tmp_path / "record.json")
    options = argparse.Namespace(device=CPU, repeats=2, quick=True)
    ops.measure([*OPS], [torch.bfloat16, torch.float32], options, collected)
    names = [(row["name"], row["dtype"]) for row in collected.rows]
    of_both = [(n, "bfloat16") for n, op in OPS.items() if not op.fp32]
    assert names == of_both + [(n, "float32") for n in OPS]
    assert any("_cslt_compress beside pack, magnitude" in text for text in collected.left_out)
    assert any("xformers beside pack both ways" in text for text in collected.left_out)
    last = collected.rows[-5]  # its weight, gradient, moments and mask, in and out, two operands
    assert last["name"] == "step, decay, pack both ways"
    assert last["figures"]["bytes a weight"] == 28 + 1 + 2 * 1.125
    assert last["figures"]["bytes a weight, separate passes"] == 13 + 28 + 5 + 2 * 1.125
    assert last["peers"].keys() == {"clone", "separate passes"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_plain_formulations_do_the_same_work(dtype):
    w = torch.randn(64, 64).to(dtype)
    for op in OPS.values():
        if op.plain:
            found, want = op.through(op.plain)(*op.prepare(w)), op.run(*op.prepare(w))
            assert all(map(operators.agree, operators.results(found), operators.results(want)))


def test_calls_take_turns_in_random_order_and_buffers_rotate():
    """In a fixed order the call after a heavy one would always pay for the lowered clock."""
    assert quantiles([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) == Time(3.5, 2.0, 5.0, "host")
    seen = []
    calls = {name: lambda i, name=name: seen.append((name, i)) for name in "abc"}
    times = in_turns(calls, CPU, repeats=40, buffers=2)
    turns = [seen[i : i + 3] for i in range(0, len(seen), 3)]
    assert [{i for _, i in turn} for turn in turns] == [{n % 2} for n in range(41)]
    orders = ["".join(name for name, _ in turn) for turn in turns[1:]]
    assert {"".join(sorted(order)) for order in orders} == {"abc"}
    neighbours = {order[:2] for order in orders} | {order[1:] for order in orders}
    assert neighbours == {"ab", "ac", "ba", "bc", "ca", "cb"}
    assert list(times) == ["a", "b", "c"] and times["a"].clock == "host"


def test_on_a_gpu_a_comparison_begins_under_load(monkeypatch):
    """With the GPU's clocks mocked: turns of all calls for SUSTAINED_S, then samples in turns, as
    many as asked for or, of long calls, as fit LIMIT_S; clock and power are read once a turn."""
    now, seen = 0.0, []
    loads = iter([(1500.0, 690.0), (1400.0, 700.0), (1450.0, 650.0)])

    def gpu_clocks(calls, buffers, graphs, steps):
        def clock(name, ms):
            def milliseconds(meanwhile):
                nonlocal now
                now += ms / 1e3
                seen.append((name, meanwhile is not None))
                if meanwhile:
                    meanwhile()
                return ms

            return milliseconds, "graph"

        return {name: clock(name, ms) for name, ms in calls.items()}

    monkeypatch.setattr(timing, "gpu_clocks", gpu_clocks)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now)
    monkeypatch.setattr(timing, "read_load", lambda: next(loads, None))
    cuda = torch.device("cuda")
    times = in_turns({"dense": 600.0, "sparse": 400.0}, cuda, repeats=3)
    assert seen[:4] == [("dense", False), ("sparse", False)] * 2
    turns = [sorted(seen[i : i + 2]) for i in (4, 6, 8)]
    assert turns == [[("dense", True), ("sparse", False)]] * 3
    assert times["sparse"] == Time(400.0, 400.0, 400.0, "graph", 1450.0, 690.0, warm_s=2.0)
    for steps, count in ((False, 2 + timing.ENOUGH), (True, timing.TURNS + 7)):
        seen.clear()
        times = in_turns({"step": 1500.0}, cuda, repeats=7, steps=steps)
        assert len(seen) == count and times["step"].mhz is None
    assert times["step"].settled and times["step"].warm_s == 1.5 * timing.TURNS
    assert not timing.settled([100.0, 100.5, 101.1])
    counted = [timing.calls_in_a_sample(*of) for of in ((180.0, 1, True), (60.0, 1, True))]
    assert counted == [timing.BLOCK_STEPS, 5]
    text = timing.load_text([1400.0, None, 1980.0], [None])
    assert text.endswith("SM clock 1,400 to 1,980 MHz, power not read")


@on_gpu
def test_calls_are_captured_unless_they_wait():
    x = torch.ones(1024, device="cuda")
    calls = {"add": lambda i: x + i, "wait": lambda i: x.sum().item()}
    times = in_turns(calls, torch.device("cuda"), repeats=2, buffers=2)
    assert (times["add"].clock, times["wait"].clock) == ("graph", "events")


def row(name="nm_mask", ms=2.0, **fields):
    return Row(name, "bfloat16", "8 x 8", "triton", Time(ms, 1.5, 2.5, "graph"), **fields)


def test_rows_of_several_runs_stand_in_one_record(tmp_path):
    """A row replaces its like as soon as it is measured; a whole run leaves none of an earlier one;
    a record is of one device."""
    out = tmp_path / "record.json"

    def run(*rows, benchmark="ops", finish=True, **options):
        collected = Report(benchmark, CPU, out, **options)
        for r in rows:
            collected.add(r)
        if finish:
            collected.finish()
        found = json.loads(out.read_text())["benchmarks"]
        return {name: [(r["name"], r["ms"]) for r in b["rows"]] for name, b in found.items()}

    assert run(row("a"), row("b")) == {"ops": [("a", 2.0), ("b", 2.0)]}
    assert run(row("b", 3.0), finish=False) == {"ops": [("a", 2.0), ("b", 3.0)]}
    both = run(row("c"), benchmark="linear")
    assert both == {"ops": [("a", 2.0), ("b", 3.0)], "linear": [("c", 2.0)]}
    assert run(row("d"), whole=True)["ops"] == [("d", 2.0)]
    run(replace(row("slope"), backend="cusparselt Y dX"), benchmark="linear")
    again = [replace(row("slope", 3.0), backend=b) for b in ("cusparselt fprop", "dense")]
    found = run(*again, benchmark="linear")["linear"]
    assert found[1:] == [("slope", 3.0), ("slope", 3.0)]  # of other products, and dense
    out.write_text(json.dumps({"device": "Abacus", "benchmarks": {}}))
    with pytest.raises(UserError, match=r"Abacus.*--out"):
        Report("ops", CPU, out)


def test_the_committed_tables_are_those_of_their_records():
    folder = Path(report.__file__).parents[1] / "bench_results"
    for name in (
        "h100",
        "h200",
        "h200_loop",
        "h200_loop_auto",
        "h200_ranks",
        "h200_ranks_auto",
        "h200_ranks_later",
        "h200_serve",
    ):
        record = report.read_record(folder / f"{name}.json")
        assert report.markdown(record) == (folder / f"{name}.md").read_text(encoding="utf-8")


def test_bad_options_are_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "list.json").write_text("[]")
    for arguments, message in {
        "ops --repeats 1": "--repeats",
        "ops --only nonsense": "matches none of: nm_mask",
        "report nowhere.json": "nowhere.json cannot be read",
        "report list.json": "list.json is not a record",
        "train --device cpu --shapes huge": "--shapes huge matches none of",
        "linear --device cpu --only step": "--only step: it needs AdamW",
    }.items():
        assert main(arguments.split()) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ") and message in line
