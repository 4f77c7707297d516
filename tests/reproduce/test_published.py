"""The papers' values: what is confirmed, by whom, and what is not."""

import json
from dataclasses import replace
from math import comb

from reproduce.render.cells import unmatched
from reproduce.specs.published import FILE, look_up
from reproduce.specs.table import read_tables

PAPERS = [table for table in read_tables() if table.paper is not None]


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
    unsure = replace(sure, confidence="medium", note="a damaged copy")
    assert unsure.reservation == "of medium confidence, from a source: a damaged copy"
    odd = replace(sure, doubt="nobody believes it", evidence="second-hand")
    assert odd.reservation == "as printed in a source, but nobody believes it"
    assert odd.text(".1f") == "12.5 % (second-hand, doubtful)"


def test_the_file_is_well_formed():
    content = json.loads(FILE.read_text(encoding="utf-8"))
    keys = [(c["work"], c["table"], c["row"], c["column"]) for c in content["cells"]]
    assert len(set(keys)) == len(keys) > 1000
    for entry in content["cells"]:
        assert entry["evidence"] in ("primary", "second-hand")
        assert entry["work"] == "related" or isinstance(entry["value"], int | float | None)
        assert entry["value"] is not None or entry["note"]
        assert content["sources"][entry["source"]]


def test_values_that_are_hard_to_believe_say_so():
    lemma = look_up("slope", "Lemma (double-pruning)", "2:8", "extra zeros")
    assert "5.84 %" in lemma.reservation and lemma.text(".2f") == "3.39 % (doubtful)"
    exact = sum(comb(8, b) / 4**b * (3 / 4) ** (8 - b) * max(0, b - 2) for b in range(9)) / 8
    assert round(100 * exact, 2) == 5.84


# Confirmed values that no row of ours can stand beside: the number of parameters, memory, and the
# time of packing something else.
PRUNE = "semi_sparse_prune+compress_time_only"
LEFT = {
    "ast_table2": ["Params"],
    "torchao_table3": ["memory", f"{PRUNE} (13008,1024,4096)", f"{PRUNE} (13008,4096,1024)"],
}


def test_specs_find_what_is_confirmed():
    """A misspelt name would turn a confirmed value into "not available"."""
    found = {table.name: names for table in PAPERS if (names := unmatched(table)[1])}
    assert found == LEFT
