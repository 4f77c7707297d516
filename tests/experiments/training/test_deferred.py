"""Shared weights: rank 0 alone builds the model, and its numbers come to the ranks by blocks."""

import os

import pytest
import torch

from experiments import dino
from experiments.config.run import load
from experiments.training import pretraining, sharding
from experiments.training.blocks import blocks
from experiments.training.distributed import World, world
from methods.nn import sharding as shards
from models.hf import CausalLM
from tests.experiments.conftest import SHORT, TINY_MODEL
from tests.experiments.test_dino import TINY as TINY_DINO

CASES = {
    "s_ste": ["method=s_ste"],  # scales
    "fst": ["method=fst", "train.dtype=bf16"],  # tiles
    "slope": ["method=slope", "method.adapter_rank=2", "method.adapter_fraction=0.5"],
    "ast": ["method=ast", "method.slorb_k=4"],  # a teacher
}
SHARED = ["model.n_layer=3", "model.n_embd=24", "impl.shard=fsdp2"]


def numbers(model, method):
    teacher = getattr(method, "teacher", None)
    found = {**model.state_dict(), **dict(model.named_buffers())}
    return found | ({} if teacher is None else {f"t {n}": p for n, p in teacher.named_parameters()})


def compare(config, here, expected):
    """A sentence on what is not as it should be on this rank, or none."""
    model, method, *_ = pretraining._prepare(config, here)
    models = [m for m in (model, getattr(method, "teacher", None)) if m is not None]
    if {p.is_meta for m in models for p in m.parameters()} != {not here.is_main}:
        return "other ranks than the first have numbers, or that has none"
    parts = [sum(p.nbytes for p in block.parameters()) for block in blocks(model).values()]
    largest = max(*parts, sum(p.nbytes for p in model.parameters()) - sum(parts))
    held, bring = [], sharding._materialize_from_rank0

    def watched(*given):
        bring(*given)
        whole = [p for m in models for p in m.parameters() if not shards.is_sharded(p)]
        held.append(sum(p.nbytes for p in whole if not p.is_meta))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding, "_materialize_from_rank0", watched)
        sharding.shard_model(model, method, config.impl, None, here)
    if not here.is_main and max(held) > largest:
        return f"{max(held)} bytes are whole at once, the largest part has {largest}"
    found = {name: shards.full(tensor) for name, tensor in numbers(model, method).items()}
    # Derived where they are used.
    layers = method.sparse_layers.items()
    derived = {f"{name}.{d}" for name, layer in layers for d in layer.shards.derived}
    expected = {name: tensor for name, tensor in expected.items() if name not in derived}
    if found.keys() != expected.keys():
        return f"not the same tensors: {found.keys() ^ expected.keys()}"
    wrong = [name for name, value in expected.items() if not torch.equal(found[name], value)]
    return f"{wrong} differ" if wrong else ""


def work(rank, store, configs, folder):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    with world("cpu") as here:
        for name, config in configs.items():
            expected = torch.load(folder / f"{name}.pt")
            (folder / f"{name}{rank}").write_text(compare(config, here, expected))
    torch.distributed.barrier()
    os._exit(0)  # gloo's threads outlive the group and abort an interpreter that ends


@pytest.fixture(scope="module")
def said(corpus_dir, tmp_path_factory, hf_model, start_ranks):
    """The result of `compare` for each case on each rank."""
    folder = tmp_path_factory.mktemp("deferred")
    data = ["data.name=words", f"data.source={corpus_dir / 'text'}", f"data.root={corpus_dir}"]
    data += ["data.vocab_size=300", *SHORT]
    model = [*TINY_MODEL, *SHARED]
    configs = {case: load([*model, *data, *more]) for case, more in CASES.items()}
    configs["dino"] = dino.load([*TINY_DINO, "method=sr_ste", "impl.shard=fsdp2"])
    # Two that start from weights: those of a run with adapters, and a checkpoint's.
    begun = [*TINY_MODEL, *data, *CASES["slope"], "train.steps=2", f"runs={folder}"]
    begun = load([*begun, "train.warmup_steps=0"])
    pretraining.run(begun, lambda line: None)
    own = ["impl.shard=fsdp2", "method=sr_ste", "method.include=['*attn.*']"]
    configs["run"] = load([*TINY_MODEL, *data, *own, f"init={begun.directory()}"])
    for family in ("gpt2", "llama"):
        hf_model(family, vocab_size=320).save_pretrained(folder / family)
        path = f"model.path={folder / family}"
        configs[family] = load(["model=hf", path, *data, "method=ast", "impl.shard=fsdp2"])
    one = World(0, 1, torch.device("cpu"))
    for case, config in configs.items():
        model, method, *_ = pretraining._prepare(config, one)
        torch.save(numbers(model, method), folder / f"{case}.pt")
    start_ranks(work, (folder / "store").as_uri(), configs, folder)
    return {(c, r): (folder / f"{c}{r}").read_text() for c in configs for r in range(2)}


@pytest.mark.parametrize("case", [*CASES, "dino", "run", "gpt2", "llama"])
def test_ranks_begin_with_the_numbers_of_one_process_block_by_block(said, case):
    assert (said[case, 0], said[case, 1]) == ("", "")


def test_a_checkpoint_without_its_weights_has_their_shapes(hf_model, tmp_path):
    def described(model):
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
        tensors = [(name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in named]
        return tensors, [m.training for m in model.modules()]

    for family in ("gpt2", "opt", "llama", "mistral"):
        path = tmp_path / family
        hf_model(family).save_pretrained(path)
        shape = CausalLM.shape_of(path)
        assert described(CausalLM.from_pretrained(path)) == described(shape)
        assert all(t.is_meta for t in shape.state_dict().values())
