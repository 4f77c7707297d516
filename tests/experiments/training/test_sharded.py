"""Pre-training with `impl.shard=fsdp2`: two and four processes, and what they leave for others."""

import os
import shutil
from contextlib import suppress

import pytest
import torch
from safetensors.torch import load_file

from experiments import dino
from experiments.config.run import load
from experiments.training import checkpoints, pretraining, sharding
from experiments.training.distributed import World, world
from experiments.training.trainer import Trainer
from methods import s_ste
from models.gpt2 import GPT, GPTConfig
from tests.experiments.conftest import SHORT, TINY_MODEL, Interrupted, quiet, untimed, words_of
from tests.experiments.test_dino import TINY as TINY_DINO

# Each passes a choice of masks and, where the method has phases, a switch. A large eps lets AdamW's
# update be as smooth as the gradient: no last bit of it grows.
CASES = {  # fused: by rows on two ranks; on four those of a rank are no multiple of 4
    "fst": [
        "method.refresh_every=4", "method.dense_fraction=0.4", "method.mvue=off",
        "impl.optimizer=fused",
    ],
    "s_ste": ["method.mvue=off", "train.ema=0.5", "impl.micro_batch=1", "impl.optimizer=fused"],
    "ast": ["method.refresh_every=5", "method.slorb_k=4", "impl.activation_checkpointing=true"],
    "slope": ["method.adapter_rank=2", "method.adapter_fraction=0.5"],
}  # fmt: skip
SETTINGS = ["model.n_layer=2", "model.n_embd=24", "train.eps=1e-2", "impl.shard=fsdp2"]
LAST = 12
IMAGES = [
    *TINY_DINO, "method=semi_sparse", "train.eps=1e-2", "impl.workers=0", "impl.shard=fsdp2",
    "impl.checkpoint_every=1",
]  # fmt: skip


def _train(config, last):
    """Train to the end, or up to the step `last`, in which the training dies."""
    train_step = Trainer._train_step

    def dying(self, batches):
        if self.step == last:
            self.saver.wait()
            raise Interrupted
        return train_step(self, batches)

    with pytest.MonkeyPatch.context() as patch, suppress(Interrupted):
        patch.setattr(Trainer, "_train_step", dying)
        pretraining.run(config, quiet)


def _run(rank, ranks, runs):
    """`_train` each of `runs`, whose model rank 0 alone builds with numbers."""
    shard = sharding.Shards._shard

    def watched(self, model, *given):
        assert {p.is_meta for p in model.parameters()} == {rank > 0}
        shard(self, model, *given)

    sharding.Shards._shard = watched
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    with world("cpu"):
        for config, last in runs:
            _train(config, last)


@pytest.fixture(scope="module")
def trained(corpus_dir, tmp_path_factory, start_ranks, request):
    """The config of each case by (case, folder): `one` process, `two` ranks, and `moved` from two
    to four to one, FST's begun by one; and what two ranks left of `moved`. Those that are asked
    for are trained."""
    here = [item for item in request.session.items if item.path == request.path]
    asked = {tuple(i.callspec.params.values()) for i in here if hasattr(i, "callspec")}
    cases = [case for case in CASES if (case, "two") in asked | {("fst", "two")}]
    folder = tmp_path_factory.mktemp("sharded")
    model = [o for o in TINY_MODEL if "n_layer" not in o and "n_embd" not in o]
    common, found = [*model, *SHORT, *SETTINGS, *words_of(corpus_dir)], {}
    for case, options in CASES.items():
        for place in ("one", "two", "moved", "offloaded"):
            own = [*common, f"method={case}", *options, f"runs={folder / place}"]
            own += ["impl.offload=true"] if place == "offloaded" else []
            found[case, place] = load(own)
    for place in ("one", "two"):
        found["dino", place] = dino.load([*IMAGES, f"runs={folder / place}"])
    _train(found["fst", "moved"], 4)
    two = [(found[case, "two"], LAST) for case in (*cases, "dino")]
    two += [(found["fst", "offloaded"], last) for last in (7, LAST)]
    start_ranks(_run, 2, [*two, (found["fst", "moved"], 7)])
    shutil.copytree(folder / "moved", folder / "kept")
    start_ranks(_run, 4, [(found["fst", "moved"], 10)], ranks=4)
    for case in (*cases, "dino"):
        pretraining.run(found[case, "one"], quiet)
    pretraining.run(found["fst", "moved"], quiet)
    return found, folder / "kept"


def curves(config):
    """Every number of the log but times, by step and name."""
    return {
        (record["step"], name): value
        for record in untimed(config)
        for name, value in record.items()
        if not isinstance(value, str)
    }


@pytest.mark.parametrize(
    ("case", "place"),
    [
        *(("fst", "two"), ("s_ste", "two"), ("ast", "two"), ("fst", "moved")),
        pytest.param("slope", "two", marks=pytest.mark.extra),
    ],
)
def test_ranks_that_share_weights_train_as_one_process(trained, case, place):
    one, other = trained[0][case, "one"], trained[0][case, place]
    found, expected = curves(other), curves(one)
    assert found.keys() == expected.keys()
    assert len({step for step, name in found if name == "loss"}) == LAST
    assert found == pytest.approx(expected, abs=1e-5)
    ours, alone = pretraining.finished(other), pretraining.finished(one)
    assert ours["files"].keys() == alone["files"].keys()
    assert ours["sparsity"] == alone["sparsity"] and ours["converted"] == alone["converted"]
    assert ours["metrics"] == pytest.approx(alone["metrics"], abs=1e-5)
    for name in alone["files"]:
        if name.endswith(".safetensors"):  # dtypes are compared as well
            found, weights = (load_file(config.directory() / name) for config in (other, one))
            torch.testing.assert_close(found, weights, rtol=0, atol=1e-4)


def test_offloading_changes_no_number_and_a_teacher_is_shared(trained):
    """Nor does a stop; on the CPU host and device are one, so that each sum has the same order."""
    two, offloaded = (trained[0]["fst", place] for place in ("two", "offloaded"))
    assert curves(offloaded) == curves(two)
    found, weights = (load_file(c.directory() / "model.safetensors") for c in (offloaded, two))
    torch.testing.assert_close(found, weights, rtol=0, atol=0)
    one, two = (trained[0]["dino", place] for place in ("one", "two"))
    assert curves(two) == pytest.approx(curves(one), rel=1e-4, abs=1e-5)
    found, weights = (load_file(c.directory() / "model.safetensors") for c in (two, one))
    torch.testing.assert_close(found, weights, rtol=0, atol=1e-4)


ALONE = World(0, 1, torch.device("cpu"))


def newest(folder, messages):
    """The newest checkpoint in `folder`, whole, read by one process."""
    state = checkpoints.load_latest(folder, messages.append, ALONE)
    return checkpoints.placed(state, None)


def test_a_checkpoint_is_split_by_ranks_and_holds_no_pickle(trained):
    [two_checkpoints] = trained[1].glob("*/fst*/seed0/checkpoints")
    names = [p.name for p in checkpoints.found(two_checkpoints)]
    assert names == ["step-000000003", "step-000000006"]
    folder = two_checkpoints / "step-000000006"
    assert {p.name for p in folder.iterdir()} == {
        "index.json", "state.pt", "rank-0.safetensors", "rank-1.safetensors"
    }  # fmt: skip
    weight = "/model/transformer.h.0.mlp.c_fc.weight"
    parts = [load_file(folder / f"rank-{rank}.safetensors") for rank in range(2)]
    state = newest(two_checkpoints, [])
    found = state["model"][weight.removeprefix("/model/")]
    assert torch.equal(found, torch.cat([part[weight] for part in parts]))
    # What is tied is there once.
    assert sum("wte" in name or "lm_head" in name for name in parts[0] if "model" in name) == 1
    assert state["step"] == 6 and len(state["generators"]) == 2


def test_weights_that_autocast_rounds_are_gathered_rounded():
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=16, vocab_size=32, block_size=8, bias=True))
    linears = {f"transformer.h.{i}.{name}" for i in (0, 1) for name in ("mlp.c_fc", "mlp.c_proj")}
    names = {id(p): n for n, p in model.named_parameters()}

    def rounded():
        return {names[id(p)].rpartition(".")[0] for p in sharding._rounded(model)}

    attention = {f"transformer.h.{i}.attn.{name}" for i in (0, 1) for name in ("c_attn", "c_proj")}
    assert rounded() == linears | attention  # neither norms nor what is tied to an embedding
    s_ste.Method(s_ste.Config()).convert(model)  # its threshold is taken from the whole weight
    assert rounded() == attention
