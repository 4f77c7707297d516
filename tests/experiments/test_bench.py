import json
from dataclasses import replace

import pytest
import torch

from experiments import bench


@pytest.fixture
def small(monkeypatch):
    """Tiny weights, memory measured here rather than in a process of its own, threads restored."""
    monkeypatch.setattr(bench, "SHAPES", ((16, 32), (8, 32)))
    monkeypatch.setattr(bench, "LAYERS", 2)
    monkeypatch.setattr(bench, "in_fresh_process", lambda function, *args: function(*args))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_ops_writes_a_row_for_every_operator(small, tmp_path, capsys):
    out = tmp_path / "deep" / "ops.json"
    assert bench.main(["ops", "--threads", "1", "--repeats", "2", "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    assert (record["backend"], record["threads"], record["device"]) == ("naive", 1, "cpu")
    assert record["weights"] == 2 * (16 * 32 + 8 * 32)
    rows = {row["op"]: row for row in record["rows"]}
    for name, op in bench.OPS.items():
        row, clone = rows[name], rows[f"clone beside {name}"]
        assert row["limit"] == op.limit and row["p20"] <= row["median"] <= row["p80"]
        assert row["clones"] == pytest.approx(row["median"] / clone["median"])
    assert "transposable_mask24" in capsys.readouterr().out


def test_a_red_gate_reports_no_time(small, monkeypatch, tmp_path, capsys):
    out = tmp_path / "ops.json"
    wrong = replace(bench.OPS["nm_mask"], run=lambda w: torch.ones_like(w, dtype=torch.bool))
    monkeypatch.setitem(bench.OPS, "nm_mask", wrong)
    assert bench.main(["ops", "--repeats", "2", "--out", str(out)]) == 1
    captured = capsys.readouterr()
    assert "nm_mask disagrees" in captured.err and "x clone" not in captured.out
    assert not out.exists()


@pytest.mark.parametrize("name", bench.OPS)
def test_the_gate_of_every_operator_can_be_red(small, name):
    op, w = bench.OPS[name], bench.weights(1)[0]
    out = op.run(*op.prepare(w))
    assert op.agrees(w, out)
    spoiled = out.clone().flatten()
    spoiled[0] = ~spoiled[0] if out.dtype == torch.bool else spoiled[0] + 1
    assert not op.agrees(w, spoiled.view(out.shape))


def test_bad_options_are_one_line(capsys):
    assert bench.main(["ops", "--repeats", "1"]) == 1
    assert "--repeats" in capsys.readouterr().err
