"""Which trainings are run, in which order, and what becomes of a failure."""

import json
from pathlib import Path

import pytest

from experiments import results
from experiments.errors import UserError
from reproduce.engine import clock, execute, finished, plan
from reproduce.spec import Row, Table, Tier


@pytest.fixture
def jobs(tmp_path):
    table = Table(
        name="t",
        title="T",
        tiers={"smoke": Tier(seeds=[3, 1], overrides=["train.steps=20"])},
        rows=[Row("dense", ["method=dense"]), Row("naive", ["method=ste"])],
        columns=[],
    )
    return plan(table, "smoke", tmp_path)


def test_order_and_second_call(jobs, fake_training):
    """Rows as listed, the baseline with all its seeds first; nothing is run twice."""
    said = []
    execute(jobs, said.append, fake_training)
    assert fake_training.order == [("dense", 3), ("dense", 1), ("ste", 3), ("ste", 1)]
    assert said[0] == "4 runs: 0 done already, 4 to do"
    assert said[1] == "[1/4] dense, seed 3"
    assert said[2].startswith("[2/4] dense, seed 1 (0:00 elapsed, about 0:0")
    assert [run.job for run in finished(jobs)] == jobs
    execute(jobs, said.append, fake_training)
    assert said[-1] == "4 runs: 4 done already, 0 to do"
    assert len(fake_training.order) == 4


def test_a_failure_is_one_line_and_the_rest_go_on(jobs, fake_training):
    fake_training.broken = {("dense", 1)}
    said = []
    execute(jobs, said.append, fake_training)
    assert len(fake_training.order) == 4
    trace = jobs[1].config.directory() / "failure.txt"
    assert f"failed: dense, seed 1: RuntimeError: out of memory (see {trace})" in said
    assert "Traceback" in trace.read_text(encoding="utf-8")
    assert [run.job for run in finished(jobs)] == [jobs[0], jobs[2], jobs[3]]

    # Mended, the next call runs this one alone and removes the trace.
    fake_training.order, fake_training.broken = [], set()
    execute(jobs, said.append, fake_training)
    assert fake_training.order == [("dense", 1)]
    assert not trace.exists()
    assert len(finished(jobs)) == 4


def test_a_row_that_starts_from_another_waits_for_it(tmp_path, fake_training):
    table = Table(
        name="t",
        title="T",
        tiers={"smoke": Tier(seeds=[0, 1], overrides=["train.steps=20"])},
        rows=[Row("dense", ["method=dense"]), Row("AST", ["method=ast"], starts_from="dense")],
        columns=[],
    )
    jobs = plan(table, "smoke", tmp_path)
    assert [job.config.init for job in jobs[2:]] == [job.config.directory() for job in jobs[:2]]
    assert finished(jobs) == []  # the second row has no name yet, and that is no error

    fake_training.broken = {("dense", 1)}
    said = []
    execute(jobs, said.append, fake_training)
    assert fake_training.order == [("dense", 0), ("dense", 1), ("ast", 0)]
    assert [run.job for run in finished(jobs)] == [jobs[0], jobs[2]]
    [failure] = [line for line in said if line.startswith("failed: AST")]
    assert "AST, seed 1" in failure and "holds no finished run" in failure

    fake_training.broken = set()
    execute(jobs, said.append, fake_training)
    assert [run.job for run in finished(jobs)] == jobs


def test_the_users_error_leaves_nothing_behind(jobs):
    def refuse(config, report):
        raise UserError("no corpus;\nprepare it")

    said = []
    execute(jobs[:1], said.append, refuse)
    assert "failed: dense, seed 3: no corpus; prepare it" in said
    assert not jobs[0].config.directory().exists()


def test_interrupting_stops_the_table(jobs):
    def interrupt(config, report):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(jobs, lambda message: None, interrupt)


def test_a_result_of_another_config_does_not_count(jobs, fake_training):
    execute(jobs, lambda message: None, fake_training)
    path = jobs[0].config.directory() / results.FILE
    result = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(result | {"config_hash": "f" * 16}), encoding="utf-8")
    assert [run.job for run in finished(jobs)] == jobs[1:]


def test_a_row_that_does_not_fit_is_named():
    table = Table(
        name="t",
        title="T",
        tiers={"smoke": Tier(seeds=[0])},
        rows=[Row("dense", ["method=dense"]), Row("odd", ["method=ste", "+method.beta=mse"])],
        columns=[],
    )
    with pytest.raises(UserError, match="t, tier smoke, odd: method has no key beta"):
        plan(table, "smoke", Path("runs"))


def test_clock():
    assert [clock(s) for s in (0, 59.6, 3599, 3661)] == ["0:00", "1:00", "59:59", "1:01:01"]
