# mypy: ignore-errors
"""SLoPe's two operands from a weight that is stored compressed, in Triton: one read of the values.

W * A, 2:4 along its rows, is what `values` and `row_mask` hold; (W * A * B)^T is 2:4 along the
columns of W, B dropping some of the values (arXiv 2405.16325).
"""

import torch
import triton
import triton.language as tl

from common_kernels.launch import launch
from common_kernels.pack.cpu import BUFFERED
from common_kernels.pack.triton import (
    entries_stored,
    new_buffer,
    order_of,
    split,
    stack,
    store_tiles,
    stored,
)


def pack_both_compressed(
    values: torch.Tensor,
    row_mask: torch.Tensor,
    column_mask: torch.Tensor,
    dtype: torch.dtype,
    buffers: tuple[torch.Tensor, torch.Tensor] | None = None,
    layouts: tuple[str, str] = (BUFFERED, BUFFERED),
) -> tuple[torch.Tensor, torch.Tensor]:
    """The buffers of W * A and of (W * A * B)^T, W [out, in], both multiples of 64. 16-bit `dtype`.

    Args:
        values: [out, in / 2], the entries of W under A, of any float dtype.
        row_mask: [out, in / 8] uint8, the bits of A: two of each four along a row.
        column_mask: [out, in / 16] uint8, for each value whether B keeps it: at most two of each
            four along a column.
        buffers: to be written to; new ones if None.
    """
    rows, columns = values.shape[0], 2 * values.shape[1]
    if rows % 64 or columns % 64:
        raise ValueError(f"a weight [{rows}, {columns}]: both dims must be multiples of 64")
    for bits, name, width in ((row_mask, "row_mask", 8), (column_mask, "column_mask", 16)):
        if bits.shape != (rows, columns // width) or bits.dtype != torch.uint8:
            raise ValueError(
                f"{name} must be uint8 [{rows}, {columns // width}], not {bits.dtype} "
                f"{list(bits.shape)}"
            )
    if dtype.itemsize != 2:
        raise ValueError(f"{dtype} has {dtype.itemsize} bytes; this form is for 2")
    if buffers is None:  # of one size
        buffers = tuple(new_buffer(rows, columns, dtype, values.device) for _ in range(2))
    parts = [split(buffer, rows * columns, dtype) for buffer in buffers]
    launch(
        pack_both_compressed_kernel, rows // 64 * (columns // 64), values.device,
        values.contiguous(), row_mask.contiguous(), column_mask.contiguous(),
        *parts[0], *parts[1], rows, columns,
        ORDER=order_of(layouts[0], dtype), ORDER_T=order_of(layouts[1], dtype), num_warps=4,
    )  # fmt: skip
    return buffers


@triton.jit
def load_kept(values, row_mask, column_mask, row, left, columns):
    """Row `row` of each of 16 x 16 tiles: its two values, where they are (four bools) and whether B
    keeps them, each `[256]`."""
    at = tl.arange(0, 512)
    at = (row + 4 * (at // 32)) * (columns // 2) + left // 2 + tl.max_contiguous(at % 32, 2)
    one, other = tl.split(tl.reshape(tl.load(values + at), [256, 2]))
    tile = tl.arange(0, 256)
    r, group = row + 4 * (tile // 16), left // 4 + tile % 16
    a = tl.load(row_mask + r * (columns // 8) + group // 2).to(tl.int32) >> 4 * (group % 2)
    b = tl.load(column_mask + r * (columns // 16) + group // 4).to(tl.int32) >> 2 * (group % 4)
    places = a & 1 != 0, a & 2 != 0, a & 4 != 0, a & 8 != 0
    return one, other, places, b & 1 != 0, b & 2 != 0


@triton.jit
def expanded(one, other, places, keeps_one, keeps_other):
    """Four entries under B, 0 where there is none, and whether there is one."""
    k0, k1, k2, k3 = places
    e0, e3 = tl.where(k0, one, 0), tl.where(k3, other, 0)
    e1, e2 = tl.where(k0, other, one), tl.where(k3, one, other)
    b1, b2 = tl.where(k0, keeps_other, keeps_one), tl.where(k3, keeps_one, keeps_other)
    return (e0, e1, e2, e3), (k0 & keeps_one, k1 & b1, k2 & b2, k3 & keeps_other)


@triton.jit
def pack_both_compressed_kernel(
    values, row_mask, column_mask, packed, meta, packed_t, meta_t, rows, columns,
    ORDER: tl.constexpr, ORDER_T: tl.constexpr,
):  # fmt: skip
    """64 x 64 entries of W: 16 x 16 tiles, four to a thread."""
    across = columns // 64
    top = (tl.program_id(0) // across).to(tl.int64) * 64
    left = (tl.program_id(0) % across).to(tl.int64) * 64
    pairs, nibbles, entries, kept = (), (), (), ()
    for i in tl.static_range(4):
        one, other, k, keeps_one, keeps_other = load_kept(
            values, row_mask, column_mask, top + i, left, columns
        )
        first, second = stored(k[0], k[1], k[2], k[3])
        pairs += (tl.join(one, other),)
        nibbles += (first | second << 2,)
        row, row_kept = expanded(one, other, k, keeps_one, keeps_other)
        entries += (row,)
        kept += (row_kept,)
    pair, nibble = tl.permute(stack(pairs), 0, 3, 1, 2), tl.permute(stack(nibbles), 0, 3, 1, 2)
    store_tiles(packed, meta, pair, nibble, top, left, rows, columns, ORDER)
    pairs, nibbles = (), ()
    for j in tl.static_range(4):
        pair, nibble = entries_stored(
            entries[0][j], entries[1][j], entries[2][j], entries[3][j],
            (kept[0][j], kept[1][j], kept[2][j], kept[3][j]),
        )  # fmt: skip
        pairs += (pair,)
        nibbles += (nibble,)
    pair, nibble = tl.permute(stack(pairs), 1, 3, 0, 2), tl.permute(stack(nibbles), 1, 3, 0, 2)
    store_tiles(packed_t, meta_t, pair, nibble, left, top, columns, rows, ORDER_T)
