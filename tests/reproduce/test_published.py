"""The papers' values: what is confirmed, by whom, and what is not."""

import json

from reproduce.published import FILE, look_up
from reproduce.spec import read_tables


def cell(evidence="primary", **changed):
    return {
        "work": "w", "table": "Table 1", "row": "r", "column": "c", "metric": "m",
        "value": 12.5, "unit": "%", "evidence": evidence, "source": 0,
    } | changed  # fmt: skip


def write(path, *cells):
    content = {"about": "", "sources": ["a source"], "cells": list(cells)}
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def test_primary_second_hand_and_missing(tmp_path):
    path = write(tmp_path / "p.json", cell(), cell("second-hand", row="notes", unit=""))
    primary = look_up("w", "Table 1", "r", "c", path)
    assert primary.text(".2f") == "12.50 %"
    assert primary.source == "a source"
    assert look_up("w", "Table 1", "notes", "c", path).text(".1f") == "12.5 (second-hand)"
    assert look_up("w", "Table 1", "r", "other", path) is None


def test_the_file_is_well_formed():
    content = json.loads(FILE.read_text(encoding="utf-8"))
    keys = [(c["work"], c["table"], c["row"], c["column"]) for c in content["cells"]]
    assert len(set(keys)) == len(keys) > 0
    for entry in content["cells"]:
        assert entry["evidence"] in ("primary", "second-hand")
        assert isinstance(entry["value"], int | float)
        assert content["sources"][entry["source"]]


def test_a_confirmed_value_of_s_ste():
    """Transformer-base, dense: 26.42 BLEU, by somebody's notes on the paper's Table 4."""
    found = look_up("sste", "Table 4 (Transformer-base WMT14 En-De)", "Dense", "Test BLEU")
    assert found.text(".2f") == "26.42 (second-hand)"


def test_specs_name_tables_as_the_file_does():
    """A misspelt name would turn a confirmed value into "not available"."""
    content = json.loads(FILE.read_text(encoding="utf-8"))
    for table in read_tables():
        if table.paper is None:
            continue
        number = table.published_table.split("(")[0].strip()
        assert number == f"Table {table.number}"
        same_number = {
            c["table"]
            for c in content["cells"]
            if c["work"] == table.paper and c["table"].split("(")[0].strip() == number
        }
        assert same_number <= {table.published_table}
