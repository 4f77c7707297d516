"""N:M matrices in compressed form: packed masks, kept values and the way back."""

import itertools

import pytest
import torch

from common_kernels import (
    compress_nm,
    double_prune_bits,
    expand_nm,
    pack_mask,
    unpack_mask,
)
from tests.each import each

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    integer = torch.int32 if a.dtype == torch.float32 else torch.int16
    return a.shape == b.shape and torch.equal(a.view(integer), b.view(integer))


def test_compressed_form_by_hand():
    x = torch.tensor([[1.0, 2, 3, 4, 5, 6, 7, 8], [-1, -2, -3, -4, -5, -6, -7, -8]])
    mask = torch.tensor([[0, 1, 1, 0, 1, 0, 0, 1], [1, 1, 0, 0, 0, 0, 1, 1]]).bool()
    bits = pack_mask(mask)
    assert bits.dtype == torch.uint8
    assert bits.tolist() == [[2 + 4 + 16 + 128], [1 + 2 + 64 + 128]]
    values = compress_nm(x, bits)
    assert values.tolist() == [[2, 3, 5, 8], [-1, -2, -7, -8]]
    dense = [[0, 2, 3, 0, 5, 0, 0, 8], [-1, -2, 0, 0, 0, 0, -7, -8]]
    assert expand_nm(values, bits).tolist() == dense
    assert compress_nm(mask, bits).all()


@each("dtype", DTYPES)
def test_every_pair_of_masks_and_values_comes_back(dtype):
    """All 36 pairs of 2:4 groups with all 81 fillings of their kept entries, zeros included.

    Positions that are taken from the values instead lose kept zeros: [0, a, 0, 0] and [0, 0, a, 0]
    are each part of three masks.
    """
    groups = torch.zeros(6, 4, dtype=torch.bool)
    for row, kept in enumerate(itertools.combinations(range(4), 2)):
        groups[row, list(kept)] = True
    first, second = torch.cartesian_prod(torch.arange(6), torch.arange(6)).t()
    masks = torch.cat([groups[first], groups[second]], 1)  # [36, 8]
    filling = torch.cartesian_prod(*[torch.tensor([0.0, -0.0, 3.0])] * 4).to(dtype)  # [81, 4]
    bits = pack_mask(masks).repeat_interleave(81, 0)
    values = filling.repeat(36, 1)
    dense = expand_nm(values, bits)
    assert same_bits(compress_nm(dense, bits), values)
    assert (dense[~masks.repeat_interleave(81, 0)] == 0).all()
    # A kept zero that moves later moves in its own column.
    moved = expand_nm(torch.ones_like(values), bits)
    assert torch.equal(moved != 0, masks.repeat_interleave(81, 0))


def test_second_mask_by_hand():
    """Columns of 3, 4, 1 and 0 values; a kept zero stands above the entries that are pruned."""
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0]]).bool()
    values = torch.tensor([[1.0, 5.0], [-3.0, 0.0], [2.0, -5.0], [7.0, 0.0]])
    column_bits = double_prune_bits(values, pack_mask(mask))
    assert unpack_mask(column_bits, 2).int().tolist() == [[0, 1], [1, 0], [1, 0], [1, 1]]
    zeros = double_prune_bits(torch.zeros(4, 2), pack_mask(mask))
    assert unpack_mask(zeros, 2).int().tolist() == [[1, 1], [1, 1], [0, 0], [0, 1]]


@each("columns", [8, 12])
def test_a_mask_that_does_not_keep_n_of_m_is_an_error(columns):
    bits = pack_mask(torch.ones(2, columns, dtype=torch.bool))
    with pytest.raises(RuntimeError):
        compress_nm(torch.ones(2, columns), bits)
    with pytest.raises(RuntimeError):
        expand_nm(torch.ones(2, columns // 2), bits)
