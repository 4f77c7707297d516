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
    assert len({job.config.directory() for job in jobs}) == len(jobs)


QUICKSTART = {
    "dense": ("dense", None),
    "STE": ("ste", None),
    "SR-STE": ("sr_ste", None),
    "S-STE": ("s_ste", "off"),
    "S-STE FP8": ("s_ste", "paper"),
}


def test_the_rows_of_the_quickstart_train_what_they_say(tmp_path):
    """Labels are printed beside numbers: a row with the overrides of another would be a lie."""
    jobs = plan(TABLES["quickstart"], "smoke", tmp_path)
    seeds = TABLES["quickstart"].tiers["smoke"].seeds
    for seed in seeds:
        found = {
            job.label: (job.config.method, getattr(job.config.method_options, "fp8", None))
            for job in jobs
            if job.config.seed == seed
        }
        assert found == QUICKSTART
    assert len(jobs) == len(seeds) * len(QUICKSTART)
    # Nothing but the method differs: the rest of the config, S-STE's own options included.
    first = jobs[0].config
    for job in jobs:
        config = job.config
        assert (config.model, config.data, config.train) == (first.model, first.data, first.train)
        assert config.impl == first.impl
        defaults = importlib.import_module(f"methods.{config.method}").Config()
        changed = {
            f.name
            for f in dataclasses.fields(defaults)
            if getattr(config.method_options, f.name) != getattr(defaults, f.name)
        }
        follow_the_run = {"total_steps", "seed", "measure_every"}
        own = {"fp8"} if job.label == "S-STE FP8" else set()
        assert changed - follow_the_run == own


def test_smoke_trains_the_same_thing_in_every_table():
    """Then tables share their runs, and their numbers can be read side by side."""
    smoke = [table.tiers["smoke"] for table in TABLES.values() if "smoke" in table.tiers]
    assert len(smoke) == len(TABLES) >= 2
    for tier in smoke[1:]:
        assert (tier.overrides, tier.seeds) == (smoke[0].overrides, smoke[0].seeds)


def test_tables_share_runs(tmp_path):
    """The dense and S-STE runs of the quickstart are those of Table 2: one config, one run."""
    one, other = (
        {job.config.directory() for job in plan(TABLES[name], "smoke", tmp_path)}
        for name in ("quickstart", "sste_table2")
    )
    assert len(one & other) == 2 * 3


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
