"""Tests of which kept records count: those of the configs that the blocks have today."""

import pytest

from experiments.support.checkpoint import read_sealed, sha256, write_json
from experiments.support.errors import UserError
from reproduce.__main__ import main
from reproduce.execute.blocks import EVIDENCE, read_block
from reproduce.execute.packed import read_packed, write_packed
from reproduce.records import pack, read_evidence
from tests.faults import check
from tests.reproduce.conftest import keep_record

BLOCK = """
title: T
overrides: [train.steps=4]
seeds: [0, 1, 16]
variants: {dense: [method=dense], it: [method=ste]}
"""
SECOND = """
title: U
overrides: []
source: {block: t, variant: it}
seeds: [0]
variants: {more: []}
"""


@pytest.fixture
def folder(tmp_path):
    """The folder of two blocks, of which the second goes on from the first."""
    (tmp_path / "blocks").mkdir()
    (tmp_path / "blocks" / "t.yaml").write_text(BLOCK, encoding="utf-8")
    (tmp_path / "blocks" / "u.yaml").write_text(SECOND, encoding="utf-8")
    return tmp_path / "blocks"


def keep(where, folder, block, variant, /, seed=0, loss=1.0, **changed):
    return keep_record(where, folder, block, variant, seed, loss, **{"curves": {}} | changed)


def losses(evidence):
    return {
        key: {seed: record["metrics"]["val_loss"] for seed, record in seeds.items()}
        for key, seeds in evidence.values.items()
    }


def test_the_first_of_several_folders_counts(tmp_path, folder):
    first, second = tmp_path / "committed", tmp_path / "own"
    keep(first, folder, "t", "dense", loss=1.0)
    keep(second, folder, "t", "dense", loss=2.0)
    keep(second, folder, "t", "dense", seed=1, loss=3.0)
    keep(second, folder, "u", "more", loss=4.0)
    evidence = read_evidence(first, second, blocks=folder)
    dense = {("t", "dense"): {0: 1.0, 1: 3.0}}
    assert losses(evidence) == dense | {("u", "more"): {0: 4.0}}
    assert evidence.outdated == [] and evidence.warnings() == []
    assert losses(read_evidence(first, second, blocks=folder, only={"t"})) == dense
    assert read_evidence(tmp_path / "nowhere").values == {}


def test_a_record_of_another_config_does_not_count_and_is_named(tmp_path, folder):
    """A default, an option or the first model was changed since, or no block has the run. One's
    own, made again with the config of today, takes its place; other words for it do not matter."""
    committed, own = tmp_path / "committed", tmp_path / "own"
    paths = [keep(committed, folder, "t", "dense", seed, config_hash="0" * 16) for seed in (1, 16)]
    again = keep(own, folder, "t", "dense", seed=1, loss=2.0)
    other_words = ["method=dense", "train.steps=4", "seed=0", "tier=none"]
    write_json(again, read_sealed(again) | {"overrides": other_words})
    evidence = read_evidence(committed, own, blocks=folder)
    assert losses(evidence) == {("t", "dense"): {1: 2.0}}
    assert [record["file"] for record, _ in evidence.outdated] == paths
    assert evidence.warnings() == [
        f"left out: block t, dense, seeds 1 16: its config is another one now ({paths[0]})"
    ]
    other = tmp_path / "other"
    gone = [keep(other, folder, "t", "dense", variant="gone")]
    gone += [keep(other, folder, "t", "it", block="no_block")]
    started = keep(other, folder, "u", "more")
    assert [*read_evidence(other, blocks=folder).values] == [("u", "more")]
    (folder / "t.yaml").write_text(BLOCK.replace("steps=4", "steps=5"), encoding="utf-8")
    evidence = read_evidence(other, blocks=folder)
    why = dict.fromkeys(gone, "no block has such a run")
    assert {record["file"]: why for record, why in evidence.outdated} == why | {
        started: "its config is another one now"
    }


def test_a_damaged_record_is_named(tmp_path, folder):
    keep(tmp_path, folder, "t", "dense").write_text('{"block": "t"', encoding="utf-8")
    with pytest.raises(UserError, match=r"dense-seed0.json is damaged .*; remove or restore it"):
        read_evidence(tmp_path, blocks=folder)


def test_committed_records_have_hashes_and_claims_stops_at_a_changed_digit(
    tmp_path, monkeypatch, capsys
):
    paths = sorted(EVIDENCE.glob("*.json"))
    assert paths and all('"sha256": ' in path.read_text().splitlines()[1] for path in paths)
    monkeypatch.setattr("reproduce.judge.EVIDENCE", tmp_path)
    lines, curves = (EVIDENCE / f"a.{end}" for end in ("jsonl", "curves.csv"))
    for changed, old, new, message in (
        (lines, '"val_loss": 2.', '"val_loss": 3.', "a.jsonl, line 1, is damaged (its content"),
        (lines, '"sha256": "', '"sha": "', "a.jsonl, line 1, is damaged (no sha256 in it)"),
        (curves, "loss,0,9", "loss,0,8", "a.curves.csv, line 2 and following, is damaged"),
    ):
        for path in (lines, curves):
            text = path.read_text()
            text = text.replace(old, new, 1) if path == changed else text
            (tmp_path / path.name).write_text(text)
        assert (tmp_path / changed.name).read_bytes() != changed.read_bytes()
        assert main(["claims"], runs=tmp_path / "runs") == 1
        said = capsys.readouterr().err
        assert said.startswith(f"error: {tmp_path}/{message}") and said.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_records_are_packed_and_found_again(tmp_path, folder):
    """Packing at once or in steps gives the same, whatever stops in between."""
    own, committed = tmp_path / "own", tmp_path / "committed"
    curves = {"val_loss": [[0, 0.1], [2, None]], "loss": [], "flip_rate": [[1, 1e-7]],
              "grad_norm": []}  # fmt: skip
    paths = [keep(own, folder, "t", "it", seed, curves=curves) for seed in (16, 1)]
    keep(own, folder, "t", "dense", config_hash="0" * 16)  # does not count
    before = read_evidence(own, blocks=folder).values["t", "it"]
    assert pack(own, committed, folder) == [f"{committed}/t.jsonl: 2 more, 2 in all"]
    files = sorted(committed.iterdir())
    assert [path.name for path in files] == ["t.curves.csv", "t.jsonl"]
    assert files[0].read_text().splitlines()[:3] == [
        "run,quantity,step,value", "it-seed1,val_loss,0,0.1", "it-seed1,val_loss,2,"
    ]  # fmt: skip
    packed = read_evidence(committed, own, blocks=folder).values["t", "it"]
    assert {seed: record["line"] for seed, record in packed.items()} == {1: 1, 16: 2}
    place = {"file": committed / "t.jsonl", "line": 2}
    assert packed[16] == before[16] | {"file_sha256": sha256(paths[0]), **place}
    assert pack(own, committed, folder) == []
    (run,) = [r for r in read_block("t", folder).runs(own) if (r.variant, r.seed) == ("it", 1)]
    assert run.record(committed) == packed[1] and run.record(tmp_path) is None
    # One more, and one whose packed record does not count any more and gives way.
    keep(own, folder, "t", "it", 0, curves=curves)
    one, other = (read_packed(committed, "t")["it", seed] for seed in (1, 16))
    write_packed(committed, "t", [one, other | {"config_hash": "0" * 16, "curves": {}}])
    check(committed, lambda: pack(own, committed, folder), 4)
    assert pack(own, committed, folder) == []
    pack(own, tmp_path / "at once", folder)
    for path in files:
        assert path.read_bytes() == (tmp_path / "at once" / path.name).read_bytes()
