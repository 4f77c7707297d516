"""Tiers that show the records of a block instead of runs of their own."""

import importlib
import json
import math
from pathlib import Path

import pytest
import yaml

from experiments.support.checkpoint import write_json
from reproduce import make, records
from reproduce.execute.blocks import read_block
from reproduce.records import collect
from reproduce.render.table import render
from reproduce.specs.table import Column, Table, TableRow, Tier, read_tables
from tests.reproduce.conftest import keep_record

TABLES = read_tables()
SHOWN = [(table, name) for table in TABLES for name, tier in table.tiers.items() if tier.block]
# What a block says otherwise than a paper's row, because pilots or its model do.
OF_THE_BLOCK = {"alpha", "include", "exclude", "adapter_rank", "kl_weight", "task_weight",
                "layer_weight", "begin_fraction", "permute_every", "candidates"}  # fmt: skip


def method_of(overrides):
    """(method, what of its options is not the default), without what a block chooses by itself."""
    given = dict(override.split("=", 1) for override in overrides)
    name = given["method"]
    defaults = importlib.import_module(f"methods.{name}").Config()
    texts = {k.removeprefix("method."): v for k, v in given.items() if k.startswith("method.")}
    own = texts.keys() - OF_THE_BLOCK
    keys = {key: yaml.safe_load(texts[key]) for key in own}
    return name, {k: keys[k] for k in own if _plain(keys[k]) != _plain(getattr(defaults, k))}


def _plain(value):
    return {False: "off"}.get(value, value) if isinstance(value, bool) else value


@pytest.mark.parametrize(("table", "tier"), SHOWN, ids=[table.name for table, _ in SHOWN])
def test_a_variant_is_what_its_row_says(table, tier):
    """Each variant is the method of its row."""
    block = read_block(table.tiers[tier].block)
    variants = dict(block.variants)
    if (source := block.source) is not None:
        variants |= {f"{source.name}/{variant}": own for variant, own in source.variants.items()}
    rows = [row for row in table.rows_of(tier) if row.variant]
    assert rows[0].variant in ("dense", "a/dense")
    assert len({row.variant for row in rows}) == len(rows)
    for row in rows:
        assert row.variant in variants, (table.name, block.name)
        if row.overrides:
            assert method_of(variants[row.variant]) == method_of(row.overrides), row.label


BLOCK = """
title: "Block t: toys"
overrides: [model=gpt2_pico, data=stdlib]
seeds: [0, 1, 2]
variants: {dense: [method=dense], half: [method=dense, model=gpt2_pico_half], it: [method=ste]}
"""
OTHER = """
title: "Block u: toys retrained"
source: {block: t, variant: dense}
overrides: [model=gpt2_pico, data=stdlib]
seeds: [0, 1]
variants: {more: [method=dense]}
"""


@pytest.fixture
def folders(tmp_path):
    (tmp_path / "blocks").mkdir()
    (tmp_path / "blocks" / "t.yaml").write_text(BLOCK, encoding="utf-8")
    (tmp_path / "blocks" / "u.yaml").write_text(OTHER, encoding="utf-8")
    return {"runs": tmp_path / "runs", "committed": tmp_path / "kept",
            "blocks": tmp_path / "blocks"}  # fmt: skip


def keep(folders, block, variant, seed, loss, where="committed"):
    """A record of a run of a block, in the folder of committed ones or in one's own."""
    folder = folders["committed"] if where == "committed" else folders["runs"] / "evidence"
    return keep_record(folder, folders["blocks"], block, variant, seed, loss)


def table(block="t", rows=None, **columns):
    rows = rows or [
        TableRow("dense", ["method=dense"], variant="dense", published="dense"),
        TableRow("half (ours)", variant="half"),
        TableRow("STE", ["method=ste"], variant="it"),
        TableRow("ours elsewhere", ["method=step"]),
    ]
    shown = [
        Column("loss", "metrics.val_loss", format=".2f"),
        Column("tail", "tail.loss", format=".2f"),
        Column("perplexity", "wikitext.ppl", tiers={"mini": "exp.metrics.val_loss"}, format=".3f"),
        Column("minus dense", "metrics.val_loss", show="paired", format="+.2f"),
        Column("BLEU"),
    ]
    tiers = {"smoke": Tier(seeds=[0]), "mini": Tier(setting="No BLEU.", block=block)}
    return Table("t", "T", tiers, rows, shown, paper="fst", published_table="none")


def test_records_take_the_place_of_runs(folders):
    for seed, loss in enumerate([2.0, 2.2, 2.4]):
        path = keep(folders, "t", "dense", seed, loss)
        keep(folders, "t", "it", seed, loss + 0.1, where="own")
    keep(folders, "t", "it", 0, 9.0)  # a committed one comes before one's own
    collected = collect(table(), "mini", **folders)
    filled, found = collected.table, collected.runs
    assert collected.missing == {"half": [0, 1, 2]} and collected.warnings == []
    assert [(run.place.row, run.place.seed) for run in found] == [
        *(("dense", seed) for seed in range(3)), *(("STE", seed) for seed in range(3)),
    ]  # fmt: skip
    assert found[2].directory == path
    rendered = render(filled, "mini", found)
    grid = rendered.grid
    assert grid.stubs == ["method"]  # no column has a published name
    cells = {(head, line.names[0]): value for line in grid.lines
             for head, value in zip(grid.columns, line.values, strict=True)}  # fmt: skip
    assert cells["loss", "dense"] == "2.20 ± 0.20 (n=3)"
    assert cells["loss", "half (ours)"] == "not run yet"
    assert cells["tail", "dense"] == "4.00 ± 0.00 (n=3)"  # the last tenth of ten steps
    perplexities = [math.exp(loss) for loss in (2.0, 2.2, 2.4)]
    assert cells["perplexity", "dense"].startswith(f"{sum(perplexities) / 3:.3f} ± ")
    assert cells["minus dense", "STE"].startswith("+2.40 [")  # of 7.0, 0.1 and 0.1
    assert {row for _, row in cells} == {"dense", "half (ours)", "STE"}
    assert not any(column == "BLEU" for column, _ in cells)  # nobody's numbers
    header = "\n".join(rendered.header)
    model = "gpt2_pico, 640 tokens, 64 tokens a step, data=stdlib"
    for said in (f"the records of block t ({model}", "`python -m reproduce run t` makes what is",
                 "Not measured in this tier: BLEU.", "Runs: 6 of 9, seeds 0, 1, 2.",
                 "Device: toy, torch 2.0."):  # fmt: skip
        assert said in header
    assert rendered.per_run[0]["directory"] == str(folders["committed"] / "t" / "dense-seed0.json")


def test_the_models_that_a_block_goes_on_from_are_rows_too(folders):
    keep(folders, "t", "dense", 0, 2.0)
    keep(folders, "u", "more", 0, 1.5)
    rows = [
        TableRow("Dense", ["method=dense"], variant="t/dense"),
        TableRow("on", ["method=dense"], variant="more"),
    ]
    collected = collect(table("u", rows), "mini", **folders)
    shown = [(run.place.row, run.result["block"]) for run in collected.runs]
    assert shown == [("Dense", "t"), ("on", "u")]
    assert collected.missing == {"t/dense": [1], "more": [1]}


def test_the_command_runs_nothing_and_says_how(folders, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(records, "BLOCKS", folders["blocks"])
    spec = table()
    keep(folders, "t", "dense", 0, 2.0, where="own")
    old = keep(folders, "t", "it", 1, 2.0, where="own")
    write_json(old, json.loads(old.read_text()) | {"config_hash": "0" * 16})
    collected = collect(spec, "mini", **folders)
    monkeypatch.setattr(records, "collect", lambda *_: collected)
    assert make.make(spec, "mini", folders["runs"]) == make.Made(9, 1)
    captured = capsys.readouterr()
    assert captured.err == (
        f"left out: block t, it, seeds 1: its config is another one now ({old})\n"
        "missing: dense, seeds 1 2; half, seeds 0 1 2; it, seeds 0 1 2 "
        "(python -m reproduce run t)\n"
    )
    stem = folders["runs"] / "tables" / "t-mini"
    assert "| dense       |  2.00 (n=1) |" in stem.with_suffix(".md").read_text()
    assert stem.with_suffix(".png").is_file()
    assert '"done": 1' in stem.with_suffix(".json").read_text()
    assert not list(folders["runs"].glob("*/*/*/result.json"))


@pytest.mark.parametrize(("spec", "tier"), SHOWN, ids=[table.name for table, _ in SHOWN])
def test_every_table_can_be_made_of_the_committed_records(spec, tier, tmp_path):
    """A column that the block's runs do not have must say so in the spec."""
    collected = collect(spec, tier, tmp_path)
    rendered = render(collected.table, tier, collected.runs)
    assert len(rendered.per_run) == len(collected.runs)


def test_the_example_in_the_docs_is_what_the_records_give(tmp_path):
    """S-STE's Table 4 in docs/tables.md, its first parts."""
    (spec,) = [table for table in TABLES if table.name == "sste_table4"]
    collected = collect(spec, "mini", tmp_path)
    shown = render(collected.table, "mini", collected.runs).grid.parts()[:2]
    docs = Path(__file__).parents[2] / "docs" / "tables.md"
    assert "\n".join(part.markdown() for part in shown) in docs.read_text(encoding="utf-8")
