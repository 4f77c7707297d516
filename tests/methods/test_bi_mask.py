"""Bi-Mask: the two masks, and the search for the permutation between them."""

import torch
from torch import nn

from common_kernels import check24
from methods import bi_mask
from tests.methods.loop import convert


def converted(weight, **options):
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight.data = weight.clone()
    return convert("bi_mask", layer, **options)


def gaussian(out=32, inputs=64, seed=0):
    return torch.randn(out, inputs, generator=torch.Generator().manual_seed(seed))


def test_both_masks_by_hand():
    rows = [[9.0, 8, 1, 1], [8, 7, 1, 1], [7, 1, 6, 1], [1, 2, 6, 9]]
    layer, _ = converted(torch.tensor(rows))  # before the first step rows keep their order
    forward = [[9.0, 8, 0, 0], [8, 7, 0, 0], [7, 0, 6, 0], [0, 0, 6, 9]]
    # Of the first column's 9, 8, 7 the smallest is left out.
    backward = [[9.0, 8, 0, 0], [8, 7, 0, 0], [0, 0, 6, 0], [0, 0, 6, 9]]
    assert torch.equal(layer.sparse_weight, torch.tensor(forward))
    assert torch.equal(layer.operands(torch.float32)[1].matrix, torch.tensor(backward))
    assert layer.state_dict().keys() == {"weight", "mask", "permutation"}  # the rest is derived


def test_dx_has_a_weight_of_its_own_that_is_sparse_along_the_permuted_outputs():
    layer, method = converted(gaussian())
    method.on_step_begin(0)
    backward, rows = layer.operand_dgrad, layer.permutation
    assert sorted(rows.tolist()) == list(range(32)) != rows.tolist()
    assert int(check24(backward[rows], dim=0)) == 0
    assert int(check24(backward, dim=0)) > 0
    assert int(check24(backward, dim=1)) == 0  # a part of the forward weight
    used = backward != 0
    assert torch.equal(backward[used], layer.sparse_weight[used]) and not used.all()
    x, dy = gaussian(12, 64, seed=1).requires_grad_(), gaussian(12, 32, seed=2)
    y = layer(x)
    y.backward(dy)
    tolerance = {"rtol": 1e-5, "atol": 1e-5}  # sums of 64 products of order one, in fp32
    torch.testing.assert_close(y, x.detach() @ layer.sparse_weight.t(), **tolerance)
    torch.testing.assert_close(x.grad, dy @ backward, **tolerance)
    torch.testing.assert_close(layer.weight.grad, dy.t() @ x.detach(), **tolerance)
    assert not torch.equal(backward, layer.sparse_weight)


def test_the_search_takes_the_best_of_a_hundred_random_permutations(monkeypatch):
    seen, count = [], bi_mask.weights_in_both_masks

    def record(mask, rows):
        seen.append((count(mask, rows), rows.tolist()))
        return seen[-1][0]

    monkeypatch.setattr(bi_mask, "weights_in_both_masks", record)
    layer, _ = converted(gaussian(256, 256))
    layer.search_permutation(7)
    assert len(seen) == len({tuple(rows) for _, rows in seen}) == 100
    best = max(left for left, _ in seen)
    assert layer.permutation.tolist() == next(rows for left, rows in seen if left == best)
    # Of four entries, kept with probability 1/2, min(number kept, 2) remain: 26/16 on average.
    assert abs(int(seen[0][0]) - 16_384 * 1.625) <= 5 * 16_384**0.5


def test_a_structure_that_the_given_order_destroys():
    """Rows 0 to 3 keep the first two columns, rows 4 to 7 the others: in this order half of it is
    lost for dX, in a mixed one nothing."""
    weight = torch.ones(8, 4)
    weight[:4, :2] = weight[4:, 2:] = 2.0
    layer, method = converted(weight)
    assert int(layer.operand_dgrad.count_nonzero()) == 8
    method.on_step_begin(0)  # 36 of 70 ways to share the rows out are such
    assert torch.equal(layer.operand_dgrad, layer.sparse_weight)
