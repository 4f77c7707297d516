# mypy: ignore-errors
"""FP8 codes of a weight and of its transpose in Triton, in one read of the weight, bit for bit
equal to the PyTorch path of weights.py."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from common_kernels.fp8.cpu import FORMATS
from common_kernels.fp8.operands_triton import encode
from common_kernels.fp8.triton import scale_from
from common_kernels.launch import cast, keep24, launch, load_groups, magnitude
from common_kernels.masks import triton as masks
from common_kernels.pack import tiles_triton as tiles
from common_kernels.pack.triton import bools, order_of, split
from common_kernels.soft_threshold.triton import less, threshold

TILE = 64
BLOCK = 2048  # entries in a program of weight_amax_kernel
# How a weight is given: without a mask, under bools, compressed, or to be projected.
KINDS = {"whole": 0, "mask": 1, "bits": 2, "soft": 3}


def write(
    kinds: str, codes: Sequence[Tensor], scales: Tensor, kind: str, given: Sequence[Tensor],
    amax: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the codes of a row-major weight [64 a, 64 b] and of its transpose into both `codes`:
    packed buffers, or dense matrices that are row-major or the transpose of a row-major one.

    kinds: the format and the layout of each. given, by `kind`: the weight for `whole`, with its
    mask for `mask`, with beta for `soft`; values, row mask and column mask for `bits`.
    """
    x, mask, column_mask = (*given, given[0], given[0])[:3]
    mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    rows, columns = x.shape[0], x.shape[1] * (2 if kind == "bits" else 1)
    if amax is None:
        amax = torch.zeros(2 if kind == "bits" else 1, dtype=torch.int32, device=x.device)
        launch(
            weight_amax_kernel, triton.cdiv(x.numel(), BLOCK), x.device,
            x, column_mask if kind == "bits" else mask, amax, x.numel(),
            KIND=KINDS[kind], BLOCK=BLOCK,
        )  # fmt: skip
    bits, words, targets = amax.view(torch.int32).view(-1), kinds.split(), []
    for out, fmt, layout in zip(codes, words[::2], words[1::2], strict=True):
        if out.dtype == torch.uint8:
            values, meta = split(out, rows * columns, FORMATS[fmt])
            targets.append((values, meta, 1, order_of(layout, values.dtype)))
        else:
            targets.append((out, out, 2 if out.is_contiguous() else 3, ""))
    (own, meta, form, order), (other, meta_t, form_t, order_t) = targets
    parts = [(form, form_t)]
    if parts == [(2, 2)] and words[0] == words[2]:
        # Two launches: in one, Triton 3.6 drops some of the stores.
        parts = [(2, 0), (0, 2)]
    for form, form_t in parts:
        launch(
            quantize24_kernel, rows // TILE * (columns // TILE), scales.device,
            x, mask, column_mask, bits[:1], bits[-1:], scales, own, meta, other, meta_t,
            rows, columns, FMT=words[0], FMT_T=words[2], KIND=KINDS[kind], OWN=form, OTHER=form_t,
            ORDER=order, ORDER_T=order_t, num_warps=8,
        )  # fmt: skip


@triton.jit
def weight_amax_kernel(x, mask, amax, size, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Raise `amax` to the largest magnitudes as fp32 bits: of the (masked) entries, for KIND BITS
    of all values and of those whose bit is set, for KIND SOFT of the projected ones."""
    if KIND == 3:
        start = tl.program_id(0).to(tl.int64) * (BLOCK // 4)
        a0, a1, a2, a3 = load_groups(x, start, size // 4, 1, BLOCK // 4, True)
        projected = project(a0, a1, a2, a3, tl.load(mask))
        tl.atomic_max(amax, tl.max(masks.largest(projected), 0))
        return
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    bits = magnitude(tl.load(x + at, mask=inside, other=0).to(tl.float32))
    if KIND == 1:
        bits = tl.where(tl.load(mask + at, mask=inside, other=0) != 0, bits, 0)
    tl.atomic_max(amax, tl.max(bits, 0))
    if KIND == 2:
        kept = tl.load(mask + at // 8, mask=inside, other=0) >> (at % 8).to(tl.uint8) & 1 != 0
        tl.atomic_max(amax + 1, tl.max(tl.where(kept, bits, 0), 0))


@triton.jit
def project(a0, a1, a2, a3, beta):
    """beta * soft_threshold24 of four entries, each step rounded as the separate operators do."""
    f = a0.to(tl.float32), a1.to(tl.float32), a2.to(tl.float32), a3.to(tl.float32)
    t = threshold(magnitude(f[0]), magnitude(f[1]), magnitude(f[2]), magnitude(f[3]), 0.0, False)
    projected = ()
    for i in tl.static_range(4):
        projected += (cast(less(f[i], t), a0.dtype).to(tl.float32) * beta,)
    return projected


@triton.jit
def load_kept(values, row_mask, column_mask, row, left, columns):
    """Row `row` of each of 16 x 16 compressed tiles: its two values, four bools for the columns
    they stand in, and two for whether B keeps them, each `[256]`."""
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
    """The four entries of a row that B keeps, 0 elsewhere, and flags for which are kept."""
    k0, k1, k2, k3 = places
    e0, e3 = tl.where(k0, one, 0), tl.where(k3, other, 0)
    e1, e2 = tl.where(k0, other, one), tl.where(k3, one, other)
    b1, b2 = tl.where(k0, keeps_other, keeps_one), tl.where(k3, keeps_one, keeps_other)
    return (e0, e1, e2, e3), (k0 & keeps_one, k1 & b1, k2 & b2, k3 & keeps_other)


@triton.jit
def quantize24_kernel(
    x, mask, column_mask, amax, amax_t, scales, own, meta, other, meta_t, rows, columns,
    FMT: tl.constexpr, FMT_T: tl.constexpr, KIND: tl.constexpr, OWN: tl.constexpr,
    OTHER: tl.constexpr, ORDER: tl.constexpr, ORDER_T: tl.constexpr,
):  # fmt: skip
    """Write the codes of a 64 x 64 block: 16 x 16 tiles of 4 x 4. OWN, OTHER: 1 for a packed
    matrix, 2 for a row-major one, 3 for the transpose of one, 0 for one that is not written."""
    s, s_t = scale_from(tl.load(amax), FMT), scale_from(tl.load(amax_t), FMT_T)
    if tl.program_id(0) == 0:
        tl.store(scales, s)
        tl.store(scales + 1, s_t)
    across = columns // 64
    top = (tl.program_id(0) // across).to(tl.int64) * 64
    left = (tl.program_id(0) % across).to(tl.int64) * 64
    # a: entries by row; k and b: whether each is kept in `own` and in `other`.
    a, k, b = (), (), ()
    for i in tl.static_range(4):
        if KIND == 2:
            one, two, places, keeps_one, keeps_two = load_kept(
                x, mask, column_mask, top + i, left, columns
            )
            row, kept = expanded(one, two, places, keeps_one, keeps_two)
        else:
            row = tiles.load_row(x, top + i, columns, left)
            true = tl.full([256], True, tl.int1)
            kept = true, true, true, true
            if KIND == 1:
                kept = bools(tiles.load_row(mask, top + i, columns, left))
            places = kept
            if KIND == 3:
                r0, r1, r2, r3 = row
                if OWN == 1:
                    places = keep24(magnitude(r0), magnitude(r1), magnitude(r2), magnitude(r3))
                row = project(r0, r1, r2, r3, tl.load(mask))
        a += (row,)
        k += (places,)
        b += (kept,)
    if OWN == 1:
        pairs, nibbles = tiles.tiles_stored(a, k)
        pairs = codes_of(pairs, s, FMT)
        tiles.store_tiles(own, meta, pairs, nibbles, top, left, rows, columns, ORDER)
    if OWN == 2:
        quads = codes_of(fours(a, k), s, FMT)
        store_dense(own, tl.permute(tiles.stack(quads), 0, 3, 1, 2), top, left, columns)
    if OTHER == 1:
        pairs, nibbles = tiles.tiles_stored(tiles.columns_of(a), tiles.columns_of(b))
        pairs = codes_of(pairs, s_t, FMT_T)
        tiles.store_tiles(other, meta_t, pairs, nibbles, top, left, rows, columns, ORDER_T, True)
    if OTHER == 2 or OTHER == 3:
        quads = codes_of(fours(a, b), s_t, FMT_T)
        if OTHER == 3:
            store_dense(other, tl.permute(tiles.stack(quads), 0, 3, 1, 2), top, left, columns)
        else:
            store_dense(other, tl.permute(tiles.stack(quads), 1, 2, 0, 3), left, top, rows)


@triton.jit
def codes_of(rows, scale, FMT: tl.constexpr):
    """The codes of four tensors, times their scale."""
    codes = ()
    for i in tl.static_range(4):
        codes += (encode(rows[i] * scale, FMT),)
    return codes


@triton.jit
def fours(rows, kept):
    """The entries of the four rows of tiles, each `[256, 4]` in fp32, 0 where they are not kept."""
    found = ()
    for i in tl.static_range(4):
        a, k = rows[i], kept[i]
        a0, a1 = tl.where(k[0], a[0].to(tl.float32), 0.0), tl.where(k[1], a[1].to(tl.float32), 0.0)
        a2, a3 = tl.where(k[2], a[2].to(tl.float32), 0.0), tl.where(k[3], a[3].to(tl.float32), 0.0)
        found += (tl.reshape(tl.join(tl.join(a0, a2), tl.join(a1, a3)), [256, 4]),)
    return found


@triton.jit
def store_dense(out, quads, top, left, columns):
    """Store a 64 x 64 block at (top, left), from entries of any dims in row-major order."""
    at = (top + tl.arange(0, 64)[:, None]) * columns + left + tl.arange(0, 64)[None, :]
    tl.store(out + at, tl.reshape(quads, [64, 64]).to(out.dtype.element_ty))
