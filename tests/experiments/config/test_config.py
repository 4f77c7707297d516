"""Composition, typing and identity of configs."""

import dataclasses
import importlib
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

import experiments
import methods
from experiments.config.compose import check, composed, one_line_errors
from experiments.config.driver import exit_with_one_line
from experiments.config.run import ImplConfig, TrainConfig, load
from experiments.support import memory
from experiments.support.errors import Terminated, UserError
from experiments.support.identity import identity_of
from experiments.training import pretraining
from experiments.training.optimization import Optimization
from tests.experiments.conftest import quiet

CONF = Path(experiments.__file__).parent / "conf"
EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*_gpt2_*.yaml"))
# Those of FST and S-STE.
GPT2 = [name for name in EXPERIMENTS if name.endswith("m") and not name.startswith("ast")]

PUBLISHED_SHAPES = {
    "124m": (12, 12, 768),
    "350m": (24, 16, 1024),
    "774m": (36, 20, 1280),
    "1558m": (48, 25, 1600),
}
# By the authors' page of December 2024; their code of May 2024 has the last two swapped.
PUBLISHED_DECAY = {"124m": 6e-5, "350m": 2e-4, "774m": 6e-5, "1558m": 2e-4}


def test_published_recipes():
    """Constants of FST and S-STE: 524,288 tokens a step, the schedule, the decay per size."""
    for name in GPT2:
        config = load([f"experiment={name}"])
        method, size = name.rsplit("_gpt2_", 1)
        train, model = config.train, config.model
        assert config.method == method
        assert (model.n_layer, model.n_head, model.n_embd) == PUBLISHED_SHAPES[size]
        assert (model.vocab_size, model.bias, model.dropout, model.gelu) == (
            50304,
            False,
            0.0,
            "erf",
        )
        assert train.batch_size * model.block_size == 524_288
        assert (train.steps, train.warmup_steps) == (300_000, 3000)
        assert (train.learning_rate, train.min_learning_rate) == (1.5e-4, 1e-5)
        assert (train.betas, train.weight_decay, train.grad_clip) == ((0.9, 0.95), 0.1, 1.0)
        assert config.train.dtype == "fp16"
        assert config.data.name == "openwebtext"
        options = config.method_options
        if method == "sr_ste":  # the rule and the factor of its own code
            assert (options.alpha, options.decay_on) == (2e-4, "gradients")
        if method == "fst":
            assert (options.alpha, options.decay_on) == (PUBLISHED_DECAY[size], "gradients")
            assert (options.algorithm, options.mvue, options.refresh_every) == (
                "exact",
                "exact",
                40,
            )
            assert config.build_method().dense_steps[0] == 250_000
        if method == "s_ste":
            options = config.method_options
            assert (options.fp8, options.beta, options.mvue) == ("paper", "mse", "exact")
        assert config.method_options.include == "ffn"


def test_the_mini_tier():
    """Small models on text of packages: half the width in the feed-forward networks, half the
    depth; the counts are vocabulary and positions, 12 d^2 + 2 d a block (8 d^2 with half the
    width), the last norm."""
    for name, shape, parameters in [
        ("gpt2_5m", (4, 4, 256, None), 5_376_256),
        ("gpt2_5m_half", (4, 4, 256, 512), 4_327_680),
        ("gpt2_5m_shallow", (2, 4, 256, None), 3_802_368),
        ("gpt2_23m", (6, 8, 512, None), 23_337_472),
        ("gpt2_23m_half", (6, 8, 512, 1024), 17_046_016),
    ]:
        config = load([f"model={name}", "data=packages", "train=mini", "impl=mini"])
        model, train, impl = config.model, config.train, config.impl
        assert (model.n_layer, model.n_head, model.n_embd, model.n_inner) == shape
        d, block = model.n_embd, 12 if model.n_inner is None else 8
        counted = (8192 + 512) * d + model.n_layer * (block * d**2 + 2 * d) + d
        built = sum(parameter.numel() for parameter in config.build_model().parameters())
        assert built == counted == parameters
        assert (model.vocab_size, model.block_size, model.bias) == (8192, 512, False)
        assert (config.data.source, config.data.vocab_size) == ("packages", model.vocab_size)
        assert train.batch_size * model.block_size == 32_768
        assert train.steps * train.batch_size * model.block_size == 98_304_000
        assert train.warmup_steps == train.steps // 20
        assert (train.learning_rate, train.min_learning_rate) == (2e-3, 2e-4)
        assert (train.dtype, impl.device, impl.compile, impl.matmul) == (
            "bf16",
            "cuda",
            True,
            "dense",
        )
        elsewhere = load([f"model={name}", "data=packages", "train=mini"])
        assert elsewhere.digest() == config.digest()  # impl is no part of a run


def test_the_models_of_the_quickstart():
    """512 + 64 embeddings of 64, a block of 12 d^2 + 2 d (8 d^2 with half the width), a norm."""
    for name, width, parameters in [("gpt2_pico", None, 86_208), ("gpt2_pico_half", 128, 69_824)]:
        config = load([f"model={name}", "data.vocab_size=512", "train=quickstart"])
        model, train = config.model, config.train
        built = sum(parameter.numel() for parameter in config.build_model().parameters())
        assert (model.n_inner, built) == (width, parameters)
        assert train.batch_size * model.block_size == 4096
        assert train.steps * train.batch_size * model.block_size == 1_638_400


def test_every_size_and_method_has_a_recipe():
    names = ("dense", "sr_ste", "fst", "s_ste")
    assert set(GPT2) == {f"{m}_gpt2_{s}" for m in names for s in PUBLISHED_SHAPES}


def test_method_yaml_states_the_defaults_of_its_dataclass():
    for name in methods.available():
        config = load([f"method={name}"])
        defaults = importlib.import_module(f"methods.{name}").Config()
        steps, every = config.train.steps, config.train.log_every
        expected = dataclasses.replace(defaults, total_steps=steps, measure_every=every)
        assert config.method_options == expected
        other = load([f"method={name}", "seed=5"])
        assert other.method_options.seed == 5
        assert dataclasses.replace(other, command=None) == config.with_seed(5)


def test_group_yamls_name_every_key_so_that_it_can_be_overridden():
    from omegaconf import OmegaConf

    # What a recipe must say itself, and what it may leave as it is.
    own = {"steps", "batch_size", "learning_rate"}
    common = OmegaConf.load(CONF / "train/_common.yaml")
    assert own | set(common) == {f.name for f in dataclasses.fields(TrainConfig)}
    for path in (CONF / "train").glob("[!_]*.yaml"):
        recipe = OmegaConf.load(path)
        assert recipe.defaults[-1] == "_self_" and len(recipe.defaults) >= 2
    keys = set(OmegaConf.load(CONF / "impl/default.yaml"))
    assert keys == {f.name for f in dataclasses.fields(ImplConfig)}


def test_bad_overrides_are_one_line():
    for override, message in [
        ("method=sste", "there is no method=sste; s_ste may be meant; there is ast, bi_mask,"),
        ("hydra/sweeper=x", "there is no hydra/sweeper=x; there is basic"),
        ("+cluster=slrm", "there is no cluster=slrm; slurm may be meant; there is local, slurm"),
        ("method=ste,s_ste", "method=ste,s_ste has several values: for a sweep add -m; one value"),
        ("+method.decay=1", "method has no key decay; it takes"),
        ("data.parts=mine", "data.parts must be a list, as in 'data.parts=[VALUE]'"),
        ("no/folder", "no/folder is no KEY=VALUE"),
        ("train.steps=many", "train.steps: Value 'many'"),
        ("train.steps=0", "train.steps=0; it must be at least 1"),
        ("train.warmup_steps=-1", "train.warmup_steps=-1 does not fit train.steps=200"),
        ("train.dtype=fp8", "train.dtype=fp8; choose one of fp32, bf16, fp16"),
        ("impl.dtype=bf16", "there is no impl.dtype here; train.dtype may be meant"),
        ("seed=-1", "seed=-1; it must lie in [0, 2**63)"),
        ("impl.threads=99999999999", "impl.threads=99999999999; it must lie in [0, 1024]"),
        ("train.batch_size=10000000000000000000000", "at most 100,000,000"),
        ("train.weight_decay_end=-1", "train.weight_decay_end=-1.0; it must be a finite number"),
        ("train.learning_rate=1e300", "train.learning_rate=1e+300; at most 1e+06"),
        ("~method", "the config has no method: leave ~method out"),
        ("~seed", "'seed' not found"),
        ("impl.device=tpu", "impl.device=tpu; choose one of auto, cpu, cuda"),
        ("impl.loggers=[csv]", "choose from tensorboard, wandb"),
        ("method.beta=max", "beta='max'; choose one of none"),
        ("model.n_head=3", "n_embd must be a multiple of n_head"),
        ("data.tokenizer=words", "tokenizer=words is neither gpt2, bpe nor wordpiece"),
        ("data.name=../../x", "data.name='../../x' names a folder"),
        ("model.name=gpt2_/../../x", "model.name='gpt2_/../../x' names a folder"),
        ("data.source=texts", "data.source=texts is not the embedded corpus"),
        ("data.order=???", "data.order has no value"),
    ]:
        with pytest.raises(UserError) as caught:
            load([override])
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)


def test_values_that_are_set_in_a_copy_are_those_that_hydra_sets():
    for overrides in [
        [],
        ["seed=3", "train.steps=7", "method.beta=none", "runs='a b, c'"],
        ["train.steps=1e3", "method.include=[a,'b.*']", "train.betas=[0.9,0.95]", "init=null"],
        ["model=bert_nano", "model.n_layer=${train.log_every}", "method=slope", "train.steps=9"],
        ["experiment=s_ste_gpt2_124m", "train.steps=5", "method=dense", "impl=mini"],
        ["+train.new=1", "++method.other={a:1}", "~tier", "model.n_layer=2"],
        ["train.steps=5", "train.steps=6", "data=packages", "data.parts=[a]"],
    ]:

        def as_text(config):
            return OmegaConf.to_yaml(config), config._get_flag("struct")

        outcomes = []
        for _ in range(2):  # the second time from a choice of files that is already merged
            try:
                outcomes.append(composed("pretrain", as_text, overrides))
            except UserError as error:
                outcomes.append(str(error))
        try:
            with one_line_errors():
                with initialize_config_module("experiments.conf", version_base="1.3"):
                    composition = compose("pretrain", overrides)
                expected = as_text(composition)
        except UserError as error:
            expected = str(error)
        assert outcomes == [expected, expected]


def test_a_run_without_its_key_is_told_the_key():
    with pytest.raises(UserError, match=r"^runs/x is no KEY=VALUE; run=runs/x may be meant$"):
        composed("evaluate", lambda config: config, ["runs/x"])


def test_the_dtype_that_was_a_key_of_impl_is_named():
    for config_name, meant in [
        ("finetune", "recipe.dtype"),
        ("evaluate", "dtype"),
        ("generate", "dtype"),
    ]:
        with pytest.raises(UserError, match=f"^there is no impl.dtype here; {meant} may be meant$"):
            composed(config_name, lambda composed: composed, ["impl.dtype=bf16"])


def test_run_directory_follows_from_what_is_computed():
    base = load([])
    assert load([]).directory() == base.directory()
    assert base.directory().parts[-1] == "seed0"
    assert base.directory().parts[-2].startswith("s_ste-")
    same = ["impl.compile=true", "impl.micro_batch=4", "tier=smoke", "data.root=elsewhere"]
    for override in same:
        assert load([override]).directory() == base.directory()
        assert load([override]).digest() == base.digest()
    for override in (
        "train.steps=50",
        "train.dtype=bf16",
        "method.gamma=0.5",
        "model.n_layer=2",
        "data.vocab_size=999",
    ):
        assert load([override]).directory().parent != base.directory().parent
    seeded = load(["seed=1"])
    assert seeded.directory().parent == base.directory().parent
    assert seeded.directory() != base.directory()
    assert seeded.digest() != base.digest()


def test_only_what_differs_from_its_default_identifies_a_run():
    @dataclasses.dataclass(frozen=True)
    class Config:
        width: int
        rate: float = 1.0
        names: list[str] = dataclasses.field(default_factory=list)

    assert identity_of(Config(3)) == identity_of(Config(3, rate=1.0, names=[])) == {"width": 3}
    assert identity_of(Config(3, 2.0, ["a"])) == {"width": 3, "rate": 2.0, "names": ["a"]}
    seeds = [load([f"seed={s}", *more]) for s, more in ((0, []), (1, []), (1, ["method.seed=0"]))]
    assert len({config.directory() for config in seeds}) == len({c.digest() for c in seeds}) == 3
    assert seeds[0].directory().parent == seeds[1].directory().parent != seeds[2].directory().parent


def test_a_renamed_method_says_its_new_name():
    for says, ask in {
        "the method t_sr_ste is called fst now": lambda: methods.build("t_sr_ste"),
        "methods.t_sr_ste is called methods.fst now": lambda: methods.t_sr_ste,
        "method=t_sr_ste is called method=fst now": lambda: load(["method=t_sr_ste"]),
        "experiment=t_sr_ste_cramming is called experiment=fst_cramming now": lambda: load(
            ["experiment=t_sr_ste_cramming"]
        ),
    }.items():
        with pytest.raises((ValueError, ImportError, UserError), match=rf"^{says}$"):
            ask()


# steps, batch, optimizer, schedule, rate, minimum, warm-up, betas, decay, clip, average
RECIPES = {
    "fst_cramming": (
        38049, 4096, "adamw", "triangle", 1e-3, 0, 0, (0.9, 0.98), 0.01, 0.5, 0,
    ),  # FST's released config
    "dense_bert_large_phase1": (
        7038, 65536, "lamb", "sqrt", 6e-3, 0, 2001, (0.9, 0.999), 0.01, 1.0, 0,
    ),  # NVIDIA's, which SLoPe took: warm-up over 28.43 % of the steps
    "dense_bert_large_phase2": (
        1563, 32768, "lamb", "sqrt", 4e-3, 0, 200, (0.9, 0.999), 0.01, 1.0, 0,
    ),  # 12.8 %
    "dense_gpt2_small": (
        400_000, 512, "adamw", "linear", 6e-4, 0, 4000, (0.9, 0.999), 0.1, 1.0, 0,
    ),  # SLoPe's released configuration, on FlashAttention's training code
    "slope_gpt2_large": (
        400_000, 512, "adamw", "linear", 1.5e-4, 0, 4000, (0.9, 0.999), 0.1, 1.0, 0,
    ),
    "fst_deit_base": (
        187500, 2048, "lion", "cosine", 2e-4, 1e-6, 3125, (0.9, 0.99), 0.5, 0, 0.99996,
    ),  # FST's released script: 300 epochs of 625 steps, five of warm-up, 5e-5 x 2048 / 512
    "ast_boosted_gpt2_124m": (
        40000, 128, "adamw", "cosine", 2e-4, 2e-5, 2000, (0.9, 0.95), 0.1, 1.0, 0,
    ),  # the authors' command
}  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
def test_the_numbers_of_the_other_recipes(name, tmp_path, hf_model):
    overrides = [f"experiment={name}"]
    if name.startswith("ast"):
        hf_model("gpt2").save_pretrained(tmp_path)
        overrides += [f"model.path={tmp_path}", "model.block_size=32"]
    train = load(overrides).train
    assert (
        train.steps, train.batch_size, train.optimizer, train.schedule, train.learning_rate,
        train.min_learning_rate, train.warmup_steps, train.betas, train.weight_decay,
        train.grad_clip, train.ema,
    ) == RECIPES[name]  # fmt: skip


def test_deit_s_own_recipe_is_offered_beside_that_of_fst():
    """300 epochs of 1,251 x 1,024 images, AdamW at 5e-4 x batch / 512 (DeiT's released script)."""
    for size in ["tiny", "small", "base"]:
        ours, own = (
            load([f"experiment=dense_deit_{size}", f"train={name}"])
            for name in ("deit", "deit_adamw")
        )
        assert ours.train.optimizer == "lion" and (ours.model, ours.data) == (own.model, own.data)
        train = own.train
        assert (train.steps, train.batch_size, train.warmup_steps) == (300 * 1251, 1024, 5 * 1251)
        assert (train.optimizer, train.betas, train.weight_decay) == ("adamw", (0.9, 0.999), 0.05)
        rates = train.learning_rate, train.min_learning_rate, train.warmup_learning_rate
        assert rates == (1e-3, 1e-5, 1e-6)
        assert (train.schedule, train.grad_clip, train.ema) == ("cosine", 0.0, 0.99996)


def test_slope_s_bert_predicts_20_and_80_tokens():
    """Its code hides a fifth of a sequence's tokens, and no more than this."""
    for method in ["dense", "slope"]:
        for phase, tokens, most in [(1, 128, 20), (2, 512, 80)]:
            data = load([f"experiment={method}_bert_large_phase{phase}"]).data
            assert (data.sequence_length, data.max_predictions) == (tokens, most)
            assert data.mask_probability == 0.2 and data.mask_probability * tokens > most


def test_slope_s_gpt2_is_that_of_transformers_with_a_large_eps():
    small, half, large = (
        load([f"experiment=dense_gpt2_{name}"]) for name in ("small", "small_shallow", "large")
    )
    for config in (small, half, large):
        assert (config.train.eps, config.train.dtype) == (1e-4, "fp16")
        assert config.model.bias and config.model.dropout == 0.1 and config.model.gelu == "tanh"
    assert half.model == dataclasses.replace(small.model, n_layer=small.model.n_layer // 2)
    sparse = load(["experiment=sr_ste_gpt2_small"])
    assert (sparse.method_options.alpha, sparse.method_options.decay_on) == (6e-6, "gradients")


def test_fst_switches_bert_and_deit_to_dense_where_its_scripts_do():
    """Micro-step 250,000 of 300,000 is optimizer step 36,367; epoch 250 of 300 is 156,250."""
    bert, deit = (load([f"experiment=fst_{name}"]) for name in ("cramming", "deit_base"))
    assert bert.build_method().dense_steps[0] == 36367
    assert bert.method_options.alpha == 6e-6 and bert.method_options.refresh_every == 40
    # Bi-Mask searches every 100 of the 300,000 micro-steps, 3,000 times; here in optimizer steps.
    masks = load(["experiment=bi_mask_cramming"])
    searches = masks.train.steps / masks.method_options.permute_every
    assert searches == pytest.approx(300_000 / 100, rel=0.05)
    assert deit.build_method().dense_steps[0] == 156_250
    assert deit.method_options.alpha == 1e-3 and deit.method_options.refresh_every == 10


def test_a_key_that_does_not_exist_is_answered_with_one_that_does():
    for override, message in [
        ("train.stepz=20", r"there is no train\.stepz here; train\.steps may be meant$"),
        ("nothing_like_it=20", r"there is no nothing_like_it here$"),
        ("train.lr=1", r"there is no train\.lr here; train\.learning_rate may be meant$"),
        ("lr=1", r"there is no lr here; train\.learning_rate may be meant$"),
        ("train.wd=1", r"; train\.weight_decay may be meant$"),
        ("methd=ste", r"there is no methd here; method may be meant$"),
        *(
            (f"method.{key}=1", r"; method\.alpha is an option of method=ast, bi_mask, fst, sr_ste")
            for key in ("alfa", "alpha")
        ),
        ("+foo=1", r"there is no foo here$"),
        ("+modle.n_layer=1", r"there is no modle\.n_layer here; model\.n_layer may be meant$"),
        ("train.betas=[0.9", r"^train\.betas=\[0\.9 cannot be read \("),
    ]:
        with pytest.raises(UserError, match=message):
            load([override])
        with pytest.raises(UserError, match=message):  # in any run of a sweep, before the first
            check("pretrain", ["seed=0,1", "method=dense,s_ste", override], sweep=True)


def test_a_sweep_s_choices_of_a_file_are_all_checked():
    check("pretrain", ["method=sr_ste,ast", "method.alpha=1,2", "seed=range(0,3)"], sweep=True)
    with pytest.raises(UserError, match=r"there is no method\.alpha here"):
        check("pretrain", ["method=sr_ste,dense", "method.alpha=1,2"], sweep=True)


def test_a_model_larger_than_the_memory_is_refused_before_it_is_built():
    for override in [
        *("n_embd=4000000", "n_embd=40000000000", "n_layer=1000000000", "vocab_size=100000000000"),
        *(f"{key}=1{20 * '0'}" for key in ("vocab_size", "n_inner")),
        f"vocab_size=1{20 * '0'} model=bert_nano data=stdlib_mlm",
        "mlp_ratio=3.5e38 model=vit_nano data=digits",
    ]:
        config = load(f"model.{override}".split(" "))
        before = torch.get_rng_state()
        message = r"(GPT|BertLM|ViT) of this shape need [\d,.]+ GiB of memory, this machine has "
        with pytest.raises(UserError, match=message):
            config.build_model()
        assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("choice", [[], ["model=bert_nano"], ["model=deit_nano"]])
def test_the_weights_are_counted_by_one_and_two_layers(choice, monkeypatch):
    config = load(choice)
    model = config.build_model()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    monkeypatch.setattr(memory, "total", lambda device: weights)
    config.build_model()
    monkeypatch.setattr(memory, "total", lambda device: weights - 1)
    with pytest.raises(UserError, match="of this shape need"):
        config.build_model()


@pytest.mark.parametrize(("optimizer", "copies"), [("adamw", 4), ("lion", 3)])
def test_a_training_larger_than_the_memory_is_refused(optimizer, copies, monkeypatch):
    config = load(["method=dense", f"train.optimizer={optimizer}"])
    model, method = config.build_model(), config.build_method()
    method.convert(model)
    model.transformer.wpe.requires_grad_(False)  # needs no gradient and no moments
    trained = [p for p in model.parameters() if p.requires_grad]
    tensors = trained * copies + [model.transformer.wpe.weight, *model.buffers()]
    needed = sum(tensor.nbytes for tensor in tensors)
    device = torch.device("cpu")
    monkeypatch.setattr(memory, "total", lambda device: needed)
    Optimization(model, method, config.train, device)
    monkeypatch.setattr(memory, "total", lambda device: needed - 1)
    with pytest.raises(UserError, match=r"gradients and moments need 0\.0 GiB"):
        Optimization(model, method, config.train, device)


def test_want_of_memory_is_one_line(capsys):
    for error in (MemoryError(), np_error(), torch_error()):
        with pytest.raises(SystemExit) as stop, exit_with_one_line("begins it anew"):
            raise error
        text = str(stop.value.code)
        assert text.startswith("error: out of memory (") and "\n" not in text
    with pytest.raises(RuntimeError), exit_with_one_line("begins it anew"):
        raise RuntimeError("of the work itself")


def test_a_link_to_nothing_and_control_characters_are_told(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "no\x1bwhere")
    for act, said in (
        (
            lambda: (tmp_path / "link").mkdir(),
            r"^error: .*/link: a link to .*/no\\x1bwhere, which ",
        ),
        (lambda: (tmp_path / "\x07" / "x").mkdir(), r"^error: [^\x07]*\\x07/x: No such file"),
    ):
        with pytest.raises(SystemExit, match=said), exit_with_one_line("begins it anew"):
            act()


def test_a_signal_that_ends_as_another_error_is_still_that_signal():
    """omegaconf, interrupted in the midst of a change, fails in its `finally`."""
    for kind in (Terminated, KeyboardInterrupt):
        with pytest.raises(kind), one_line_errors():
            try:
                try:
                    raise kind
                finally:
                    None._invalidate_flags_cache()
            except AttributeError as error:
                raise UserError("train.betas: 'NoneType' object has no attribute") from error


def np_error():
    with pytest.raises(MemoryError) as caught:
        np.empty(2**60, np.uint8)
    return caught.value


def torch_error():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    return caught.value


def test_methods_with_a_form_of_adamw_refuse_other_optimizers(tiny):
    for optimizer, method in (("lion", "step"), ("lamb", "ast")):
        with pytest.raises(UserError, match=f"train.optimizer={optimizer}, but the update rule"):
            pretraining.run(tiny(f"method={method}", f"train.optimizer={optimizer}"), quiet)
    config = tiny("method=ast", "method.decay_route=decoupled", "train.optimizer=lion")
    assert pretraining.run(config, quiet)["steps"] == 12


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
        methods.register(module)  # once more does nothing
        with pytest.raises(ValueError, match="needs a Config and a Method"):
            methods.register(math)
        with pytest.raises(ValueError, match=r"a method 'ste' already; give methods\.ste another"):
            methods.register(methods.module("ste"))
    methods._installed.cache_clear()
    try:
        assert "mine" in methods.available()
        assert type(methods.build("mine", beta=0.1)) is module.Method
        run = load(["model=gpt2_nano", "method=mine", "method.beta=0.25", "method.n=1"])
        assert type(run.build_method()) is module.Method
        assert (run.method_options.beta, run.method_options.n) == (0.25, 1)
        assert run.directory().parent.name.startswith("mine-n_1-beta_0.25-")
    finally:
        methods._installed.cache_clear()
