"""Spec files: those of the repository, and what is wrong with others."""

import dataclasses
import functools
import importlib
import re
import textwrap
from pathlib import Path

import pytest
import yaml

import common_kernels
import experiments
from experiments.finetuning import glue
from experiments.support.errors import UserError
from experiments.support.typed import typed
from reproduce.execute import jobs
from reproduce.execute.blocks import Block
from reproduce.execute.jobs import Job, plan
from reproduce.judge.claims import Claim
from reproduce.measure import layers
from reproduce.specs.table import Table, read_table, read_tables

TABLES = {table.name: table for table in read_tables()}
OFFERED = [
    (name, tier)
    for name, table in TABLES.items()
    for tier, what in table.tiers.items()
    if not what.unavailable and not what.block
]
SEED = 7
TRAINED = ("pretrain", "dino", "translate")  # whose first row is the dense baseline
# What FP8 scales are taken over is said by the rows that have FP8.
TRAINED_BY = r"(experiment|model|data|train|model\.path|model\.block_size)=|train\.(?!fp8_samples)"
CONF = Path(experiments.__file__).parent / "conf"


@pytest.fixture(scope="module")
def gpt2_folder(tmp_path_factory, hf_model):
    """A tiny checkpoint in the place of those on the hub."""
    folder = tmp_path_factory.mktemp("hub")
    hf_model("gpt2").save_pretrained(folder)
    return folder


composed: set[tuple[str, ...]] = set()  # tables and rows share most of their configs


@pytest.mark.parametrize(("name", "tier"), OFFERED)
def test_every_job_of_every_tier_is_a_config(name, tier, tmp_path, gpt2_folder, monkeypatch):
    """Composed through the driver, and of the tier and seed that were asked for: one of each
    driver, from random weights and from others'. test_full.py composes the rows of full tiers."""
    table = TABLES[name]
    chosen = dataclasses.replace(table.tiers[tier], seeds=[SEED])
    monkeypatch.setattr(Job, "config", object())  # which `plan` composes for its check
    monkeypatch.setattr(Job, "compose", lambda *_: None)
    planned = plan(dataclasses.replace(table, tiers={**table.tiers, tier: chosen}), tier, tmp_path)
    assert len(planned.places) * len(table.tiers[tier].seeds) == len(list(table.trainings(tier)))
    if table.driver != "bench":
        for path in (f for job in planned.jobs for o in job.overrides for f in _files(o)):
            assert path.is_file()
    monkeypatch.undo()
    first = table.variants_of(tier)[0].label  # the others differ by which file they name
    jobs_of_first = [job for job in planned.jobs if job.label.startswith(first)]
    for job in {(job.driver, job.source is None): job for job in jobs_of_first}.values():
        job.overrides = [_local(o, gpt2_folder) for o in job.overrides]
        key = (job.driver, *map(_kind, job.overrides))
        if key not in composed:
            config = job.compose(None if job.source is None else tmp_path / "unfinished")
            trained = getattr(config, "config", config)  # of a search for decay factors
            assert (trained.seed, trained.tier) == (SEED, tier)
        composed.add(key)
    for measure in chosen.measure.values():
        assert set(measure.tasks) <= {*glue.TASKS, "squad"}


def _kind(override):
    """An override without its value, unless that chooses a file: composed alike with any value."""
    key, _, _ = override.partition("=")
    return override if any(_files(override)) else key


def _files(override):
    """The files of conf/ that an override names."""
    group, _, name = override.partition("=")
    if group in ("experiment", "model", "data", "train", "impl", "method", "recipe"):
        yield CONF / group / f"{name}.yaml"


def _local(override, folder):
    """The override, with a tiny model in place of what comes from the hub."""
    local = {"model.path=": folder, "model.block_size=": 32, "data.tokenizer=": "wordpiece"}
    for key, value in local.items():
        if override.startswith(key):
            return f"{key}{value}"
    return override


FOLLOWS = {"total_steps", "seed", "measure_every"}  # options that follow the run


def changed_options(config):
    """The settings of its method that a run changes, but for what follows the run."""
    defaults, options = importlib.import_module(f"methods.{config.method}").Config(), {}
    for name in {f.name for f in dataclasses.fields(defaults)} - FOLLOWS:
        if (own := getattr(config.method_options, name)) != getattr(defaults, name):
            options[name] = own
    return options


def options(name, tier, tmp_path, variant=None):
    """row -> (method, what it changes of the method's defaults), of the first seed's trainings."""
    table = TABLES[name]
    overrides = [_local(o, tmp_path) for o in table.tiers[tier].overrides]
    chosen = dataclasses.replace(
        table.tiers[tier], seeds=[0], rows=[], measure={}, overrides=overrides
    )
    if variant:
        found = [v for v in table.variants_of(tier) if v.label == variant]
        chosen = dataclasses.replace(chosen, variants=found)
    planned = plan(dataclasses.replace(table, tiers={**table.tiers, tier: chosen}), tier, tmp_path)
    configs = {
        place.row: job.compose(tmp_path / "unfinished") if job.source else job.config
        for place, (job, _) in planned.places.items()
    }
    return {row: (config.method, changed_options(config)) for row, config in configs.items()}


# The method of each row, and what it changes of the method's defaults.
QUICKSTART = {
    "dense": ("dense", {}), "dense, half width": ("dense", {}),
    "STE": ("ste", {}), "SR-STE": ("sr_ste", {"alpha": 2e-2}),
    "FST": ("fst", {"alpha": 1e-2}), "S-STE": ("s_ste", {}),
    "S-STE, no MVUE": ("s_ste", {"mvue": "off"}),
    "SLoPe": ("slope", {"include": ("*mlp.*",)}), "semi-sparse (torchao)": ("semi_sparse", {}),
    "dense, trained on": ("dense", {}), "AST, from dense": ("ast", {}),
}  # fmt: skip


def test_the_rows_of_the_quickstart_train_what_they_say(tmp_path):
    """Labels are printed beside numbers: a row with the overrides of another would be a lie."""
    assert options("quickstart", "smoke", tmp_path) == QUICKSTART


def test_published_settings_of_fst_are_what_their_labels_say(tmp_path):
    """Decay factors by model (the authors' page), what BERT's rows are, and when they end."""
    for size, alpha in {"774M": 6e-5, "1558M": 2e-4}.items():
        rows = options("fst_table6", "full", tmp_path, f"GPT-2 {size}")
        changed = {} if alpha == 6e-5 else {"alpha": alpha}
        assert rows == {"dense": ("dense", {}), "FST": ("fst", changed)}
    rows = options("fst_table5", "full", tmp_path)
    steps, at_switch = 38_049, 36_367  # simulated from the growing batch of the released recipe
    ends = pytest.approx({"alpha": 6e-6, "dense_fraction": (steps - at_switch) / steps})
    assert rows["FST"] == ("fst", ends)
    assert {row: method for row, (method, _) in rows.items()} == {
        "dense": "dense", "half": "dense", "STEP": "step", "Bi-Mask": "bi_mask", "FST": "fst",
    }  # fmt: skip


@functools.cache
def train_settings(driver, overrides, source):
    # The same for all methods and data of a row: composed once.
    return Job("", driver, list(overrides), Path("runs"), None, "init").compose(source).train


@pytest.mark.parametrize("name", [n for n, t in TABLES.items() if t.driver in TRAINED])
def test_rows_of_a_table_are_trained_alike(name, gpt2_folder):
    """But for what they start from, and rows that are not trained: a single step at a rate of 0."""
    table = TABLES[name]
    for tier, chosen in table.tiers.items():
        found = {}
        for row in [] if chosen.unavailable or chosen.block else table.rows_of(tier):
            if row.not_run:
                continue
            given = jobs._training(chosen, tier, table.variants_of(tier)[0], row)
            kept = [_local(o, gpt2_folder) for o in given if re.match(TRAINED_BY, o)]
            source = Path("unfinished") if row.starts_from else None
            settings = train_settings(table.driver, tuple(kept), source)
            settings = dataclasses.replace(settings, fp8_samples=None)
            still = settings.steps == 1
            assert not still or settings.learning_rate == 0.0
            found.setdefault((bool(row.starts_from), still), set()).add(settings)
        assert all(len(settings) == 1 for settings in found.values()), tier


def test_a_table_takes_from_another_what_it_does_not_say(tmp_path):
    base = "{title: B, columns: [], tiers: {}, rows: [{label: a, overrides: [method=dense]}]}"
    (tmp_path / "base.yaml").write_text(base, encoding="utf-8")
    (tmp_path / "t.yaml").write_text("{title: T, based_on: base}", encoding="utf-8")
    table = read_table(tmp_path / "t.yaml")
    assert (table.name, table.title, [row.label for row in table.rows]) == ("t", "T", ["a"])
    (tmp_path / "t.yaml").write_text("{title: T, based_on: none}", encoding="utf-8")
    with pytest.raises(UserError, match=r"based_on: there is no none\.yaml"):
        read_table(tmp_path / "t.yaml")


def test_errors_name_the_file(tmp_path):
    path, row = tmp_path / "broken.yaml", {"label": "a", "overrides": ["method=dense"]}
    for text, message in [
        ({"rows": [row | {"colour": "red"}]}, "rows[0] has no key colour"),
        ({"tiers": {"smoke": {"seeds": ["x"]}}}, "tiers.smoke.seeds[0]: 'x' is not of type int"),
        ({"rows": [row, row]}, "have the same label: ['a', 'a']"),
        ({"rows": [row | {"starts_from": "b"}]}, "'a': starts_from=b; choose of"),
        ({"tiers": {"huge": {"seeds": [0]}}}, "tiers=huge; choose of smoke, mini, full"),
        ("title: T", "tiers is missing"),
        ("title: {", "while parsing a flow node"),
    ]:
        if isinstance(text, dict):
            text = yaml.safe_dump({"title": "T", "tiers": {}, "rows": [row], "columns": []} | text)
        path.write_text(text, encoding="utf-8")
        with pytest.raises(UserError) as caught:
            read_table(path)
        told = str(caught.value)
        assert message in told and str(path) in told and "\n" not in told


def test_the_examples_of_the_readme_are_tables_a_measure_and_a_claim():
    text = (Path(jobs.__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    part = text.split("## Adding a table, a measure or a claim")[1]
    blocks = re.findall(r"(?:^    .*\n|^\n(?=    ))+", part, re.M)
    names = {**vars(layers), "nm_mask": common_kernels.nm_mask}
    exec(textwrap.dedent(blocks.pop(3)), names)
    metrics, _ = names["Masked"](width=8, length=4, repeats=2).measure(print)
    assert metrics["dense_ms"] > 0 and metrics["masked_ms"] > 0
    trained, paper, measured, (claim,), block = (yaml.safe_load(block) for block in blocks)
    assert paper["w"].keys() == {"title", "items"}
    spec = typed(Table, "", {"name": "w_table3", **trained})
    assert spec.command == "table3" and plan(spec, "smoke", Path("runs")).jobs
    spec = typed(Table, "", {"name": "w_table3", **trained, **measured})
    assert {job.config.what for job in plan(spec, "full", Path("runs")).jobs} == {"linear"}
    claim = typed(Claim, "", claim)
    assert claim.measured[0].column == spec.columns[0].label
    block = typed(Block, "", {"name": "w", **block})
    assert {run.variant for run in block.runs(Path("runs"))} == {"ste", "s_ste"}
