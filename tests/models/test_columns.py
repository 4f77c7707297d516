"""Finished weights with dense columns: which these are, and their product as [2:4 | dense]."""

import copy

import pytest
import torch
from torch import nn

from common_kernels import check24, matmul, nm_mask
from methods.nn.columns import partial_mask, split
from models import columns, packed
from models.packed import Limits
from models.quantized import quantize
from tests.models.test_packed import DEVICE


def weights(rows, inputs, share, full=0, zeros=0, last=False):
    """A weight with dense columns and their number. full: columns of groups that are kept in all
    rows. zeros: dense columns that have some. last: dense columns are the last ones."""
    torch.manual_seed(0)
    weight = torch.randn(rows, inputs)
    if last:
        weight[:, round((1 - share) * inputs) :] *= 3
    grouped, dense = split(weight, share, 4)
    scores = weight.clone()
    scores[:, grouped[torch.randperm(len(grouped))[:full]]] *= 1000
    weight *= partial_mask(scores, grouped, 2, 4)
    for column in dense[torch.randperm(len(dense))[:zeros]]:
        weight[torch.randint(rows, (2,)), column] = 0
    return weight, len(dense)


@pytest.mark.parametrize(
    "given",
    [
        (64, 128, 0.5), (64, 256, 0.1), (256, 512, 0.25, 0, 0, True), (256, 512, 0.75, 5),
        (256, 512, 0.25, 0, 20), (256, 512, 0.5, 20, 40), (128, 512, 0.5, 0, 200, True),
    ],
)  # fmt: skip
def test_a_division_is_2_4_with_the_fewest_dense_columns(given):
    weight, count = weights(*given)
    grouped, dense = columns.divide(weight)
    assert sorted(torch.cat([grouped, dense]).tolist()) == [*range(weight.shape[1])]
    assert int(check24(weight[:, grouped])) == 0 and len(grouped) % columns.COLUMNS == 0
    assert 0 <= len(dense) - count < columns.COLUMNS
    assert torch.equal(dense, dense.sort().values) and torch.equal(grouped, grouped.sort().values)


def test_other_weights_have_no_division():
    torch.manual_seed(0)
    dense = torch.randn(64, 256)
    half, other = dense * (torch.rand(64, 256) < 0.5), dense * nm_mask(dense, 4, 8)
    for weight in (dense, half, other, weights(64, 64, 0.5)[0], dense[:, :0]):
        assert columns.divide(weight) is None
    sparse = nn.Linear(256, 64)
    sparse.weight.data = 1000 * dense * nm_mask(dense)
    model = nn.Sequential(sparse, nn.Linear(64, 64, device="meta"))
    assert columns.linears_and_divisions(model) == ({"0": sparse}, {})


def model(exact=True):
    """Two linears with dense columns, in the second one the last; results are `exact` integers."""
    layers = nn.Sequential(nn.Linear(256, 128), nn.Linear(128, 64, bias=False))
    for layer, share, last in zip(layers, (0.25, 0.5), (False, True), strict=True):
        weight, _ = weights(*layer.weight.shape, share, 2, last=last)
        # 1 and 2 are no integers of 4 or 8 bits times a scale, which are multiplied unrounded.
        layer.weight.data = weight.sign() * (1 + (weight.abs() > 1)) if exact else weight
    if exact:
        layers[0].bias.data = torch.randint(-3, 4, (128,)).float()
    return layers.to(DEVICE, torch.bfloat16)


@pytest.mark.parametrize("layout", ["cusparselt_sm90", *matmul.cuda.LAYOUTS[:1]])
@torch.no_grad()
def test_the_product_is_that_of_the_dense_weight(layout, monkeypatch):
    if "cutlass" in layout and (why := matmul.unavailable("cuda", DEVICE, torch.bfloat16)):
        pytest.skip(why)
    monkeypatch.setattr(packed, "_layout_of", lambda *_, measures: layout)
    for own in (Limits(0, 0), Limits(8, 0), Limits(8, None)):
        for exact in (True, False):
            run = model(exact)
            dense = copy.deepcopy(run)
            assert packed.pack(run, own) == {"0": own, "1": own} == packed.limits_of(run)
            for shape in ((1,), (5,), (1, 8), (3, 2, 16), (70,), (0,)):
                x = torch.randn(*shape, 256, device=DEVICE).bfloat16()
                x = x.sign() * (x.abs() > 1) if exact else x  # sums stay below 256
                for layer, whole in zip(run, dense, strict=True):
                    want, rounding = whole(x), 0.0 if exact else 2**-6
                    torch.testing.assert_close(layer(x), want, rtol=rounding, atol=8 * rounding)
                    x = want.clamp(-1, 1)


@torch.no_grad()
def test_what_is_held_and_used():
    run = model()
    x = torch.randn(2, 256, device=DEVICE).bfloat16()
    packed.pack(run, Limits(1, 2))
    for layer, (rows, grouped, dense) in zip(run, ((128, 192, 64), (64, 64, 64)), strict=True):
        assert layer.packed.buffer.nbytes == rows * grouped * 9 // 8
        assert layer.beside.weight.nbytes == 2 * rows * dense
    assert run.state_dict().keys() == {"0.weight", "0.bias", "1.weight"}
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=False)
    assert torch.equal(compiled(x), run(x))
    run[0].weight.mul_(2)  # noticed
    assert torch.equal(run[0](x), nn.functional.linear(x, run[0].weight, run[0].bias))
    assert [type(layer) for layer in run.half()] == [nn.Linear, nn.Linear]
    assert not hasattr(run[0], "beside")


@torch.no_grad()
def test_only_what_is_2_4_becomes_integers():
    run = model(exact=False)
    before, x = copy.deepcopy(run), torch.randn(3, 256, device=DEVICE).bfloat16()
    assert quantize(run, 4) == ["0", "1"]
    for layer, own in zip(run, before, strict=True):
        changed = (layer.weight != own.weight).any(0)
        grouped, dense = columns.divide(own.weight)
        assert changed[grouped].all() and not changed[dense].any()
    rounded = copy.deepcopy(run)
    packed.pack(run, Limits(8, None))
    assert [layer.fragments.bits for layer in run] == [4, 4]
    want = rounded(x).float()  # with weights that were rounded to bf16 once more
    assert (run(x).float() - want).norm() <= 2**-6 * want.norm()
