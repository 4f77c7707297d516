"""Spec files: those of the repository, and what is wrong with others."""

import dataclasses
import importlib

import pytest

from experiments.errors import UserError
from reproduce.engine import plan
from reproduce.spec import Row, Table, Tier, read_table, read_tables

TABLES = {table.name: table for table in read_tables()}
OFFERED = [
    (name, tier)
    for name, table in TABLES.items()
    for tier, what in table.tiers.items()
    if not what.unavailable
]


@pytest.mark.parametrize(("name", "tier"), OFFERED)
def test_every_row_is_a_config(name, tier, tmp_path):
    table = TABLES[name]
    one_seed = dataclasses.replace(
        table, tiers={tier: dataclasses.replace(table.tiers[tier], seeds=[7])}
    )
    jobs = plan(one_seed, tier, tmp_path)
    assert [job.label for job in jobs] == [row.label for row in table.rows]
    assert jobs[0].config.method == "dense"
    assert {(job.config.seed, job.config.tier, job.config.runs) for job in jobs} == {
        (7, tier, tmp_path)
    }
    named = [job.config.directory() for job in jobs if job.config.init is None]
    assert len(set(named)) == len(named) > 0


# Method, whether it starts from the dense run, and what it changes of the method's defaults.
QUICKSTART = {
    "dense": ("dense", False, {}),
    "STE": ("ste", False, {}),
    "SR-STE": ("sr_ste", False, {}),
    "T-SR-STE (FST)": ("t_sr_ste", False, {}),
    "S-STE": ("s_ste", False, {}),
    "S-STE FP8": ("s_ste", False, {"fp8": "paper"}),
    "SLoPe": ("slope", False, {"include": ("*mlp.*",)}),
    "semi-sparse (torchao)": ("semi_sparse", False, {}),
    "dense, trained on": ("dense", True, {}),
    "AST, from dense": ("ast", True, {}),
}


def test_the_rows_of_the_quickstart_train_what_they_say(tmp_path):
    """Labels are printed beside numbers: a row with the overrides of another would be a lie."""
    jobs = plan(TABLES["quickstart"], "smoke", tmp_path)
    seeds = TABLES["quickstart"].tiers["smoke"].seeds
    assert [(job.label, job.seed) for job in jobs] == [(r, s) for r in QUICKSTART for s in seeds]
    dense = {job.seed: job.config.directory() for job in jobs if job.label == "dense"}
    # Nothing but the method and the first weights differ, options of the methods included.
    first = jobs[0].config
    for job in jobs:
        config, (method, continued, own) = job.config, QUICKSTART[job.label]
        assert config.method == method
        assert config.init == (dense[job.seed] if continued else None)
        assert (config.model, config.data, config.train) == (first.model, first.data, first.train)
        assert config.impl == first.impl
        options = config.method_options
        defaults = importlib.import_module(f"methods.{config.method}").Config()
        changed = {
            f.name: getattr(options, f.name)
            for f in dataclasses.fields(defaults)
            if getattr(options, f.name) != getattr(defaults, f.name)
        }
        for name in ("total_steps", "seed", "measure_every"):  # these follow the run
            changed.pop(name, None)
        assert changed == own


def test_smoke_trains_the_same_thing_in_every_table():
    """Then tables share their runs, and their numbers can be read side by side."""
    smoke = [table.tiers["smoke"] for table in TABLES.values() if "smoke" in table.tiers]
    assert len(smoke) == len(TABLES) >= 2
    for tier in smoke[1:]:
        assert tier.overrides == smoke[0].overrides
        shorter, longer = sorted([tier.seeds, smoke[0].seeds], key=len)
        assert longer[: len(shorter)] == shorter


def test_tables_share_runs(tmp_path):
    """The dense and S-STE runs of the quickstart are those of Table 2: one config, one run."""
    one, other = (
        {j.config.directory() for j in plan(TABLES[name], "smoke", tmp_path) if not j.config.init}
        for name in ("quickstart", "sste_table2")
    )
    assert len(one & other) == 2 * 2


def test_every_offered_tier_says_what_it_trains():
    for name, tier in OFFERED:
        assert TABLES[name].tiers[tier].setting


def table(**changed):
    values = {
        "name": "t", "title": "T", "rows": [Row("dense", ["method=dense"])], "columns": [],
        "tiers": {"smoke": Tier(seeds=[0])},
    } | changed  # fmt: skip
    return Table(**values)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rows": [Row("a", ["method=dense"]), Row("a", ["method=ste"])]}, "same label"),
        ({"rows": [Row("a", ["method=ste"])]}, "first row must be the dense baseline"),
        ({"tiers": {"huge": Tier(seeds=[0])}}, "'huge'; choose of smoke, mini, full"),
        ({"tiers": {"smoke": Tier(seeds=[1, 1])}}, r"needs seeds, each once, got \[1, 1\]"),
        ({"tiers": {"smoke": Tier()}}, "needs seeds"),
    ],
)
def test_tables_that_make_no_sense(changed, message):
    with pytest.raises(ValueError, match=message):
        table(**changed)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rows: [{label: a, overrides: [], colour: red}]", "colour"),
        ("tiers: {smoke: {seeds: [many]}}", "many"),
        ("title: T", "missing mandatory value"),
        (
            "{title: T, columns: [], tiers: {}, rows: [{label: a, overrides: [method=ste]}]}",
            "dense baseline",
        ),
        (
            "{title: T, tiers: {}, rows: [{label: a, overrides: [method=dense]}], "
            "columns: [{label: c, show: median}]}",
            "show=median; choose of mean_std",
        ),
    ],
)
def test_errors_name_the_file(tmp_path, text, message):
    path = tmp_path / "broken.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=message) as caught:
        read_table(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
