"""Tests of what starts from a finished run: its weights, and the method that fine-tunes them; and
of runs whose files are gone or damaged."""

import itertools
import json
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from common_kernels import check24
from experiments import evaluate
from experiments.config import initial
from experiments.config.run import load
from experiments.evaluation.config import load as load_evaluation
from experiments.exporting import export
from experiments.exporting.files import to_transformers
from experiments.runs.finished import FinishedRun
from experiments.support.checkpoint import read_sealed, sha256
from experiments.support.errors import UserError
from experiments.support.results import read_training
from experiments.training import pretraining
from methods import dense, one_shot, s_ste, slope
from tests.experiments.conftest import CPU, TINY_MODEL, quiet, settings, words_of
from tests.methods.loop import training_step

ADAPTERS = ["method=slope", "method.adapter_rank=4", "method.adapter_fraction=0.5"]
PARTIAL = "method.dense_columns=0.25"
TOKENS = torch.arange(32).reshape(2, 16) * 7 % 300


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of this module's runs of four steps, each trained once."""
    return tmp_path_factory.mktemp("trained")


@pytest.fixture
def finished(tiny, runs, tmp_path):
    """finished("method=ste") -> a copy of that run."""

    def build(*overrides):
        config = tiny("train.steps=4", *overrides, f"runs={runs}")
        pretraining.run(config, quiet)
        copied = tmp_path / f"copy{len(list(tmp_path.glob('copy*')))}"
        return FinishedRun.open(shutil.copytree(config.directory(), copied))

    return build


def logits(model):
    with torch.no_grad():
        return model.eval()(TOKENS)[0]


def test_sparse_and_dense_weights_of_a_run(finished):
    run = finished("method=sr_ste")
    sparse, latent = run.model("sparse"), run.model("dense")
    assert len(run.converted) == 2
    for name in run.converted:
        pruned, master = (m.get_parameter(f"{name}.weight") for m in (sparse, latent))
        kept = pruned != 0
        assert int(check24(pruned)) == 0 and torch.equal(pruned[kept], master[kept])
        assert (master != 0).float().mean() > 0.9
    stored = load_file(run.directory / "model.safetensors")
    assert all(torch.equal(p, stored[n]) for n, p in sparse.named_parameters())
    # The master weights stand without the low-rank term that repairs their pruning.
    run = finished("method=ast", "method.slorb_k=8")
    boosted, latent = run.model("sparse"), run.model("dense")
    for name in run.converted:
        assert hasattr(boosted.get_submodule(name), "slorb_s")
        assert set(latent.get_submodule(name).state_dict()) == {"weight"}
        assert (latent.get_parameter(f"{name}.weight") != 0).float().mean() > 0.9
    # A run that ended dense has one kind of weights.
    run = finished("method=fst", "method.dense_fraction=0.5")
    (run.directory / "latent.safetensors").unlink()  # it has nothing to add
    assert torch.equal(logits(run.model("dense")), logits(run.model("sparse")))


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        (["method=fst", "method.dense_fraction=0.5"], dense.Method),
        (["method=sr_ste"], one_shot.Method),
        (["method=semi_sparse"], one_shot.Method),
        (["method=s_ste", "method.fp8=paper"], s_ste.Method),
        (ADAPTERS, slope.Method),
        (["method=ast", "method.slorb_k=8", PARTIAL], None),
        (["method=ste", PARTIAL], one_shot.Method),
    ],
)
def test_each_method_is_fine_tuned_by_its_own_rule_from_the_function_it_ended_with(
    finished, options, kind
):
    run = finished(*options)
    model = run.model()
    before = logits(model)
    method = run.method_for(model, "auto", total_steps=10, seed=0)
    assert kind is None or type(method) is kind
    assert tuple(method.layers) == run.converted
    torch.testing.assert_close(logits(model), before, rtol=0, atol=1e-6)
    # A step, and the zeros are where they were (S-STE's may move).
    with training_step(method, 0, method.optimizer(model.parameters(), lr=1e-3)):
        method.loss(model, {"input": TOKENS, "target": TOKENS}).backward()
    assert not method.metrics().get("illegal_groups")
    method.finalize(model)
    assert not torch.equal(logits(model), before)
    for name in run.converted:
        old = run.model().get_parameter(f"{name}.weight")
        new = model.get_parameter(f"{name}.weight")
        if kind is not dense.Method:
            assert int(check24(new)) == 0 or PARTIAL in options
            # torchao's greedy masks leave gaps in some groups, which a 2:4 mask may fill.
            if kind is not s_ste.Method and options != ["method=semi_sparse"]:
                assert torch.equal(old == 0, new == 0)


def test_the_method_that_was_asked_for_has_its_length_seed_and_dtype(finished):
    for options, mode, kind in (
        (["method=s_ste"], "dense", dense.Method),
        (["method=s_ste"], "masked", one_shot.Method),
        (["method=slope", "method.m=8"], "masked", slope.Method),  # no other method keeps 2:8
        (["method=ste", "method.n=4", "method.m=8"], "auto", one_shot.Method),
    ):
        run = finished(*options)
        method = run.method_for(run.model(), mode, 10, 3, torch.bfloat16)
        assert type(method) is kind
        if mode != "dense":
            assert {*map(method.pattern, method.layers)} == {*map(run.pattern, run.converted)}
            assert {layer.dtype for layer in method.sparse_layers.values()} == {torch.bfloat16}
            assert (method.config.total_steps, method.config.seed) == (10, 3)


OURS = {
    "gpt2": [*TINY_MODEL, "model.bias=true"],
    "bert": [
        *("model=bert_nano", *TINY_MODEL, "model.n_inner=32", "model.positions=learned"),
        *settings("model", pre_norm="false", bias="true", glu="false", head_transform="true"),
    ],
    "vit": [
        "model=deit_nano",
        *settings("model", width=16, depth=1, heads=2, patch_size=8, mlp_ratio=2),
    ],
}


@pytest.mark.parametrize("kind", OURS)
def test_a_run_starts_from_the_weights_of_transformers(kind, tmp_path):
    source, folder = load(OURS[kind]).build_model(), tmp_path / "theirs"
    to_transformers(source).save_pretrained(folder)
    config = load([*OURS[kind], f"init={folder}", f"runs={tmp_path}"])
    found = config.build_model().state_dict()
    assert all(torch.equal(found[name], value) for name, value in source.state_dict().items())
    digest = config.digest()
    assert digest != load([*OURS[kind], f"runs={tmp_path}"]).digest()
    with torch.no_grad():
        next(source.parameters()).add_(1.0)
    to_transformers(source).save_pretrained(folder)
    assert load([*OURS[kind], f"init={folder}"]).digest() != digest


FILES = ["model.safetensors", "latent.safetensors", "ema.safetensors", "tokenizer.json"]
READERS = {
    "evaluate": lambda run, text: evaluate.run(
        load_evaluation([f"run={run}", f"ppl={text}", "block_size=8", "impl.device=cpu"]), quiet
    ),
    "export": lambda run, _: export.export(FinishedRun.open(run), report=quiet),
    "the dense model": lambda run, _: FinishedRun.open(run).model("dense"),
    "the tokenizer": lambda run, _: FinishedRun.open(run).tokenizer(),
}


@pytest.fixture(scope="module")
def made(corpus_dir, tmp_path_factory):
    """Overrides of a finished run with averaged weights, in a folder of its own."""
    runs = tmp_path_factory.mktemp("damaged") / "runs"
    short = settings("train", steps=3, batch_size=2, warmup_steps=0, eval_samples=4, ema=0.5)
    overrides = [*TINY_MODEL, *CPU, "method=ste", *short, *words_of(corpus_dir), f"runs={runs}"]
    pretraining.run(load(overrides), quiet)
    return overrides


@pytest.fixture
def config(made, tmp_path):
    """The config of the run of `made`, in a copy of its folder."""
    whole = load(made)
    shutil.copytree(whole.runs, tmp_path / "runs")
    config = load([*made, f"runs={tmp_path / 'runs'}"])
    path = config.directory() / "result.json"
    result = read_sealed(path) | {"command": config.command}
    path.write_text(json.dumps(result))
    return config


def flip(path):
    """One bit in the middle of its content."""
    content = bytearray(path.read_bytes())
    content[len(content) * 3 // 4] ^= 1
    path.write_bytes(content)


def test_a_run_that_is_not_whole_is_not_done_and_its_command_mends_it(config):
    directory = config.directory()
    for path, harm in itertools.product((directory / name for name in FILES), (flip, Path.unlink)):
        before, content = sha256(path), path.read_bytes()
        harm(path)
        assert pretraining.finished(config) is None
        with pytest.raises(UserError, match=f"{path.name} .*; make the run again: ") as caught:
            initial.check_run_files(directory, read_training(directory))
        if path.name != FILES[-1] or harm is flip:
            path.write_bytes(content)
    assert "\n" not in str(caught.value)
    words = shlex.split(str(caught.value).partition("again: ")[2])
    assert words[:3] == ["python", "-m", "experiments.pretrain"]
    said = []
    pretraining.run(load(words[3:]), said.append)
    assert said[0].startswith(f"{path} ") and said[0].endswith("; trained anew")
    assert pretraining.finished(config) is not None
    assert sha256(path) == before  # on a CPU the same bits


def test_whoever_reads_a_run_looks_at_the_hashes(config, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the mask keeps two of four weights and drops others " * 9)
    for reader, read in READERS.items():
        name = {"the dense model": FILES[1], "the tokenizer": FILES[3]}.get(reader, FILES[0])
        path = config.directory() / name
        content = path.read_bytes()
        flip(path)
        with pytest.raises(UserError, match=f"{name} .*again: python -m experiments.pretrain"):
            read(config.directory(), text)
        path.write_bytes(content)


def test_a_run_is_not_begun_with_damaged_weights_and_stays_done_once_they_are_mended(config, made):
    after = load([*made, f"runs={config.runs}", "method=dense", f"init={config.directory()}"])
    pretraining.run(after, quiet)
    flip(config.directory() / "model.safetensors")
    with pytest.raises(UserError, match=r"again: python -m .* method=ste "):
        pretraining.run(after, quiet)
    pretraining.run(config, quiet)
    said = []
    pretraining.run(after, said.append)
    assert said == [f"done already: {after.directory()}"]
