"""Tiers that show the records of a block instead of runs of their own."""

import importlib
import json

import pytest
import yaml

from experiments.support.checkpoint import write_json
from reproduce import make, records
from reproduce.execute.blocks import read_block
from reproduce.records import collect
from reproduce.render.table import render
from reproduce.specs.table import Column, Table, TableRow, Tier, read_tables
from tests.reproduce.conftest import keep_record, write_blocks

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


BLOCKS = {
    "t": "{title: 'Block t: toys', overrides: [model=gpt2_pico, data=stdlib], seeds: [0, 1, 2], "
    "variants: {dense: [method=dense], half: [method=dense, model=gpt2_pico_half], "
    "it: [method=ste]}}",
    "u": "{title: 'Block u: toys retrained', source: {block: t, variant: dense}, seeds: [0, 1], "
    "overrides: [model=gpt2_pico, data=stdlib], variants: {more: [method=dense]}}",
}


@pytest.fixture
def folders(tmp_path):
    blocks = write_blocks(tmp_path / "blocks", BLOCKS)
    return {"runs": tmp_path / "runs", "committed": tmp_path / "kept", "blocks": blocks}


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
    shown = stem.with_suffix(".md").read_text()
    for said in ("| dense       |  2.00 (n=1) |", "| half (ours) | not run yet |", "Runs: 1 of 9"):
        assert said in shown
    assert stem.with_suffix(".png").is_file()
    assert '"done": 1' in stem.with_suffix(".json").read_text()
    assert not list(folders["runs"].glob("*/*/*/result.json"))


@pytest.mark.parametrize(("spec", "tier"), SHOWN, ids=[table.name for table, _ in SHOWN])
def test_every_table_can_be_made_of_the_committed_records(spec, tier, tmp_path):
    """A column that the block's runs do not have must say so in the spec."""
    collected = collect(spec, tier, tmp_path)
    rendered = render(collected.table, tier, collected.runs)
    assert len(rendered.per_run) == len(collected.runs)
