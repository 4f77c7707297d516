"""Spec files: those of the repository, and what is wrong with others."""

import dataclasses

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
