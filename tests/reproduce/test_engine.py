"""Tests of which jobs are run, in which order, and what becomes of a failure."""

import json
import shlex
import sys

import torch

from common_kernels.pack import cusparselt
from experiments import evaluate, finetune
from experiments.support import results
from reproduce.__main__ import main
from reproduce.execute.jobs import Job, Place, finished_runs, plan, quoted
from reproduce.execute.queue import commands, execute
from reproduce.specs.table import Measure, TableRow, Variant, read_tables


def names(planned):
    return [str(job) for job in planned.jobs]


def test_order_and_second_call(small, tmp_path, fake):
    """Rows as listed, the baseline with all its seeds first; nothing is run twice. A path may hold
    what hydra gives a meaning."""
    odd = tmp_path / "it's a=b, {c}"
    planned, said = plan(small(), "smoke", odd), []
    assert planned.jobs[0].config.runs == odd
    order = ["dense, seed 3", "dense, seed 1", "naive, seed 3", "naive, seed 1"]
    assert names(planned) == order
    execute(planned.jobs, said.append)
    assert fake.order == order and said[1] == "dense, seed 3 ..."
    assert said[4].startswith("[2/4] dense, seed 1: val_loss 1.0000, 2000.0 ms a step, 0 s (0:00:")
    assert [str(run.place) for run in finished_runs(planned)] == order
    execute(planned.jobs, said.append)
    assert said[-1] == "4 runs: 4 done already, 0 to do"
    assert len(fake.order) == 4


def test_a_failure_is_one_line_and_the_rest_go_on(small, tmp_path, fake):
    planned, said = plan(small(), "smoke", tmp_path), []
    fake.broken = {"dense, seed 1"}
    execute(planned.jobs, said.append)
    assert len(fake.order) == 4
    trace = planned.jobs[1].config.directory() / "output.txt"
    assert f"failed: dense, seed 1: RuntimeError: out of memory (see {trace})" in said
    assert "Traceback" in trace.read_text(encoding="utf-8")
    assert [run.place.seed for run in finished_runs(planned)] == [3, 3, 1]

    # Mended, the next call runs this one alone.
    fake.order, fake.broken = [], set()
    execute(planned.jobs, said.append)
    assert fake.order == ["dense, seed 1"] and len(finished_runs(planned)) == 4


def test_no_speed_table_is_made_of_dense_products(tmp_path, fake, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Toy")
    for function in ("library", "handle"):
        monkeypatch.setattr(cusparselt, function, lambda *_: None)
    old = "compute capability 8.0 or later, this GPU has (7, 5)"
    for name, capability, reason in (
        ("fst_figure7", (7, 5), old), ("fst_figure7", (8, 0), ""), ("ast_table6", (7, 5), old),
        ("ast_table6", (8, 6), ""), ("fst_table4", (7, 5), ""),
    ):  # fmt: skip
        monkeypatch.setattr("common_kernels.backend.capability", lambda _, c=capability: c)
        fake.order, said = [], []
        table = next(table for table in read_tables() if table.name == name)
        execute(plan(table, "full", tmp_path / f"{name}{capability}").jobs, said.append)
        assert bool(fake.order) == (not reason) and reason in said[1]
        assert said[1].startswith("nothing is run: ") == bool(reason)


CHAIN = [TableRow("dense", ["method=dense"]), TableRow("AST", ["method=ast"], starts_from="dense")]


def there(config):
    """The result of `finished` of a measuring driver, without its checks of data and weights."""
    path = config.directory() / results.FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def test_a_chain_of_training_retraining_and_measurements(small, tmp_path, fake, monkeypatch):
    """A run that follows an unfinished one has no name yet; if that one fails, the rest waits."""
    for driver in (evaluate, finetune):
        monkeypatch.setattr(driver, "finished", there)
    measure = {
        "glue": Measure("finetune", ["recipe=nano"], ["cola", "rte"]),
        "text": Measure("evaluate", ["ppl='{inputs}/text.txt'"]),
    }
    (tmp_path / "smoke_tasks").mkdir()
    (tmp_path / "smoke_tasks" / "text.txt").write_text("two of four", encoding="utf-8")
    planned = plan(small(CHAIN, [0], measure), "smoke", tmp_path)
    parts = ["", ", glue.cola", ", glue.rte", ", text"]
    order = [f"{row}, seed 0{part}" for row in ("dense", "AST") for part in parts]
    assert sorted(names(planned)) == sorted(order)
    assert [job.config is None for job in planned.jobs] == [False] + [True] * 7
    assert finished_runs(planned) == []

    fake.broken, said = {"dense, seed 0"}, []
    execute(planned.jobs, said.append)
    assert fake.order == ["dense, seed 0"]
    assert said[-1] == "left out: 7 runs that start there"

    fake.order, fake.broken = [], {"AST, seed 0, text"}
    execute(planned.jobs, said.append)
    assert sorted(fake.order) == sorted(order)
    dense, ast = finished_runs(planned)
    assert sorted(dense.measures) == ["glue.cola", "glue.rte", "text"]
    assert sorted(ast.measures) == ["glue.cola", "glue.rte"]
    training, retraining = (planned.places[Place("", row, 0)][0] for row in ("dense", "AST"))
    assert retraining.config.init == training.config.directory()
    task = planned.places[Place("", "AST", 0)][1]["glue.rte"].config
    assert (task.task, task.source) == ("rte", retraining.config.directory())


def test_stages_and_pretrained_models(small, tmp_path):
    """A stage is trained and not measured; a model that comes trained needs no first run."""
    rows = [
        TableRow("first", ["method=dense"], stage=True),
        TableRow("dense", ["method=dense"], starts_from="first"),
    ]
    table = small(rows, [0], {"glue": Measure("finetune", [], ["cola"])})
    planned = plan(table, "smoke", tmp_path)
    assert names(planned) == ["first, seed 0", "dense, seed 0", "dense, seed 0, glue.cola"]
    table = small(CHAIN, [0])
    table.tiers["smoke"].pretrained = True
    assert [job.source for job in plan(table, "smoke", tmp_path).jobs] == [None, None]


def test_equal_work_is_done_once(small, tmp_path):
    """Variants that change nothing for a row share its run; `{variant}` is a variant's key."""
    sparse = TableRow("S-STE", ["method=s_ste", "method.gamma={variant}"])
    rows = [TableRow("dense", ["method=dense"]), sparse]
    variants = [Variant("zero", "0.0"), Variant("half", "0.5")]
    variants.append(Variant("none", "1.0", rows=["dense"]))
    planned = plan(small(rows, [0], variants=variants), "smoke", tmp_path)
    assert names(planned) == ["zero, dense, seed 0", "zero, S-STE, seed 0", "half, S-STE, seed 0"]
    assert [job.config.method_options.gamma for job in planned.jobs[1:]] == [0.0, 0.5]
    assert len(planned.places) == 5


def test_overrides_come_from_tier_variant_and_row_in_this_order(small, tmp_path):
    rows = [
        TableRow("dense", ["method=dense"]),
        TableRow("own", ["method=ste", "train.steps=8"], {"smoke": ["train.steps=9"]}),
    ]
    rows[1].starts_from = "dense"
    table = small(rows, [0], variants=[Variant("v", overrides=["train.steps=6"])])
    table.tiers["smoke"].started = ["train.steps=7", "train.log_every=5"]
    dense, own = (job.compose(None) for job in plan(table, "smoke", tmp_path).jobs)
    assert (dense.train.steps, dense.train.log_every) == (6, 10)
    assert (own.train.steps, own.train.log_every) == (9, 5)


def test_commands_are_those_that_are_left(small, tmp_path, fake, capsys):
    jobs = plan(small(CHAIN, [0]), "smoke", tmp_path).jobs
    words = ["torchrun", "--nproc_per_node=8"]
    _, dense, _, ast = commands(jobs, words)
    assert dense.startswith("torchrun --nproc_per_node=8 -m experiments.pretrain train.steps=20 ")
    assert f"init={quoted(jobs[0].config.directory())}" in shlex.split(ast)
    execute(jobs[:1], str)
    assert len(commands(jobs, [])) == 2
    options = ["quickstart", f"launch={sys.executable} -u", "commands"]
    assert main(options, runs=tmp_path / "none") == 0
    assert capsys.readouterr().out.count(f"\n{sys.executable} -u -m experiments.") >= 6
    assert not [*(tmp_path / "none").rglob("result.json")]
    # A measurement has one process, whatever starts a training.
    measuring = Job("m", "evaluate", [], tmp_path, jobs[0], "run")
    assert measuring.command(words)[:3] == [sys.executable, "-m", "experiments.evaluate"]
