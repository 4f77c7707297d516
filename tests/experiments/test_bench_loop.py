"""The benchmark of a user's own loop."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import methods
from experiments.bench import linear, loop
from experiments.bench.__main__ import main
from experiments.support.errors import UserError

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="times a CPU")


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    small = {kind: replace(one, layers=1, batch=(2, 8)) for kind, one in loop.QUICK.items()}
    monkeypatch.setattr(loop, "QUICK", small)
    monkeypatch.setattr(loop, "CALLS", 1)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run(out, *more):
    options = ["--device", "cpu", "--threads", "1", "--repeats", "2", "--out", str(out)]
    return main(["loop", *options, *more])


def test_every_row_that_runs_here_stands_beside_dense(tmp_path):
    out = tmp_path / "cpu.json"
    assert run(out) == 0
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


def test_rows_of_an_interrupted_run_are_kept_and_the_others_made(tmp_path, monkeypatch):
    out, measure = tmp_path / "cpu.json", loop.beside_dense

    def killed(own, *rest):
        if own.row == "s_ste":
            raise KeyboardInterrupt
        return measure(own, *rest)

    monkeypatch.setattr(loop, "beside_dense", killed)
    assert run(out, "--missing") == 130
    monkeypatch.setattr(loop, "beside_dense", measure)
    monkeypatch.setattr(loop, "host", None)  # its rows are there
    assert run(out, "--missing") == 0
    rows = json.loads(out.read_text())["benchmarks"]["loop"]["rows"]
    assert [row["name"] for row in rows] == [*loop.HOSTS, *loop.METHODS]


def test_the_trainer_takes_turns_with_the_loop(tmp_path):
    options = SimpleNamespace(device=torch.device("cpu"), repeats=2)
    job = loop.QUICK[""].job
    own, plain = (
        loop.Loop("tiny", job, False, "dense", options.device, "fst, Trainer") for _ in range(2)
    )
    ended = [one.converted.method for one in (own, plain)]
    row = loop.in_the_trainer(own, plain, loop.QUICK[""].batch, options)
    assert row.peers["own loop"] > 0 and row.name == "fst, Trainer" and row.time.warm_s > 0
    assert [method._order.ended for method in ended] == [3 * loop.BLOCK - 1] * 2


def test_wrong_products_get_no_time(tmp_path, monkeypatch, capsys):
    def gate(name, *_):
        if name == "s_ste":
            raise UserError(f"{name} is off")

    monkeypatch.setattr(linear, "gate", gate)
    out = tmp_path / "cpu.json"
    assert run(out, "--only", "s_ste", "slope") == 1
    assert "s_ste is off" in capsys.readouterr().err
    (row,) = json.loads(out.read_text())["benchmarks"]["loop"]["rows"]
    assert row["name"] == "slope"


def test_a_step_trains_the_model_and_ends_in_the_methods_hooks():
    own = loop.Loop("tiny", loop.QUICK[""].job, False, "dense", torch.device("cpu"), "fst")
    before = [p.detach().clone() for p in own.model.parameters()]
    for _ in range(2):
        own.step(0)
    after = [*own.model.parameters()]
    assert all(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert own.converted.method._order.ended == 1 and len(own.converted.layers) == 7
    assert type(own.optimizer) is methods.FusedAdamW
