"""The papers' values: what is confirmed, by whom, and what is not."""

import dataclasses
import json

from reproduce.published import FILE, look_up
from reproduce.spec import Column, Row, Table, read_tables


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


def found_by(table):
    """(row, column) -> value of the cells that a spec's own names find."""
    wanted = [
        (row.published, column.published)
        for row in table.rows
        for column in table.columns
        if row.published and column.published
    ]
    assert wanted  # a spec of a paper's table asks for something
    found = {key: look_up(table.paper, table.published_table, *key) for key in wanted}
    return {key: cell.value for key, cell in found.items() if cell is not None}


def confirmed(table):
    """(row, column) -> value of what the file has of the paper's table, however it is named."""
    return {
        (c["row"], c["column"]): c["value"]
        for c in json.loads(FILE.read_text(encoding="utf-8"))["cells"]
        if c["work"] == table.paper and c["table"].startswith(f"Table {table.number} ")
    }


def test_specs_find_what_is_confirmed():
    """A misspelt name would turn a confirmed value into "not available"."""
    papers = [table for table in read_tables() if table.paper is not None]
    assert {table.name: len(confirmed(table)) for table in papers} == {"sste_table2": 0}
    for table in papers:
        assert table.published_table.startswith(f"Table {table.number} (")
        assert found_by(table) == confirmed(table)


def test_a_spec_of_a_confirmed_table_finds_it_all():
    """S-STE's Table 4 has two confirmed cells; one wrong letter in a name loses them."""
    table = Table(
        name="t",
        title="T",
        tiers={},
        rows=[
            Row("dense", ["method=dense"], published="Dense"),
            Row("ours", ["method=s_ste"], published="S-STE"),
        ],
        columns=[Column("BLEU", published="Test BLEU")],
        paper="sste",
        number=4,
        published_table="Table 4 (Transformer-base WMT14 En-De)",
    )
    bleu = {("Dense", "Test BLEU"): 26.42, ("S-STE", "Test BLEU"): 26.11}
    assert found_by(table) == confirmed(table) == bleu
    assert found_by(dataclasses.replace(table, published_table="Table 4")) == {}
