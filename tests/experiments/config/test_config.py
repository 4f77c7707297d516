"""Composition, typing and identity of configs; the directories of runs; the published recipes."""

import dataclasses
import importlib
import os
import re
import signal
import sys
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

import experiments
import methods
from experiments.config.compose import composed
from experiments.config.driver import help_text
from experiments.config.run import ImplConfig, TrainConfig, load
from experiments.config.yaml_files import CONF
from experiments.support.errors import UserError, exit_with_one_line
from experiments.support.names import identity_of


def test_the_yaml_files_state_every_key_and_its_default():
    for name in methods.available():
        config = load([f"method={name}"])
        defaults = importlib.import_module(f"methods.{name}").Config()
        steps, every = config.train.steps, config.train.log_every
        expected = dataclasses.replace(defaults, total_steps=steps, measure_every=every)
        assert config.method_options == expected
        other = load([f"method={name}", "seed=5"])
        assert other.method_options.seed == 5
        assert dataclasses.replace(other, command=None) == config.with_seed(5)
    # What a recipe must say itself, and what it may leave as it is.
    own = {"steps", "batch_size", "learning_rate"}
    common = OmegaConf.load(CONF / "train/_common.yaml")
    assert own | set(common) == {f.name for f in dataclasses.fields(TrainConfig)}
    keys = set(OmegaConf.load(CONF / "impl/default.yaml"))
    assert keys == {f.name for f in dataclasses.fields(ImplConfig)}


BAD = {
    "pretrain": {
        "method=sste": "there is no method=sste; s_ste may be meant; there is act24, ast,",
        "method=t_sr_ste": "method=t_sr_ste is called method=fst now",
        "method=ste,s_ste": "method=ste,s_ste has several values: for a sweep add -m; one value",
        "+method.decay=1": "method has no key decay; it takes",
        "train.betas=[0.9": "train.betas=[0.9 cannot be read (",
        "train.steps=many": "train.steps: 'many' is not of type int",
        "train.steps=0": "train.steps=0; it must lie in [1, 100,000,000]",
        "model.n_head=3": "n_embd must be a multiple of n_head",
        "data.source=texts": "data.source=texts is not the embedded corpus",
        "steps=1": "there is no steps here; train.steps may be meant",
    },
    "dino": {"train.ema=0.9": "its teacher is the average; set it to 0"},
    "translate": {"model=gpt2_nano data=stdlib": "model=gpt2 does not translate"},
    "find_decay": {
        "method=ste": "method=ste has no masked decay; choose sr_ste, fst or bi_mask",
        "train.warmup_steps=2": "train.warmup_steps=2; the flip rates are compared",
    },
    "finetune": {"task=snli run=x": "task=snli; choose one of cola"},
}


def test_bad_overrides_are_one_line_that_names_the_key():
    for driver, cases in BAD.items():
        module = importlib.import_module(f"experiments.{driver}")
        for overrides, message in cases.items():
            with pytest.raises(UserError) as caught:
                module.load(overrides.split(" "))
            assert message in str(caught.value) and "\n" not in str(caught.value), overrides


def test_values_that_are_set_in_a_copy_are_those_that_hydra_sets():
    for overrides in [
        [],
        ["seed=3", "train.steps=7", "method.beta=none", "runs='a b, c'"],
        ["train.steps=1e3", "method.include=[a,'b.*']", "train.betas=[0.9,0.95]", "init=null"],
        ["model=bert_nano", "model.n_layer=${train.log_every}", "method=slope", "train.steps=9"],
        ["experiment=s_ste_gpt2_124m", "train.steps=5", "method=dense", "impl=mini"],
        ["+train.new=1", "~tier", "train.steps=5", "train.steps=6", "data=packages"],
    ]:

        def as_text(config):
            return OmegaConf.to_yaml(config), config._get_flag("struct")

        # The second time from a choice of files that is already merged.
        outcomes = [composed("pretrain", as_text, overrides) for _ in range(2)]
        with initialize_config_module("experiments.conf", version_base="1.3"):
            expected = as_text(compose("pretrain", overrides))
        assert outcomes == [expected, expected]


def test_values_become_those_of_their_fields(monkeypatch):
    monkeypatch.setenv("STEPS", "70")
    given = ["train.steps=${oc.env:STEPS}", "train.learning_rate=1", "impl.compile=yes", "tier=5"]
    config = load([*given, "method.include=[a]", "impl.micro_batch='2'"])
    values = config.train.steps, config.train.learning_rate, config.impl.compile, config.tier
    assert values == (70, 1.0, True, "5") and isinstance(values[1], float)
    assert (config.method_options.include, config.impl.micro_batch) == (("a",), 2)
    for on, off in ((1, 0), ("y", "n"), ("'1'", "'0'")):  # as shells have truth values
        given = [f"impl.compile={on}", f"impl.activation_checkpointing={off}"]
        impl = load(given).impl
        assert impl.compile is True and impl.activation_checkpointing is False


def test_run_directory_follows_from_what_is_computed():
    base = load([])
    assert base.directory().parts[-1] == "seed0"
    for override in ("impl.compile=true", "impl=mini", "tier=smoke", "data.root=elsewhere"):
        other = load([override])
        assert (other.directory(), other.digest()) == (base.directory(), base.digest())
    for override in ("train.dtype=bf16", "method.gamma=0.5", "model.n_layer=2"):
        assert load([override]).directory().parent != base.directory().parent
    seeds = [load([f"seed={s}", *more]) for s, more in ((0, []), (1, []), (1, ["method.seed=0"]))]
    assert len({config.directory() for config in seeds}) == len({c.digest() for c in seeds}) == 3
    assert seeds[0].directory().parent == seeds[1].directory().parent != seeds[2].directory().parent


def test_only_what_differs_from_its_default_identifies_a_run():
    @dataclasses.dataclass(frozen=True)
    class Config:
        width: int
        rate: float = 1.0
        names: list[str] = dataclasses.field(default_factory=list)

    assert identity_of(Config(3)) == identity_of(Config(3, rate=1.0, names=[])) == {"width": 3}
    assert identity_of(Config(3, 2.0, ["a"])) == {"width": 3, "rate": 2.0, "names": ["a"]}


def test_a_name_has_what_differs_from_the_defaults(monkeypatch):
    monkeypatch.setattr("experiments.config.run.source_hash", lambda path: "0")
    half = "method=dense model=gpt2_nano_half model.n_layer=2 train.batch_size=4"
    for overrides, name in [
        ("method.gamma=0.5 train.learning_rate=4e-3", "s_ste-gamma_0.5-lr_0.004"),
        (half, "dense-gpt2_nano_half-n_layer_2-batch_4"),
        ("method=ste init=somewhere", "ste-init"),
        ("method=released/fst method.alpha=3e-4", "released.fst-alpha_0.0003"),
    ]:
        found = load(overrides.split()).directory().parent.name
        assert re.fullmatch(rf"{re.escape(name)}-[0-9a-f]{{8}}", found)


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


def test_errors_of_the_machine_and_signals_are_one_line(capsys):
    said = r"^error: out of memory \([^\n]*$"
    with pytest.raises(SystemExit, match=said), exit_with_one_line("begins it anew"):
        torch.empty(2**60, dtype=torch.uint8)
    with pytest.raises(RuntimeError), exit_with_one_line("begins it anew"):
        raise RuntimeError("of the work itself")
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a job of a shell ignores
    signals = (("terminated", signal.SIGTERM, 143), ("interrupted", signal.SIGINT, 130))
    for said, number, status in signals:
        with pytest.raises(SystemExit) as stop, exit_with_one_line("begins it anew"):
            os.kill(os.getpid(), number)
        signal.signal(signal.SIGTERM, before)
        assert stop.value.code == status
        assert capsys.readouterr().err == f"{said}; the same command begins it anew\n"


OWN = """
from dataclasses import dataclass

from methods import sr_ste


@dataclass(frozen=True, kw_only=True)
class Config(sr_ste.Config):
    beta: float = 0.5


class Method(sr_ste.Method):
    Config = Config
"""


@pytest.mark.parametrize("installed", [False, True])
def test_a_method_from_outside_is_found_by_its_name(installed, tmp_path, monkeypatch):
    """Registered in this process, or by an entry point of an installed package."""
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    monkeypatch.setattr(methods, "_registered", {})
    module = importlib.import_module("mine")
    if installed:
        info = tmp_path / "mine-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[sparse24.methods]\nmine = mine\n")
    else:
        methods.register(module)
    methods._installed.cache_clear()
    try:
        assert "mine" in methods.available()
        assert type(methods.build("mine", beta=0.1)) is module.Method
        run = load(["model=gpt2_nano", "method=mine", "method.beta=0.25", "method.n=1"])
        assert type(run.build_method()) is module.Method
        assert (run.method_options.beta, run.method_options.n) == (0.25, 1)
        assert run.directory().parent.name.startswith("mine-n_1-beta_0.25-")
        assert "\nbeta: " in help_text("NAME", "", "pretrain", ["method=mine"])
    finally:
        methods._installed.cache_clear()


FOLDER = Path(experiments.__file__).parent / "conf" / "experiment"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))

# Steps, batch, peak of the learning rate, optimizer, schedule, dtype: FST's and S-STE's scripts for
# GPT-2 (524,288 tokens a step), FST's released configs, NVIDIA's BERT, which SLoPe took, SLoPe's
# released configuration, FST's DeiT (5e-5 x 2048 / 512), the authors' command of AST.
RECIPES = {
    **{
        f"{method}_gpt2_{size}": (300_000, 512, 1.5e-4, "adamw", "cosine", "fp16")
        for method in ("dense", "sr_ste", "fst", "s_ste")
        for size in ("124m", "350m", "774m", "1558m")
    },
    "fst_cramming": (38_049, 4096, 1e-3, "adamw", "triangle", "fp16"),
    "slope_bert_large_phase1": (7038, 65_536, 6e-3, "lamb", "sqrt", "fp16"),
    "slope_bert_large_phase2": (1563, 32_768, 4e-3, "lamb", "sqrt", "fp16"),
    "dense_gpt2_small": (400_000, 512, 6e-4, "adamw", "linear", "fp16"),
    "slope_gpt2_large": (400_000, 512, 1.5e-4, "adamw", "linear", "fp16"),
    "fst_deit_base": (187_500, 2048, 2e-4, "lion", "cosine", "fp16"),
    "ast_boosted_gpt2_124m": (40_000, 128, 2e-4, "adamw", "cosine", "bf16"),
}
# The factors of decay are by the authors' page of December 2024; their code of May 2024 has the
# last two swapped.
DECAY = {"124m": 6e-5, "350m": 2e-4, "774m": 6e-5, "1558m": 2e-4}
DENSE_FROM = {"fst_gpt2_774m": 250_000, "fst_cramming": 36_367, "fst_deit_base": 156_250}


def test_every_recipe_is_the_published_one_and_fits_its_model(tmp_path, hf_model):
    """The method of each finds its linears in the model, which is built without its numbers."""
    hf_model("gpt2").save_pretrained(tmp_path)
    shapes = {}
    for name in NAMES:
        kind = name.partition("_")[0]
        own = ["init=null"] * name.endswith("phase2")
        if kind == "ast" or "_opt_" in name:  # in place of the checkpoint on the hub
            own += [f"model.path={tmp_path}", "model.block_size=32"]
        driver = {"dino": "dino", "ast": "distill"}.get(kind, "pretrain")
        config = load([f"experiment={name}", *own], driver)
        method, train = config.build_method(), config.train
        if config.model not in shapes:
            shapes[config.model] = config.build_shape()
        assert method.matching_linears(shapes[config.model]) or config.method == "dense"
        if name in RECIPES:
            found = train.steps, train.batch_size, train.learning_rate
            found += train.optimizer, train.schedule, train.dtype
            assert found == RECIPES[name], name
        if name in DENSE_FROM:
            assert method.dense_steps[0] == DENSE_FROM[name]
        if name.startswith("fst_gpt2"):
            assert config.method_options.alpha == DECAY[name.rpartition("_")[2]]
    # Bi-Mask searches every 100 of the 300,000 micro-steps, 3,000 times; here in optimizer steps.
    masks = load(["experiment=bi_mask_cramming"])
    searches = masks.train.steps / masks.method_options.permute_every
    assert searches == pytest.approx(300_000 / 100, rel=0.05)
    with pytest.raises(UserError, match="RUN_OF_PHASE_1 holds no finished run"):
        load(["experiment=slope_bert_large_phase2"]).directory()
