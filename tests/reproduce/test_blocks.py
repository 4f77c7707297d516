"""Blocks of runs: what their files say, the records that are kept, and which of these count."""

from dataclasses import replace
from pathlib import Path

import pytest

from experiments.support.checkpoint import read_sealed, sha256, write_json
from experiments.support.errors import UserError
from experiments.support.names import digest
from reproduce.__main__ import main
from reproduce.execute import blocks
from reproduce.execute.blocks import EVIDENCE, Block, curves, read_block
from reproduce.execute.packed import read_packed, write_packed
from reproduce.records import pack, read_evidence
from tests.faults import check
from tests.reproduce.conftest import keep_record, write_blocks

TEXTS = {
    "t": "{title: T, overrides: [model=gpt2_nano, train.steps=20], seeds: [3, 1], variants: "
    "{dense: [method=dense], ste 2e-3: [method=ste, train.learning_rate=2e-3]}}",
    "u": "{title: U, overrides: [train.steps=30], source: {block: t, variant: dense}, seeds: [1], "
    "variants: {ast: [method=ast], gmp: [method=gmp]}}",
}
RECORDED = {
    "t": "{title: T, overrides: [train.steps=4], seeds: [0, 1, 16], variants: "
    "{dense: [method=dense], it: [method=ste]}}",
    "u": "{title: U, overrides: [], source: {block: t, variant: it}, seeds: [0], "
    "variants: {more: []}}",
}


@pytest.fixture
def files(tmp_path):
    """files(old, new) -> folder with `t.yaml` and `u.yaml`, in which `old` is replaced."""
    return lambda old="", new="": write_blocks(tmp_path, TEXTS, old, new)


def test_a_block_goes_on_from_another(files, finish, tmp_path):
    """All variants of a seed start from one run. They are known by its config: the hash without its
    weights is the one that they have with them."""
    ast, gmp = read_block("u", files()).runs(tmp_path / "runs")
    assert [(run.seed, run.variant) for run in (ast, gmp)] == [(1, "ast"), (1, "gmp")]
    assert ast.source is gmp.source and ast.overrides[-2:] == ["tier=mini", "seed=1"]
    of_t = {run.digest(): run for run in read_block("t", tmp_path).runs(tmp_path / "runs")}
    assert of_t[ast.source.digest()].setup == ast.source.setup
    assert str(ast.source) == "t: dense, seed 1"
    digests = ast.digest(), gmp.digest()
    assert len({*digests, ast.compose(None).digest()}) == 3
    assert ast.config is None and ast.result() is None

    finish(ast.source.config)
    assert ast.config.init == ast.source.config.directory()
    assert (ast.config.digest(), gmp.config.digest()) == digests
    finish(ast.config, init={})
    kept, overrides = ast.keep(tmp_path / "evidence"), ast.source.overrides
    assert kept["source"] == {"block": "t", "variant": "dense", "overrides": overrides}


def test_a_block_that_means_nothing(files):
    for name, old, new, message in [
        ("t", "title: T", "titel: T", "there is no key titel; it takes name, title, overrides"),
        ("t", "{dense:", "{ste_2e-3:", "two variants would have the same file"),
        ("u", "block: t", "block: v", "no block 'v'; there is t, u"),
    ]:
        with pytest.raises(UserError) as error:
            read_block(name, files(old, new))
        assert message in str(error.value) and "\n" not in str(error.value)


def test_shipped_blocks_compose(tmp_path):
    """Every variant has a config, and no two are the same training under other names."""
    for path in blocks.BLOCKS.glob("*.yaml"):
        block = read_block(path.stem)
        first = [run for run in block.runs(tmp_path) if run.seed == block.seeds[0]]
        assert len({run.digest() for run in first}) == len(block.variants), path


@pytest.fixture
def run(tmp_path):
    """The first run of a block with a variant whose name no file should have."""
    return next(Block("t", "T", ["train.steps=20"], {"a/b c": ["method=ste"]}, [7]).runs(tmp_path))


def test_a_run_is_kept_and_recognised(run, finish, tmp_path):
    own, committed = tmp_path / "evidence", tmp_path / "committed"
    assert run.keep(own) is None and run.record(committed, own) is None  # not finished
    log = [{"step": 0, "loss": 4.0, "flip_rate": None}, {"step": 10, "val_loss": 2.6}]
    finish(run.config, log)
    kept, path = run.keep(own), own / "t" / "a_b_c-seed7.json"
    assert read_sealed(path) == kept
    expected = {
        "block": "t", "variant": "a/b c", "seed": 7, "config_hash": run.digest(),
        "curves": {"val_loss": [[10, 2.6]], "loss": [[0, 4.0]], "flip_rate": [], "grad_norm": []},
    }  # fmt: skip
    assert expected.items() <= kept.items()
    assert str(tmp_path) not in path.read_text(encoding="utf-8")  # it can be committed
    assert run.record(committed, own) == kept | {"file": path, "line": 0}
    # A record belongs to a config, not to a name: the block was changed, or the defaults were.
    changed = Block("t", "T", ["train.steps=21"], {"a/b c": ["method=ste"]}, [7])
    other = next(changed.runs(tmp_path))
    assert other.file(own) == path and other.record(own) is None and other.keep(own) is None
    own.rename(committed)
    assert run.record(committed, own).items() >= kept.items()


def test_curves_are_thinned():
    """Curves keep all evaluations, and of training at most a hundred points, the last of groups."""
    for count, thin in [(0, 1), (1, 1), (100, 1), (101, 2), (200, 2), (999, 10)]:
        log = [{"step": step, "loss": 1 / (step + 3), "val_loss": 2.0} for step in range(count)]
        found = curves(log)
        assert len(found["val_loss"]) == count
        steps = [step for step, _ in found["loss"]]
        assert steps == list(range(thin - 1, count, thin)) and len(steps) <= blocks.POINTS
        assert all(value == float(f"{1 / (step + 3):.6g}") for step, value in found["loss"])


def test_kept_records_and_hashes_are_of_today_s_configs():
    """With another default they would tell of other runs, and count no more."""
    evidence = read_evidence(blocks.EVIDENCE)
    committed = sum(
        len(read_packed(blocks.EVIDENCE, p.stem)) for p in blocks.EVIDENCE.glob("*.jsonl")
    )
    assert evidence.warnings() == []
    assert sum(map(len, evidence.values.values())) == committed > 700
    # It is taken from one config for all seeds of a variant.
    for name in ("a", "b", "d"):
        *_, run = read_block(name).runs(Path("runs"))  # another method or option in each
        own = replace(run.intended, init=None).identity()
        start = {} if run.source is None else {"init": run.source.intended.digest()}
        assert run.seed > 0 and run.digest() == digest({**own, **start})


@pytest.fixture
def folder(tmp_path):
    """The folder of two blocks, of which the second goes on from the first."""
    return write_blocks(tmp_path / "blocks", RECORDED)


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
    """A default or an option was changed since. One's own, made again with the config of today,
    takes its place; other words for it do not matter."""
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
