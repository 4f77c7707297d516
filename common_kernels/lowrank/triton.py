"""Sparse-plus-low-rank output in Triton: product, scale, bias and sum in one pass over y1."""

import torch
import triton
import triton.language as tl

from common_kernels.launch import INTERPRETED, cast, launch

ROWS, COLUMNS, DEPTH = 64, 128, 64  # tile of a program; DEPTH is the step along the rank
FEW = 16, 64  # rows and columns of the tile for at most 16 rows, as in decoding


def lowrank_addmm(
    y1: torch.Tensor, y2: torch.Tensor, r: torch.Tensor, bias: torch.Tensor | None, scale: float
) -> torch.Tensor:
    out = y1.new_empty(y1.shape)
    if out.numel() == 0:
        return out
    rank, columns = r.shape
    y1, parts = y1.reshape(-1, columns), 1 + (y2.ndim > y1.ndim)
    y2 = y2.reshape(len(y1), parts, rank)
    tile, across = FEW if len(y1) <= FEW[0] else (ROWS, COLUMNS)
    exact = y2.dtype == r.dtype != torch.float32  # products of 16 bits are exact in fp32
    launch(
        lowrank_kernel, triton.cdiv(len(y1), tile) * triton.cdiv(columns, across), y1.device,
        y1, y2, r, y1 if bias is None else bias.contiguous(), out,
        len(y1), columns, rank, *y1.stride(), *y2.stride(), *r.stride(), scale,
        BIAS=bias is not None, PARTS=parts, EXACT=exact, ROWS=tile, COLUMNS=across,
        DEPTH=max(16, min(DEPTH, triton.next_power_of_2(rank))),
    )  # fmt: skip
    return out


@triton.jit
def lowrank_kernel(
    y1, y2, r, bias, out, rows, columns, rank,
    y1_row, y1_column, y2_row, y2_part, y2_column, r_row, r_column, scale,
    BIAS: tl.constexpr, PARTS: tl.constexpr, EXACT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(columns, COLUMNS)
    row = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, rank, DEPTH):
        k = start + tl.arange(0, DEPTH)
        left, right = k[None, :], k[:, None]
        at, there = y2 + row * y2_row + left * y2_column, (row < rows) & (left < rank)
        a = tl.load(at, mask=there, other=0)
        if PARTS == 2:
            other = tl.load(at + y2_part, mask=there, other=0)
            a = cast(a.to(tl.float32) + other.to(tl.float32), a.dtype)
        b = tl.load(
            r + right * r_row + column * r_column,
            mask=(right < rank) & (column < columns), other=0,
        )  # fmt: skip
        if not EXACT or INTERPRETED:  # the interpreter's tl.dot treats bf16 as integers
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, b, total, input_precision="ieee")
    inside = (row < rows) & (column < columns)
    start = tl.load(y1 + row * y1_row + column * y1_column, mask=inside, other=0)
    total = total * scale + start.to(tl.float32)
    if BIAS:
        total += tl.load(bias + column, mask=column < columns, other=0).to(tl.float32)
    tl.store(out + row * columns + column, cast(total, out.dtype.element_ty), mask=inside)
