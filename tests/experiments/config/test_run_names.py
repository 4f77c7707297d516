"""The directories of runs: what their names say, and that runs are found without it."""

import re

from hydra.core.override_parser.overrides_parser import OverridesParser

from experiments.config import run_names
from experiments.config.run import load
from experiments.training import pretraining


def test_a_name_has_what_differs_from_the_defaults(monkeypatch):
    for overrides, name in [
        ([], "s_ste"),
        (["seed=3", "impl.threads=1", "tier=mini"], "s_ste"),
        (["method.gamma=0.5", "train.learning_rate=4e-3"], "s_ste-gamma_0.5-lr_0.004"),
        (["method=fst", "method.alpha=6e-5"], "fst-alpha_6e-05"),
        (["method=slope", "method.include=[*mlp.*]"], "slope-include_mlp"),
        (["method=dense", "train=nano_distill"], "dense-nano_distill"),
        (
            ["method=dense", "model=gpt2_5m_half", "train=mini", "data=packages"],
            "dense-gpt2_5m_half-mini",
        ),
        (
            ["method=dense", "model=gpt2_nano_half", "model.n_layer=2", "train.batch_size=4"],
            "dense-gpt2_nano_half-n_layer_2-batch_4",
        ),
        (["method=ste", "model=deit_nano"], "ste-deit_nano"),
        (["method=ste", "init=somewhere"], "ste-init"),
        (["method=released/slope"], "released.slope"),
        (["method=released/fst", "method.alpha=3e-4"], "released.fst-alpha_0.0003"),
    ]:
        monkeypatch.setattr("experiments.config.run.source_hash", lambda path: "0")
        found = load(overrides).directory().parent.name
        assert re.fullmatch(rf"{re.escape(name)}-[0-9a-f]{{8}}", found)


def test_a_name_is_bounded_and_needs_no_quotes():
    config = load([
        "method=slope", 'method.include=["*a b[\'=,/é$]*"]', "method.exclude=[]", "train.steps=3",
        "train.warmup_steps=1", "train.batch_size=2", "train.betas=[0.9,0.999]", "train.ema=0.5",
        "train.weight_decay=0", "train.weight_decay_end=0.25", "train.grad_clip=0",
    ])  # fmt: skip
    directory = config.directory()
    name = directory.parent.name
    assert re.fullmatch(r"[A-Za-z0-9._+-]+", name)
    assert len(name) < len("slope--12345678") + run_names.LONGEST + len("-99_more")
    assert re.search(r"_more-[0-9a-f]{8}$", name)
    assert OverridesParser.create().parse_override(f"run={directory}").value() == str(directory)


def test_a_run_is_found_by_its_hash_under_any_name(tmp_path):
    config, other = (load([f"runs={tmp_path}", f"method.gamma={g}"]) for g in (0.5, 0.25))
    digest = config.directory().parent.name.rpartition("-")[2]
    before = tmp_path / "gpt2-stdlib" / f"s_ste-{digest}"
    (before / "seed0").mkdir(parents=True)
    assert config.directory() == before / "seed0"
    seeded = load([f"runs={tmp_path}", "method.gamma=0.5", "seed=1"])
    assert seeded.directory() == before / "seed1"
    assert other.directory().parent.name.startswith("s_ste-gamma_0.25-")
    copied = before.with_name(f"s_ste-copied-{digest}")
    (copied / "seed1").mkdir(parents=True)  # of two, the one that has the seed
    assert (config.directory(), seeded.directory()) == (before / "seed0", copied / "seed1")


def test_what_was_trained_under_a_name_without_a_tag_is_not_trained_again(tiny):
    config = tiny("method=ste", "train.steps=2", "train.warmup_steps=0")
    first = pretraining.run(config, lambda line: None)
    tagged = config.directory().parent
    untagged = tagged.with_name(f"ste-{tagged.name.rpartition('-')[2]}")
    assert tagged != untagged
    tagged.rename(untagged)
    said = []
    assert pretraining.run(config, said.append)["ended"] == first["ended"]
    assert said == [f"done already: {untagged / 'seed0'}"]
    assert not tagged.exists()
