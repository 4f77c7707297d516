"""The benchmarks of the operators; clocks, records and tables."""

import json
from pathlib import Path

import pytest
import torch

from experiments.bench import decode, operators, ops, report
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
    assert bench("decode", out, "--only", "8 *") == 0
    rows = json.loads(out.read_text())["benchmarks"]["decode"]["rows"]
    bits = {"": 9, ", int8": 5.125, ", int4": 3.125, ", packed": 9}
    for row, (kind, share) in zip(rows, bits.items(), strict=True):
        used = "cusparselt_sm90" if "packed" in kind else "cpu"
        assert row["name"] == f"8 tokens{kind}" and row["backend"] == used
        assert row["shape"] == "128 -> 64"
        assert row["limit_ms"] == pytest.approx(row["peers"]["dense"] * share / 16)


def test_the_plain_formulations_beside_an_operator_do_the_same_work():
    """In bf16, too."""
    w = torch.randn(64, 64)
    for op in OPS.values():
        for own in (w, w.bfloat16()) if op.plain else ():
            found, want = op.through(op.plain)(*op.prepare(own)), op.run(*op.prepare(own))
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
    out.write_text(json.dumps({"device": "Abacus", "benchmarks": {}}))
    with pytest.raises(UserError, match=r"Abacus.*--out"):
        Report("ops", CPU, out)


def test_the_committed_tables_are_those_of_their_records():
    folder = Path(report.__file__).parents[1] / "bench_results"
    tables = [*folder.glob("*.md")]
    for table in tables:
        record = report.read_record(table.with_suffix(".json"))
        assert report.markdown(record) == table.read_text(encoding="utf-8"), table
    assert len(tables) == 9
