"""N:M matrices in compressed form: packed masks, kept values and the way back."""

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
