"""Blocks of runs: what their files say, and the records that are kept of their runs."""

from dataclasses import replace
from pathlib import Path

import pytest

from experiments.support.checkpoint import read_sealed
from experiments.support.errors import UserError
from experiments.support.names import digest
from reproduce.execute import blocks
from reproduce.execute.blocks import Block, curves, read_block
from reproduce.execute.packed import read_packed
from reproduce.records import read_evidence
from reproduce.specs.table import read_tables

TEXT = """
title: T
overrides: [model=gpt2_nano, train.steps=20]
seeds: [3, 1]
variants:
  dense: [method=dense]
  ste 2e-3: [method=ste, train.learning_rate=2e-3]
"""
SECOND = """
title: U
overrides: [train.steps=30]
source: {block: t, variant: dense}
seeds: [1]
variants:
  ast: [method=ast]
  gmp: [method=gmp]
"""


@pytest.fixture
def files(tmp_path):
    """files(old, new) -> folder with `t.yaml` and `u.yaml`, in which `old` is replaced."""

    def write(old="", new=""):
        assert old in TEXT + SECOND
        (tmp_path / "t.yaml").write_text(TEXT.replace(old, new), encoding="utf-8")
        (tmp_path / "u.yaml").write_text(SECOND.replace(old, new), encoding="utf-8")
        return tmp_path

    return write


def test_runs_come_seed_by_seed(files, tmp_path):
    runs = list(read_block("t", files()).runs(tmp_path / "runs"))
    order = [(run.seed, run.variant) for run in runs]
    assert order == [(3, "dense"), (3, "ste 2e-3"), (1, "dense"), (1, "ste 2e-3")]
    assert str(runs[1]) == "ste 2e-3, seed 3"
    assert runs[1].overrides == [
        *("model=gpt2_nano", "train.steps=20", "method=ste", "train.learning_rate=2e-3"),
        *("tier=mini", "seed=3"),
    ]
    config = runs[1].config
    assert (config.method, config.seed, config.tier) == ("ste", 3, "mini")
    assert (config.train.steps, config.train.learning_rate) == (20, 2e-3)
    assert config.runs == tmp_path / "runs"


def test_a_block_goes_on_from_another(files, finish, tmp_path):
    """All variants of a seed start from one run. They are known by its config: the hash without its
    weights is the one that they have with them."""
    ast, gmp = read_block("u", files()).runs(tmp_path / "runs")
    assert [(run.seed, run.variant) for run in (ast, gmp)] == [(1, "ast"), (1, "gmp")]
    assert ast.source is gmp.source
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

    other, _ = read_block("u", files("variant: dense", "variant: ste 2e-3")).runs(tmp_path / "runs")
    start = of_t[other.source.digest()]
    assert (start.variant, start.seed) == ("ste 2e-3", 1) and other.digest() not in digests


def test_a_block_that_means_nothing(files):
    for name, old, new, message in [
        ("t", "title: T", "titel: T", "this has no key titel; it takes name, title, overrides"),
        ("t", "  dense:", "  ste_2e-3:", "two variants would have the same file"),
        ("t", "title: T", "title: T\nagainst: {dense: gone}", "there is no variant gone"),
        ("u", "block: t", "block: v", "no block 'v'; there is t, u"),
    ]:
        with pytest.raises(UserError) as error:
            read_block(name, files(old, new))
        assert message in str(error.value) and "\n" not in str(error.value)


def test_shipped_blocks_compose(tmp_path):
    """Every variant has a config, and no two are the same training under other names. Block d has
    torchao's seven fractions, and a dense model of half the width as the half-width baseline."""
    for path in blocks.BLOCKS.glob("*.yaml"):
        block = read_block(path.stem)
        first = [run for run in block.runs(tmp_path) if run.seed == block.seeds[0]]
        assert len({run.digest() for run in first}) == len(block.variants), path
    table = next(t for t in read_tables() if t.name == "torchao_table1")
    variants = dict(read_block("d").variants)
    assert variants.pop("half") == ["method=dense", "model=vit_mini_half"]
    rates = "train.learning_rate="  # which its pilot chose
    kept = [[o for o in own if not o.startswith(rates)] for own in variants.values()]
    asked = [row.overrides for row in table.rows if row.overrides]  # not half the width
    assert sorted(kept) == sorted(asked) and len(kept) == 7


@pytest.fixture
def run(tmp_path):
    """The first run of a block with a variant whose name no file should have."""
    return next(Block("t", "T", ["train.steps=20"], {"a/b c": ["method=ste"]}, [7]).runs(tmp_path))


def test_a_run_is_kept_and_recognised(run, finish, tmp_path):
    own, committed = tmp_path / "evidence", tmp_path / "committed"
    assert run.keep(own) is None  # not finished
    assert run.record(committed, own) is None
    log = [{"step": 0, "loss": 4.0, "flip_rate": None}, {"step": 10, "val_loss": 2.6}]
    finish(run.config, log)
    kept, path = run.keep(own), own / "t" / "a_b_c-seed7.json"
    assert read_sealed(path) == kept
    expected = {
        "block": "t", "variant": "a/b c", "seed": 7, "config_hash": run.digest(),
        "overrides": ["train.steps=20", "method=ste", "tier=mini", "seed=7"],
        "metrics": {"val_loss": 1.0, "flip_rate": 0.25},
        "environment": {"git_revision": "c0ffee" * 7, "git_dirty": False, "device": "abacus",
                        "versions": {"torch": "2.0"}},
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


def test_kept_records_are_of_today_s_configs():
    """With another default they would tell of other runs, and count no more."""
    evidence = read_evidence(blocks.EVIDENCE)
    committed = sum(
        len(read_packed(blocks.EVIDENCE, p.stem)) for p in blocks.EVIDENCE.glob("*.jsonl")
    )
    assert evidence.warnings() == []
    assert sum(map(len, evidence.values.values())) == committed > 700


def test_the_hash_of_every_seed_is_that_of_its_config():
    """It is taken from one config for all seeds of a variant."""
    for name in ("a", "b", "d"):
        *_, run = read_block(name).runs(Path("runs"))  # another method or option in each
        own = replace(run.intended, init=None).identity()
        start = {} if run.source is None else {"init": run.source.intended.digest()}
        assert run.seed > 0 and run.digest() == digest({**own, **start})
