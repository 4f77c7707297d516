"""One row of every script: its dense baseline, trained for two steps and measured as in the smoke
tier, on a small text of our own and small tasks; of speed tables the first row, at a tiny shape."""

import dataclasses
import re

import pytest

from experiments import dino
from experiments.data import parallel
from reproduce import measure
from reproduce.execute import smoke_tasks
from reproduce.execute.jobs import INPUTS, finished_runs, plan
from reproduce.execute.queue import execute
from reproduce.measure import adapters
from reproduce.render.table import render
from reproduce.specs.table import read_tables
from tests.reproduce.conftest import overridden

TABLES = read_tables()
COMMANDS = sorted({table.command for table in TABLES if table.paper})
SHORT = [
    *("train.steps=2", "train.warmup_steps=1", "train.batch_size=2", "train.log_every=1"),
    *("train.eval_every=2", "train.eval_samples=8", "impl.threads=1", "impl.checkpoint_every=0"),
]
LAYER = ["model.n_layer=1", "model.n_head=2", "model.n_embd=16"]
VIT = ["model.width=16", "model.depth=1", "model.heads=2"]
TINY = {
    "gpt2": [*LAYER, "data.name=words", "data.vocab_size=280"],
    "bert": [*LAYER, "model.n_inner=32", "data.name=masked", "data.vocab_size=100"],
    "transformer": [*LAYER, "model.n_inner=32"],
    "deit": VIT, "vit": VIT,
}  # fmt: skip
WINDOW = ["train.steps=8", "train.warmup_steps=8", "candidates=[1.0e-6,1.0e-4]"]  # of find_decay
BENCH = ["repeats=2", "threads=1"]


@pytest.fixture(scope="module")
def shared(tmp_path_factory, corpora):
    """(folder of all runs, overrides of the data), with small inputs for what is measured."""
    root, (_, data) = tmp_path_factory.mktemp("rows"), corpora
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(smoke_tasks, "SIZES", {"train": 32, "dev": 16})
        smoke_tasks.write(root / "runs" / INPUTS)
    text = root / "runs" / INPUTS / "text.txt"
    text.write_text(text.read_text(encoding="utf-8")[:2000], encoding="utf-8")
    return root / "runs", data


def short(table, data):
    """Overrides that make the table's trainings tiny."""
    if table.driver == "bench":
        text = " ".join([*table.tiers["smoke"].overrides, *table.rows[0].overrides])
        settings = measure.MEASURES[re.search(r"what=(\w+)", text)[1]]
        return [*BENCH, "batch=1"] if "batch" in settings.__dataclass_fields__ else BENCH
    overrides = [*table.tiers["smoke"].overrides, *table.rows[0].tiers.get("smoke", [])]
    [family] = {o.removeprefix("model=").partition("_")[0] for o in overrides if "model=" in o}
    needed = {"gpt2": data, "bert": data, "transformer": data[1:]}.get(family, [])
    window = WINDOW if table.driver == "find_decay" else []
    return [*SHORT, *TINY[family], *needed, *window]


def first_row(table):
    """The table with nothing but its baseline and what that starts from, for one seed."""
    tier = table.tiers["smoke"]
    baseline = next(row for row in table.rows_of("smoke") if not row.stage)
    kept = [row for row in table.rows if row is baseline or row.label == baseline.starts_from]
    # lm-eval takes long to begin: tests/experiments/evaluation/test_evaluate.py runs it.
    measure = {k: m for k, m in tier.measure.items() if "tasks" not in " ".join(m.overrides)}
    columns = [c for c in table.columns if not (c.value or "").startswith("local.")]
    variants = [dataclasses.replace(v, rows=[]) for v in tier.variants[:1]]
    small = dataclasses.replace(
        tier, seeds=[0], rows=[], started=["train.steps=1"], measure=measure, variants=variants
    )
    tiers = {name: dataclasses.replace(tier, rows=[]) for name, tier in table.tiers.items()}
    tiers["smoke"] = small
    return dataclasses.replace(table, rows=kept, columns=columns, tiers=tiers, variants=[])


@pytest.mark.parametrize("command", COMMANDS)
def test_the_baseline_of_every_script(command, shared, monkeypatch):
    runs, data = shared
    # Its fits take half a minute: tests/experiments has them.
    monkeypatch.setattr(dino, "probe", lambda *_: {"knn_top1": 50.0, "linear_top1": 60.0})
    own = {"gpt2_nano": ["train=nano", *TINY["gpt2"], *data]}
    monkeypatch.setattr(adapters, "TRAININGS", own)
    monkeypatch.setattr(parallel, "SIZES", {"test": 10, "val": 40, "train": 200})
    for table in (first_row(t) for t in TABLES if t.command == command):
        planned, said = plan(overridden(table, "smoke", short(table, data)), "smoke", runs), []
        execute(planned.jobs, said.append)
        assert all(job.result() for job in planned.jobs), "\n".join(said)
        rendered = render(table, "smoke", finished_runs(planned))
        assert "not run" not in [text for line in rendered.grid.lines for text in line.values]
        assert rendered.grid.lines and {line["tier"] for line in rendered.summary} == {"smoke"}
