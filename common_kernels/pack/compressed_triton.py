# mypy: ignore-errors
"""Packing of SLoPe's compressed weights in Triton: one read of the values gives the column mask and
both packed operands.

`values` and `row_mask` hold W * A, which is 2:4 along the rows of W. (W * A * B)^T is 2:4 along the
columns of W; B drops some of the values (arXiv 2405.16325).

A thread holds 8 x 8 entries of W: two by two tiles of 4 x 4. It loads 16 bytes of each row and
stores 8 bytes of a row of each operand; four or eight neighbouring threads fill whole memory
sectors, so no value moves between threads. The choice in a tile is one word. Byte i holds in its
low half the two rows stored for column i, two bits each, and in its high half, one bit per column,
the columns that store row i.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from common_kernels.launch import cast, launch, magnitude, pointer, table_of, vectors
from common_kernels.pack import Compressed24
from common_kernels.pack import triton as packing
from common_kernels.pack.cpu import VENDOR

ROW = tl.constexpr(8)  # int64 per row of the table of addresses: 64 bytes
# Most registers per thread, the fastest on an H200: with fewer registers more blocks run at a time.
# REGISTERS is for all results in one pass (9 to 14 % faster), the other for the transposed operand
# by itself.
REGISTERS, REGISTERS_TRANSPOSED = 96, 80
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def prune_and_pack(weights: Sequence[Compressed24], choose: bool) -> list[Compressed24]:
    """Do `prune_and_pack24_` for weights on one device; return those the kernel cannot address."""
    launches, rest = defaultdict(list), []
    for weight in weights:
        addresses = addresses_of(weight)
        if fits(weight, addresses):
            launches[kind(weight)].append(addresses)
        else:
            rest.append(weight)
    device = weights[0].values.device
    for (shape, source, dtype, order, order_t), together in launches.items():
        rows, columns = shape[0], 2 * shape[1]
        table = table_of(device, [address for addresses in together for address in addresses])
        launch(
            prune_and_pack_kernel, len(together) * (rows // 64) * (columns // 64), device,
            table, rows, columns, VALUES=DTYPES[source], OPERAND=DTYPES[dtype], CHOOSE=choose,
            PACKED=order != "", TRANSPOSED=order_t != "", ORDER=order, ORDER_T=order_t, num_warps=2,
            maxnreg=REGISTERS,
        )  # fmt: skip
    return rest


def pack_one(
    values: torch.Tensor,
    row_mask: torch.Tensor,
    column_mask: torch.Tensor | None,
    dtype: torch.dtype,
    layout: str,
) -> torch.Tensor:
    """A new buffer with one packed operand of one weight [64 a, 64 b]: (W * A * B)^T, or without a
    `column_mask` W * A. Values and masks are row-major."""
    rows, columns = values.shape[0], 2 * values.shape[1]
    turned = column_mask is not None
    shape = (columns, rows) if turned else (rows, columns)
    buffer = packing.new_buffer(*shape, dtype, values.device, layout)
    launch(
        pack_one_kernel, rows // 64 * (columns // 64), values.device,
        values, row_mask, row_mask if column_mask is None else column_mask,
        *packing.split(buffer, rows * columns, dtype), rows, columns,
        TRANSPOSED=turned, ORDER=packing.order_of(layout, dtype), num_warps=2,
        maxnreg=REGISTERS_TRANSPOSED,
    )  # fmt: skip
    return buffer


def in_blocks(values: torch.Tensor) -> bool:
    """True if the weight consists of whole 64 x 64 blocks."""
    return values.shape[0] % 64 == 0 and values.shape[1] % 32 == 0


def fits(weight: Compressed24, addresses: list[int]) -> bool:
    """True if the kernel takes the weight: whole blocks, row-major, aligned to 16 bytes."""
    return (
        in_blocks(weight.values)
        and all(out is None or out.layout != VENDOR for out in weight.operands)
        and all(address % 16 == 0 for address in (addresses[0], *addresses[3:]))
        and all(t.is_contiguous() for t in (weight.values, weight.row_mask, weight.column_mask))
    )


def kind(weight: Compressed24) -> tuple:
    """Return what is equal within a launch: shape, dtypes, orders of metadata ("" for none)."""
    outs = weight.operands
    orders = ("" if out is None else packing.order_of(out.layout, out.dtype) for out in outs)
    return tuple(weight.values.shape), weight.values.dtype, weight.dtype, *orders


def addresses_of(weight: Compressed24) -> list[int]:
    """The kernel's tensors in its order; a missing operand gets the values' address."""
    nothing = weight.values.data_ptr()
    found = [nothing, weight.row_mask.data_ptr(), weight.column_mask.data_ptr()]
    for out in weight.operands:  # the metadata follow the values, which have two bytes each
        start = nothing if out is None else out.buffer.data_ptr()
        found += [start, start + 2 * weight.values.numel()]
    return [*found, nothing]


@triton.constexpr_function
def word_of(j, first, second):
    """Column j's part of a tile's word if rows `first` and `second` are stored; -1: not known."""
    word = 0
    if first >= 0:
        word |= 1 << 8 * first + 4 + j | first << 8 * j
    if second >= 0:
        word |= 1 << 8 * second + 4 + j | second << 8 * j + 2
    return word - (word >> 31 << 32)  # as int32


@triton.constexpr_function
def rank_of_none(row):
    """The rank of a missing entry in this row of a tile: below all entries, and in the order in
    which cpu.choose adds zeros."""
    return (-3, -3, -1, -2)[row]


@triton.jit
def stored_of(m0, m1, m2, m3, x0, x1, x2, x3, j: tl.constexpr):
    """The two of column j's four entries x with the largest ranks m, the lower row first, and their
    part of the tile's word. The lower row wins a tie."""
    w01, w23 = m0 >= m1, m2 >= m3
    both01 = tl.minimum(m0, m1) >= tl.maximum(m2, m3)
    both23 = tl.minimum(m2, m3) > tl.maximum(m0, m1)
    one = tl.where(both23, x2, tl.where(both01 | w01, x0, x1))
    other = tl.where(both01, x1, tl.where(both23 | ~w23, x3, x2))
    word = tl.where(w01, word_of(j, 0, -1), word_of(j, 1, -1))
    word |= tl.where(w23, word_of(j, -1, 2), word_of(j, -1, 3))
    word = tl.where(both01, word_of(j, 0, 1), word)
    return one, other, tl.where(both23, word_of(j, 2, 3), word)


@triton.jit
def spread(one, other, k0, k1, k2, k3, nothing):
    """The four entries of a tile's row from its two values, with `nothing` at pruned places."""
    return (
        tl.where(k0, one, nothing),
        tl.where(k1, tl.where(k0, other, one), nothing),
        tl.where(k2, tl.where(k3, one, other), nothing),
        tl.where(k3, other, nothing),
    )


@triton.jit
def tile_of(one, other, bits, kept, out, CHOOSE: tl.constexpr):
    """The stored pairs of the four columns of tiles, and the tiles' words.

    one, other, bits: the two values of each of the four rows, and their columns in the lowest four
    bits. kept: which values B keeps, in the lowest two bits; unused with CHOOSE. out: the pointer
    that the pairs will be stored to.
    """
    x, m = (), ()
    for i in tl.static_range(4):
        nothing = rank_of_none(i)
        b = bits[i]
        k0, k1, k2, k3 = b & 1 != 0, b & 2 != 0, b & 4 != 0, b & 8 != 0
        if CHOOSE:
            rank, other_rank = tl.maximum(magnitude(one[i]), 1), tl.maximum(magnitude(other[i]), 1)
            x += (spread(one[i], other[i], k0, k1, k2, k3, 0.0),)
        else:
            keeps_one, keeps_other = kept[i] & 1 != 0, kept[i] & 2 != 0
            rank, other_rank = tl.where(keeps_one, 1, nothing), tl.where(keeps_other, 1, nothing)
            under = tl.where(keeps_one, one[i], 0.0), tl.where(keeps_other, other[i], 0.0)
            x += (spread(under[0], under[1], k0, k1, k2, k3, 0.0),)
        m += (spread(rank, other_rank, k0, k1, k2, k3, nothing),)
    pairs, words = (), ()
    for j in tl.static_range(4):
        first, second, word = stored_of(
            m[0][j], m[1][j], m[2][j], m[3][j], x[0][j], x[1][j], x[2][j], x[3][j], j
        )
        pairs += (cast(tl.join(first, second), out.dtype.element_ty),)
        words += (word,)
    return pairs, words[0] | words[1] | words[2] | words[3]


@triton.jit
def prune_and_pack_block(
    values, row_mask, column_mask, packed, meta, packed_t, meta_t, top, left, rows, columns,
    CHOOSE: tl.constexpr, PACKED: tl.constexpr, TRANSPOSED: tl.constexpr,
    ORDER: tl.constexpr, ORDER_T: tl.constexpr,
):  # fmt: skip
    """Prune and pack the 64 x 64 block of W at (top, left)."""
    thread, four = tl.arange(0, 64), tl.arange(0, 4)[None, :]
    down, across = thread // 8, thread % 8
    values += top * (columns // 2) + left // 2
    packed += top * (columns // 2) + left // 2
    packed_t += left * (rows // 2) + top // 2
    row_mask += top * (columns // 8) + left // 8
    column_mask += top * (columns // 16) + left // 16
    words, pairs = (), ()
    for h in tl.static_range(2):
        ones, others, bits, kept = ((), ()), ((), ()), ((), ()), ((), ())
        row_bits = tl.zeros([64], tl.int32)
        for i in tl.static_range(4):
            row = 8 * down + 4 * h + i
            at = (row * (columns // 2) + 4 * across)[:, None] + four
            entries = tl.load(values + at)
            if PACKED:
                tl.store(packed + at, cast(entries, packed.dtype.element_ty))
            even, odd = tl.split(tl.reshape(entries.to(tl.float32), [64, 2, 2]))
            e0, e1 = tl.split(even)
            o0, o1 = tl.split(odd)
            byte = tl.load(row_mask + row * (columns // 8) + across).to(tl.int32)
            row_bits |= byte << 8 * i
            ones = ones[0] + (e0,), ones[1] + (e1,)
            others = others[0] + (o0,), others[1] + (o1,)
            bits = bits[0] + (byte,), bits[1] + (byte >> 4,)
            if not CHOOSE:
                half = tl.load(column_mask + row * (columns // 16) + across // 2)
                half = half.to(tl.int32) >> 4 * (across % 2)
                kept = kept[0] + (half,), kept[1] + (half >> 2,)
        of_w0, word0 = tile_of(ones[0], others[0], bits[0], kept[0], packed_t, CHOOSE)
        of_w1, word1 = tile_of(ones[1], others[1], bits[1], kept[1], packed_t, CHOOSE)
        words += ((word0, word1),)
        pairs += ((of_w0, of_w1),)
        if CHOOSE:
            # Byte i stands for row i, its two halves for the two tiles, a bit for each column.
            a, c = row_bits, (word0 >> 4 & 0x0F0F0F0F) | (word1 & 0xF0F0F0F0 - (1 << 32))
            b = a & c
            first = b | ~a & (b >> 1 | ~(a >> 1) & b >> 2)
            last = b >> 3 | ~(a >> 3) & (b >> 2 | ~(a >> 2) & b >> 1)
            both = (first & 0x11111111) | (last & 0x11111111) << 1
            half = (both | both >> 2) & 0x0F0F0F0F
            # Two neighbouring threads join their half bytes, and each stores two whole bytes.
            odd = across % 2
            byte = tl.sum(tl.reshape(half << 4 * odd, [32, 2]), 1)[:, None]
            byte = tl.reshape(tl.broadcast_to(byte, [32, 2]), [64]) >> 16 * odd
            at = (8 * down + 4 * h + 2 * odd) * (columns // 16) + across // 2
            tl.store(column_mask + at, byte.to(tl.uint8))
            tl.store(column_mask + at + columns // 16, (byte >> 8).to(tl.uint8))
    if PACKED:
        store_row_meta(meta, row_mask, top, left, rows, columns, ORDER)
    if TRANSPOSED:
        found = ()
        for w in tl.static_range(2):
            for j in tl.static_range(4):
                four_of = tl.permute(tl.join(pairs[0][w][j], pairs[1][w][j]), 0, 2, 1)
                at = (8 * across + 4 * w + j) * (rows // 2) + 4 * down
                tl.store(packed_t + at[:, None] + four, tl.reshape(four_of, [64, 4]))
                found += (tl.join(words[0][w] >> 8 * j & 15, words[1][w] >> 8 * j & 15),)
        nibbles = tl.join(
            tl.join(tl.join(found[0], found[4]), tl.join(found[2], found[6])),
            tl.join(tl.join(found[1], found[5]), tl.join(found[3], found[7])),
        )  # [64, g0, r2, r1, r0]
        nibbles = tl.permute(tl.reshape(nibbles, [8, 8, 2, 8]), 1, 3, 0, 2)
        nibbles = tl.reshape(nibbles, [64, 16])
        packing.store_meta(meta_t, nibbles, left // 64, top // 4, columns, rows, ORDER_T, 16)


@triton.jit
def positions(k):
    """The positions, as nibbles, of the two set bits in each of eight groups of four."""
    k1, k2, k3 = k >> 1, k >> 2, k >> 3
    one = (~k & k1 & 0x11111111) | (~k & ~k1 & 0x11111111) << 1
    other = ((k3 | ~k2) & 0x11111111) << 2 | ((k3 | k2) & 0x11111111) << 3
    return one | other


@triton.jit
def store_row_meta(meta, row_mask, top, left, rows, columns, ORDER: tl.constexpr):
    """Store the metadata of W * A: the bits of A in the order of the words, as positions."""
    at = tl.arange(0, 64)[:, None] * (columns // 8) + tl.arange(0, 8)[None, :]
    byte = tl.load(row_mask + at).to(tl.int32)
    bits = tl.reshape(tl.join(byte & 15, byte >> 4), [64, 16])
    words = positions(packing.join_words(bits, ORDER, 16))
    packing.store_words(meta, words, top // 64, left // 4, rows, columns, ORDER, 16)


@triton.jit
def prune_and_pack_kernel(
    table, rows, columns, VALUES: tl.constexpr, OPERAND: tl.constexpr,
    CHOOSE: tl.constexpr, PACKED: tl.constexpr, TRANSPOSED: tl.constexpr,
    ORDER: tl.constexpr, ORDER_T: tl.constexpr,
):  # fmt: skip
    """Prune and pack a 64 x 64 block of a weight; `table` has a row of addresses for each."""
    across = columns // 64
    blocks = rows // 64 * across
    at, block = table + tl.program_id(0) // blocks * ROW, tl.program_id(0) % blocks
    top, left = (block // across).to(tl.int64) * 64, (block % across).to(tl.int64) * 64
    prune_and_pack_block(
        vectors(at, 0, VALUES), pointer(at, 1, tl.uint8), pointer(at, 2, tl.uint8),
        vectors(at, 3, OPERAND), vectors(at, 4, tl.int32),
        vectors(at, 5, OPERAND), vectors(at, 6, tl.int32), top, left, rows, columns,
        CHOOSE, PACKED, TRANSPOSED, ORDER, ORDER_T,
    )  # fmt: skip


@triton.jit
def pack_one_kernel(
    values, row_mask, column_mask, packed, meta, rows, columns, TRANSPOSED: tl.constexpr,
    ORDER: tl.constexpr,
):  # fmt: skip
    """Pack a 64 x 64 block of one weight, or of its transpose, under the masks that it has."""
    across = columns // 64
    top = (tl.program_id(0) // across).to(tl.int64) * 64
    left = (tl.program_id(0) % across).to(tl.int64) * 64
    prune_and_pack_block(
        values, row_mask, column_mask, packed, meta, packed, meta, top, left, rows, columns,
        False, not TRANSPOSED, TRANSPOSED, ORDER, ORDER,
    )  # fmt: skip
