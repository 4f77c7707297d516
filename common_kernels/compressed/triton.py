"""The compressed form in Triton, bit for bit that of cpu.py. Each thread holds whole groups."""

import torch
import triton
import triton.language as tl

from common_kernels.compressed import cpu
from common_kernels.launch import join_groups, keep24, launch, magnitude, split_groups
from common_kernels.masks.triton import LARGEST_M, nm_mask

BLOCK = 1024  # bytes of `bits` that a program handles
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # entries are moved as integers
HALVES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}  # except when cast to fp32


def pack_mask(mask: torch.Tensor) -> torch.Tensor:
    mask = mask.contiguous()
    columns = mask.shape[-1]
    bits = mask.new_empty((*mask.shape[:-1], -(-columns // 8)), dtype=torch.uint8)
    words = columns > 0 and columns % 8 == 0 and mask.data_ptr() % 4 == 0
    launch(
        pack_mask_kernel, triton.cdiv(bits.numel(), BLOCK), mask.device,
        mask.view(torch.int32) if words else mask.view(torch.uint8), bits,
        bits.numel(), columns, WORDS=words, BLOCK=BLOCK,
    )  # fmt: skip
    return bits


@triton.jit
def pack_mask_kernel(mask, bits, count, columns, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    if WORDS:  # four bools at a time: one multiplication moves their low bits side by side
        at = 2 * start + tl.arange(0, 2 * BLOCK)
        nibbles = (tl.load(mask + at, mask=at < 2 * count, other=0) * 0x01020408 >> 24) & 15
        low, high = tl.split(tl.reshape(nibbles, [BLOCK, 2]))
        packed = low | high << 4
    else:
        byte = start + tl.arange(0, BLOCK)
        width = (columns + 7) // 8
        row, column = byte // width, 8 * (byte % width)
        packed = tl.zeros([BLOCK], tl.int32)
        for i in tl.static_range(8):
            there = (byte < count) & (column + i < columns)
            kept = tl.load(mask + row * columns + column + i, mask=there, other=0)
            packed |= kept.to(tl.int32) << i
    byte = start + tl.arange(0, BLOCK)
    tl.store(bits + byte, packed.to(tl.uint8), mask=byte < count)


def unpack_mask(bits: torch.Tensor, columns: int) -> torch.Tensor:
    bits = bits.contiguous()
    mask = bits.new_empty((*bits.shape[:-1], columns), dtype=torch.bool)
    words = columns > 0 and columns % 8 == 0
    launch(
        unpack_mask_kernel, triton.cdiv(bits.numel(), BLOCK), bits.device,
        bits, mask.view(torch.int32) if words else mask.view(torch.uint8),
        bits.numel(), columns, WORDS=words, BLOCK=BLOCK,
    )  # fmt: skip
    return mask


@triton.jit
def unpack_mask_kernel(bits, mask, count, columns, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    byte = start + tl.arange(0, BLOCK)
    packed = tl.load(bits + byte, mask=byte < count, other=0).to(tl.int32)
    if WORDS:
        nibbles = tl.reshape(tl.join(packed & 15, packed >> 4), [2 * BLOCK])
        at = 2 * start + tl.arange(0, 2 * BLOCK)
        tl.store(mask + at, nibbles * 0x00204081 & 0x01010101, mask=at < 2 * count)
    else:
        width = (columns + 7) // 8
        row, column = byte // width, 8 * (byte % width)
        for i in tl.static_range(8):
            there = (byte < count) & (column + i < columns)
            kept = (packed >> i & 1).to(tl.uint8)
            tl.store(mask + row * columns + column + i, kept, mask=there)


def compress_nm(
    x: torch.Tensor, bits: torch.Tensor, n: int, m: int, dtype: torch.dtype
) -> torch.Tensor:
    widens = HALVES.get(x.dtype) if dtype == torch.float32 else None
    if m > LARGEST_M:
        return cpu.compress_nm(x, bits, n, m, dtype)
    if widens is None and dtype != x.dtype:
        return compress_nm(x, bits, n, m, x.dtype).to(dtype)
    x = x.contiguous()
    values = x.new_empty(cpu.compressed_shape(x, n, m), dtype=dtype)
    move_groups(compress_kernel, x, values, bits, n, m, WIDENS=widens)
    return values


def expand_nm(values: torch.Tensor, bits: torch.Tensor, n: int, m: int) -> torch.Tensor:
    if m > LARGEST_M:
        return cpu.expand_nm(values, bits, n, m)
    x = values.new_empty(cpu.expanded_shape(values, n, m))
    move_groups(expand_kernel, x, values.contiguous(), bits, n, m)
    return x


def move_groups(
    kernel, x: torch.Tensor, values: torch.Tensor, bits: torch.Tensor, n: int, m: int, **options
) -> None:
    integer = INTEGERS[x.element_size()]
    values = values.view(integer) if values.dtype == x.dtype else values
    size = max(128, 2 * BLOCK // triton.next_power_of_2(m))
    count = x.numel() // m
    launch(
        kernel, triton.cdiv(count, size), x.device,
        x.view(integer), values, bits.contiguous(), count, x.shape[-1] // m,
        N=n, M=m, WHOLE=x.shape[-1] % 8 == 0 and (8 % m == 0 or m % 8 == 0),
        M_LEVELS=levels(m), N_LEVELS=levels(n), BLOCK=size, **options,
    )  # fmt: skip


def levels(size: int) -> int:
    """log2 of the number of entries loaded together, or -1 if they are loaded one by one."""
    return size.bit_length() - 1 if size == triton.next_power_of_2(size) else -1


@triton.jit
def group_bits(
    bits, start, count, across, M: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr
):
    """`[BLOCK]` integers: the mask bits of BLOCK groups from `start` on, lowest bit first."""
    q = start + tl.arange(0, BLOCK)
    dtype: tl.constexpr = tl.int32 if WHOLE or M + 7 <= 32 else tl.int64
    if WHOLE:
        first = q * M
        found = tl.load(bits + (first >> 3), mask=q < count, other=0).to(dtype)
        for i in tl.static_range(1, M // 8):
            byte = tl.load(bits + (first >> 3) + i, mask=q < count, other=0)
            found |= byte.to(dtype) << 8 * i
    else:
        width = (across * M + 7) // 8
        first, row = q % across * M, q // across
        found = tl.zeros([BLOCK], dtype)
        for i in tl.static_range((M + 14) // 8):
            there = (q < count) & ((first >> 3) + i < width)
            byte = tl.load(bits + row * width + (first >> 3) + i, mask=there, other=0)
            found |= byte.to(dtype) << 8 * i
    return found >> (first & 7).to(dtype)


@triton.jit
def load_entries(base, start, count, SIZE: tl.constexpr, LEVELS: tl.constexpr, BLOCK: tl.constexpr):
    """Load the SIZE consecutive entries of each of BLOCK groups."""
    if LEVELS >= 0:
        at = SIZE * start + tl.arange(0, SIZE * BLOCK)
        return split_groups(tl.load(base + at, mask=at < SIZE * count, other=0), LEVELS)
    else:
        q = start + tl.arange(0, BLOCK)
        entries = ()
        for i in tl.static_range(SIZE):
            entries += (tl.load(base + SIZE * q + i, mask=q < count, other=0),)
        return entries


@triton.jit
def store_entries(
    base, entries, start, count, SIZE: tl.constexpr, LEVELS: tl.constexpr, BLOCK: tl.constexpr
):
    if LEVELS >= 0:
        at = SIZE * start + tl.arange(0, SIZE * BLOCK)
        tl.store(base + at, join_groups(entries, LEVELS), mask=at < SIZE * count)
    else:
        q = start + tl.arange(0, BLOCK)
        for i in tl.static_range(SIZE):
            tl.store(base + SIZE * q + i, entries[i], mask=q < count)


@triton.jit
def compress_kernel(
    x, values, bits, count, across, N: tl.constexpr, M: tl.constexpr, WHOLE: tl.constexpr,
    M_LEVELS: tl.constexpr, N_LEVELS: tl.constexpr, BLOCK: tl.constexpr, WIDENS: tl.constexpr,
):  # fmt: skip
    """From the last entry to the first, push each kept one to the front of a queue of N."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    found = group_bits(bits, start, count, across, M, WHOLE, BLOCK)
    entries = load_entries(x, start, count, M, M_LEVELS, BLOCK)
    kept = entries[:N]
    for i in tl.static_range(M):
        is_kept = (found >> M - 1 - i) & 1 != 0
        queue = (tl.where(is_kept, entries[M - 1 - i], kept[0]),)
        for k in tl.static_range(1, N):
            queue += (tl.where(is_kept, kept[k - 1], kept[k]),)
        kept = queue
    if WIDENS is not None:
        queue = ()
        for k in tl.static_range(N):
            queue += (kept[k].to(WIDENS, bitcast=True).to(tl.float32),)
        kept = queue
    store_entries(values, kept, start, count, N, N_LEVELS, BLOCK)


@triton.jit
def expand_kernel(
    x, values, bits, count, across, N: tl.constexpr, M: tl.constexpr, WHOLE: tl.constexpr,
    M_LEVELS: tl.constexpr, N_LEVELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """From the first entry to the last, pop each kept one from the front of a queue of N."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    found = group_bits(bits, start, count, across, M, WHOLE, BLOCK)
    kept = load_entries(values, start, count, N, N_LEVELS, BLOCK)
    entries = ()
    for i in tl.static_range(M):
        is_kept = (found >> i) & 1 != 0
        entries += (tl.where(is_kept, kept[0], 0),)
        queue = ()
        for k in tl.static_range(1, N):
            queue += (tl.where(is_kept, kept[k], kept[k - 1]),)
        queue += (kept[N - 1],)
        kept = queue
    store_entries(x, entries, start, count, M, M_LEVELS, BLOCK)


def double_prune_bits(values: torch.Tensor, bits: torch.Tensor, n: int, m: int) -> torch.Tensor:
    rows, width = values.shape
    if (n, m) != (2, 4) or width % 8:
        x = values.float().masked_fill_(values == 0, 2.0**-149)  # as in cpu.py
        x = expand_nm(x, bits, n, m)
        return pack_mask(compress_nm(nm_mask(x, n, m, 0), bits, n, m, torch.bool))
    column_bits = bits.new_empty(rows, width // 8)
    count = column_bits.numel() // 4
    launch(
        double_prune_kernel, triton.cdiv(count, 128), values.device,
        values.contiguous(), bits.contiguous(), column_bits, count, width // 8, BLOCK=128,
    )  # fmt: skip
    return column_bits


@triton.jit
def double_prune_kernel(values, bits, column_bits, count, across, BLOCK: tl.constexpr):
    """SLoPe's second mask; a thread takes four rows of eight values, which span 16 columns."""
    q = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = q < count
    place = q // across * (4 * across) + q % across  # index of the byte in the first of four rows
    rows, found, bytes_out = (), (), ()
    for r in tl.static_range(4):
        eight = tl.arange(0, 8)[None, :]
        at = 8 * (place + r * across)[:, None] + eight
        entries = tl.load(values + at, mask=inside[:, None], other=0)
        rows += (split_groups(tl.reshape(entries, [8 * BLOCK]), 3),)
        low = tl.load(bits + 2 * (place + r * across), mask=inside, other=0).to(tl.int32)
        high = tl.load(bits + 2 * (place + r * across) + 1, mask=inside, other=0).to(tl.int32)
        found += (low | high << 8,)
        bytes_out += (tl.zeros([BLOCK], tl.int32),)
    for g in tl.static_range(4):
        m, kept = (), ()
        for r in tl.static_range(4):
            m += (ranks(rows[r][2 * g], rows[r][2 * g + 1], found[r] >> 4 * g),)
        for j in tl.static_range(4):
            kept += (keep24(m[0][j], m[1][j], m[2][j], m[3][j]),)
        total = ()
        for r in tl.static_range(4):
            k = found[r] >> 4 * g
            one = tl.where(k & 1 != 0, kept[0][r], tl.where(k & 2 != 0, kept[1][r], kept[2][r]))
            other = tl.where(k & 8 != 0, kept[3][r], tl.where(k & 4 != 0, kept[2][r], kept[1][r]))
            pair = one.to(tl.int32) | other.to(tl.int32) << 1
            total += (bytes_out[r] | pair << 2 * g,)
        bytes_out = total
    for r in tl.static_range(4):
        tl.store(column_bits + place + r * across, bytes_out[r].to(tl.uint8), mask=inside)


@triton.jit
def ranks(one, other, k):
    """A group's four magnitudes as integers: 0 for a pruned entry, at least 1 for a kept one."""
    one = tl.maximum(magnitude(one.to(tl.float32)), 1)
    other = tl.maximum(magnitude(other.to(tl.float32)), 1)
    has_first, has_last = k & 1 != 0, k & 8 != 0
    return (
        tl.where(has_first, one, 0),
        tl.where(k & 2 != 0, tl.where(has_first, other, one), 0),
        tl.where(k & 4 != 0, tl.where(has_last, one, other), 0),
        tl.where(has_last, other, 0),
    )
