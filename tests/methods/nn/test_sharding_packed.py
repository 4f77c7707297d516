"""Products of sharded weights on packed operands are those of whole weights; cuSPARSELt's are
emulated."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import methods
from methods.nn.gemms import DENSE
from tests.methods.loop import training_step

pytest.importorskip("triton", reason="cuSPARSELt is emulated where Triton's interpreter runs")

BF16, STEPS, PARTS = torch.bfloat16, 4, 2
CASES = {
    "fst": {"dense_fraction": 0.5, "total_steps": STEPS},
    "semi_sparse": {"algorithm": "exact", "sparse_fraction": 0.5, "total_steps": STEPS},
    "bi_mask": {"permute_every": 2, "candidates": 4},
    "s_ste": {"beta": "mse_dynamic"},
    "slope": {"adapter_rank": 4, "adapter_fraction": 0.5, "total_steps": STEPS},
}


def build(name, sharded, accelerated="before"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    method = methods.build(name, include=("*",), exclude=(), **CASES[name])
    method.convert(model, BF16)
    if accelerated == "before":
        method.accelerate(64, "cusparselt")
    if sharded:
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
    if accelerated == "after":
        method.accelerate(64, "cusparselt")
    return model, method, method.optimizer(model.parameters(), lr=1e-2)


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def a_step(run, step, parts):
    """Outputs and input gradients of each part of the batch, and the gradients of all weights."""
    model, method, optimizer = run
    xs = torch.randn(PARTS, 40, 64, generator=torch.Generator().manual_seed(step))
    with training_step(method, step, optimizer):
        found = {}
        for part in parts:
            method.open_micro_batch()
            x = xs[part].requires_grad_()
            with torch.no_grad():  # in fp32, for which nothing is packed
                found[f"fp32 y{part}"] = model(x)
            with torch.autocast("cpu", BF16):
                y = model(x)
            (y.float().square().mean() / len(parts)).backward()
            found[f"y{part}"], found[f"x{part}"] = y.detach(), x.grad * len(parts)
        grads = {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    return found | grads


def _train(rank, results):
    """The steps of every case on two ranks, a part of the batch each."""
    found = {}
    for index, name in enumerate(CASES):
        run = build(name, sharded=True, accelerated=("before", "after")[index % 2])
        assert all(layer.accelerated != DENSE for layer in run[1].sparse_layers.values())
        found[name] = [a_step(run, step, [rank]) for step in range(STEPS)]
        assert all(layer.operand is layer.packed is None for layer in run[1].sparse_layers.values())
    torch.save(found, f"{results}{rank}")


@pytest.fixture(scope="module")
def two_ranks(start_ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed")
    start_ranks(_train, folder / "rank", ranks=PARTS)
    return [torch.load(f"{folder}/rank{rank}", weights_only=True) for rank in range(PARTS)]


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_give_what_one_process_gives(name, two_ranks):
    """To the last bit: the products are the same, and a sum of two parts has one order."""
    run = build(name, sharded=False)
    for step in range(STEPS):
        found = {}
        for rank in two_ranks:
            found |= rank[name][step]
        expected = a_step(run, step, range(PARTS))
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            assert torch.equal(found[key], tensor), (step, key)
