"""Dense columns: which ones, and masks of every method that has them."""

import pytest
import torch
import torch.nn.functional as F

import methods
from common_kernels import check_nm
from methods.nn.columns import partial_mask, split
from tests.methods.loop import training_step
from tests.methods.test_one_shot import Net

METHODS = (
    ("ste", {"n": 1}),
    ("sr_ste", {}),
    ("ast", {"kl_weight": 0.0, "task_weight": 1.0, "refresh_every": 1}),
    ("cast", {"kl_weight": 0.0, "task_weight": 1.0, "refresh_every": 1}),
    ("one_shot", {"metric": "wanda"}),
    ("one_shot", {"metric": "sparsegpt"}),
    ("one_shot", {"metric": "maskllm", "mask_steps": 2}),
)


def test_by_hand():
    weight = torch.tensor([[9.0, 1, 2, 3, 0, 4, -3, 1], [0.0, 5, 1, 1, 9, 0, 4, 8]])
    grouped, dense = split(weight, 0.5, 4)
    assert (grouped.tolist(), dense.tolist()) == ([2, 3, 5, 6], [0, 1, 4, 7])
    mask = partial_mask(weight, grouped, 2, 4)
    assert mask.int().tolist() == [[1, 1, 0, 1, 1, 1, 0, 1], [1, 1, 1, 0, 1, 0, 1, 1]]
    for share, count in ((0.0, 0), (0.3, 4), (0.8, 8), (1.0, 8)):
        parts = split(weight, share, 4)
        assert len(parts[1]) == count and sorted(torch.cat(parts).tolist()) == [*range(8)]


@pytest.mark.parametrize(("name", "options"), METHODS)
def test_the_chosen_columns_stay_dense_and_the_others_are_legal(name, options):
    model, x = Net(), torch.randn(64, 16)
    dense = {i: split(model.mlp[i].weight, 0.25, 4)[1] for i in (0, 2)}
    method = methods.build(name, total_steps=2, dense_columns=0.25, **options)
    if method.capabilities.calibration_sequences:
        method.calibrate(model, [{"x": x, "target": x.flip(0)}])
    method.convert(model)
    optimizer = method.optimizer(model.parameters(), lr=0.1)
    for step in range(2):
        with training_step(method, step, optimizer):
            method.loss(model, {"x": x, "target": x.flip(0)}).backward()
    n = options.get("n", 2)
    assert method.metrics()["illegal_groups"] == 0 and method.phase() != "pruning"
    assert method.metrics()["density"] == 0.25 + 0.75 * n / 4
    assert not any(layer.sparse_products().fprop for layer in method.layers.values())
    method.finalize(model)
    for i, columns in dense.items():
        weight = model.mlp[i].weight
        assert weight[:, columns].all()
        rest = torch.ones(weight.shape[1], dtype=torch.bool).index_fill(0, columns, False)
        assert int(check_nm(weight[:, rest], n, 4)) == 0
        assert not methods.check(model)[f"mlp.{i}"]


def test_packed_beside_dense_columns_is_the_weight_in_use():
    """At the start, after a step, and with the weight and the columns of a loaded state."""
    pytest.importorskip("triton", reason="cuSPARSELt is emulated where Triton's interpreter runs")
    layers = [torch.nn.Linear(256, 64).bfloat16() for _ in range(2)]
    x, results = torch.randn(2, 32, 256).bfloat16(), []

    def checked(layer):
        y, weight = layer(x).float(), layer.effective_weight().float()
        want = F.linear(x.float(), weight, layer.bias.float())
        assert (y - want).norm() <= 2**-7 * want.norm() and layer.packed is not None
        return y

    for layer in layers:
        method = methods.build("sr_ste", include=["*"], total_steps=1, dense_columns=0.25)
        method.convert(model := torch.nn.Sequential(layer))
        assert method.accelerate(64, "cusparselt")["0"].fprop
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        with training_step(method, 0, optimizer):
            checked(layer).square().mean().backward()
        results.append(checked(layer))
    model[0].load_state_dict(layers[0].state_dict())
    assert torch.equal(checked(model[0]), results[0])
    method = methods.build("sr_ste", include=["*"], total_steps=1, dense_columns=1.0)
    method.convert(torch.nn.Sequential(torch.nn.Linear(64, 64).bfloat16()))
    assert not method.accelerate(64, "cusparselt")["0"].fprop  # nothing is left to pack
