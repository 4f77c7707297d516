"""`--list`: every table of every paper, covered or not, without torch; and the papers' values."""

import json
import subprocess
import sys
from math import comb

from reproduce.render import listing
from reproduce.render.cells import unmatched
from reproduce.specs.published import FILE, look_up
from reproduce.specs.table import TableRow, Tier, read_tables

TABLES = read_tables()
# Numbers of the papers' tables; those of torchao are numbered by us.
NUMBERS = {
    "fst": {str(n) for n in range(1, 14)} | {f"figure{n}" for n in range(1, 10)},
    "sste": {str(n) for n in range(1, 13)} | {f"figure{n}" for n in range(1, 5)},
    "ast": {str(n) for n in range(1, 7)} | {f"figure{n}" for n in range(1, 4)},
    "slope": {*map(str, range(1, 9)), *(f"B{n}" for n in range(1, 6)), "B6-B9"}
    | {f"figure{n}" for n in [*range(1, 5), *(f"B{n}" for n in range(1, 7))]},
    "torchao": {"1", "2", "3", "4", "5"},
}


def test_every_table_is_listed_once_and_says_whether_it_is_covered():
    papers = {known[0].paper: known for known in listing.items().values()}
    assert papers.keys() >= NUMBERS.keys()
    specs = {(table.paper, table.number) for table in TABLES if table.paper}
    for paper, known in papers.items():
        numbers = [item.number for item in known]
        assert len(set(numbers)) == len(numbers)
        assert NUMBERS.get(paper, set()) <= set(numbers)
        for item in known:
            assert item.caption
            # A reason if and only if there is no spec.
            assert bool(item.reason) != ((paper, item.number) in specs), item
    assert specs <= {(item.paper, item.number) for known in papers.values() for item in known}


def test_the_list_is_complete_and_needs_no_torch(tmp_path):
    """Nor does an error in the arguments."""
    code = (
        "import sys; from reproduce.__main__ import main; status = main(sys.argv[1:]); "
        "sys.exit(status if not {'torch', 'matplotlib', 'hydra'} & set(sys.modules) else 99)"
    )
    for word, status in (("table99", 2), ("--list", 0)):
        command = [sys.executable, "-c", code, word]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == status, done.stderr
    for known in listing.items().values():
        for item in known:
            assert f"  {item.name}: {item.caption}\n" in done.stdout
            assert not item.reason or f"    not covered: {item.reason}\n" in done.stdout
    for table in TABLES:
        for name, tier in table.tiers.items():
            assert f"{table.command} tier={name}: " in done.stdout
            assert not tier.needs or f"needs {tier.needs}" in done.stdout


def test_a_tier_says_what_there_is_of_it(small, tmp_path, monkeypatch):
    """A table counts as measured if all rows have numbers."""
    monkeypatch.setattr(listing, "HERE", tmp_path / "reproduce")
    rows = [TableRow("dense", ["method=dense"], variant="dense"), TableRow("STE", variant="ste")]
    table = small(rows=rows, tiers={"mini": Tier(block="a"), "full": Tier(seeds=[0])})
    table.rows[1].overrides = ["method=ste"]
    evidence = tmp_path / "reproduce" / "evidence" / "a.jsonl"
    path = tmp_path / "reproduce" / "measured" / "gpu" / f"{table.name}-full.csv"
    for one in (evidence, path, listing.stem(table, "mini", tmp_path)):
        one.parent.mkdir(parents=True)
    evidence.write_text("{}\n{}\n")
    listing.stem(table, "mini", tmp_path).with_suffix(".json").write_text('{"jobs": 7, "done": 3}')
    for last, complete in (("STE,full,1.5,1", True), ("STE,full,,0", False), ("", False)):
        path.write_text(f"method,tier,x: mean,x: n\ndense,full,1.5,1\n{last}\n")
        _, mini, full = listing.lines([table], tmp_path, {})
        assert "3 of 7 runs done at the last call; 2 committed records of block a (" in mini
        told = f"measured: reproduce/measured/gpu/{table.name}-full.md"
        assert full.endswith(told if complete else "not made")


def test_primary_second_hand_empty_and_missing(tmp_path):
    path, first = tmp_path / "p.json", {"work": "w", "table": "T", "column": "c", "source": 0}
    cells = [
        {"row": "r", "value": 12.5, "unit": "%", "evidence": "primary"},
        {"row": "notes", "value": 12.5, "unit": "", "evidence": "second-hand"},
        {"row": "none", "value": None, "unit": "%", "evidence": "primary", "note": "no memory"},
    ]
    content = {"sources": ["a source"], "cells": [first | cell for cell in cells]}
    path.write_text(json.dumps(content), encoding="utf-8")
    found = {cell["row"]: look_up("w", "T", cell["row"], "c", path) for cell in cells}
    texts = {row: published.text(".1f") for row, published in found.items()}
    assert texts == {"r": "12.5 %", "notes": "12.5 (second-hand)", "none": "none"}
    sure = found["r"]
    assert (sure.source, sure.reservation) == ("a source", "")
    assert look_up("w", "T", "r", "other", path) is None


def test_the_published_values_are_well_formed_and_found():
    content = json.loads(FILE.read_text(encoding="utf-8"))
    keys = [(c["work"], c["table"], c["row"], c["column"]) for c in content["cells"]]
    assert len(set(keys)) == len(keys) > 1000
    for entry in content["cells"]:
        assert entry["evidence"] in ("primary", "second-hand")
        assert entry["work"] == "related" or isinstance(entry["value"], int | float | None)
        assert entry["value"] is not None or entry["note"]
        assert content["sources"][entry["source"]]
    lemma = look_up("slope", "Lemma (double-pruning)", "2:8", "extra zeros")
    assert "5.84 %" in lemma.reservation and lemma.text(".2f") == "3.39 % (doubtful)"
    exact = sum(comb(8, b) / 4**b * (3 / 4) ** (8 - b) * max(0, b - 2) for b in range(9)) / 8
    assert round(100 * exact, 2) == 5.84
    # A misspelt name would turn a confirmed value into "not available".
    found = {table.name: names for table in TABLES if (names := unmatched(table)[1])}
    assert found == LEFT


# Confirmed values that no row of ours can stand beside: the number of parameters, memory, and the
# time of packing something else.
PRUNE = "semi_sparse_prune+compress_time_only"
LEFT = {
    "ast_table2": ["Params"],
    "torchao_table3": ["memory", f"{PRUNE} (13008,1024,4096)", f"{PRUNE} (13008,4096,1024)"],
}
