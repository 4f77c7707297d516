"""The fused AdamW step in Triton. Each program updates a 64 x 64 block of a weight (16 x 16 tiles
of 4 x 4) and derives the block's mask and operands while it is in registers.

All weights of one shape and kind share a launch. The kernel finds their tensors in a table of
addresses on the device, one row for each weight, which is refilled when a tensor has moved (in
practice only gradients do). A small kernel first writes, at the end of each row, the scalars that
depend on the step count, so that the large kernel needs no fp64 arithmetic.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import torch
import triton
import triton.language as tl
from torch import Tensor

from common_kernels.adamw import cpu
from common_kernels.adamw.weights import Step, Weight24
from common_kernels.launch import (
    by_triton,
    cast,
    join_groups,
    keep24,
    magnitude,
    pointer,
    split_groups,
    table_of,
    vectors,
)
from common_kernels.masks.triton import best_place, greedy_bits, network, row_word, row_words
from common_kernels.pack import VENDOR, Packed24
from common_kernels.pack import tiles_triton as tiles
from common_kernels.pack.cpu import by_library
from common_kernels.pack.triton import order_of
from common_kernels.soft_threshold.triton import shrink

TILE = 64
WARPS = 8  # 256 threads: one 4 x 4 tile for each
REGISTERS = 128  # per thread, so that two programs fit on a multiprocessor
HELD = tl.constexpr(4)  # rows of the tiles that are loaded together
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
CHOICES = {None: 0, "rows": 1, "exact": 2, "greedy": 3}
SOURCES = {"whole": 0, "mask": 1, "soft": 2}
ROW = tl.constexpr(16)  # int64 per table row: 128 bytes, so that Triton knows rows are aligned
MATRICES = (0, 1, 2, 3, 5, 7, 8, 9)  # places of the matrices: vector loads need all of them aligned
SCALARS = tl.constexpr(13)  # the place, after the addresses, where six fp32 scalars begin
NO_SCALARS = (0,) * (ROW.value - SCALARS.value)


def adamw24_(kinds: Sequence[Sequence[Weight24]], step: Step) -> None:
    """Step the weights; within each of `kinds`, shapes, dtypes and layouts are equal."""
    launches: list[list[Weight24]] = []
    rows: list[tuple[int, ...]] = []  # of the table
    others: list[Weight24] = []
    for of_a_kind in kinds:
        first = of_a_kind[0]
        if first.weight.numel() == 0:
            continue
        if VENDOR in {p and p.layout for p in (first.packed, first.transposed)}:
            for given in of_a_kind:
                step_then_pack(given, step)
            continue
        fitting, can = [], fits(first)
        for given in of_a_kind:
            row = addresses(given)
            if can and not any(row[place] % 16 for place in MATRICES):
                fitting.append(given)
                rows.append(row)
            else:
                others.append(given)
        if fitting:
            launches.append(fitting)
    cpu.adamw24_(others, step)
    if not launches:
        return
    together = [given for fitting in launches for given in fitting]
    found = [given.amax for given in together if given.amax is not None]
    if found:
        torch._foreach_zero_(found)
    device = together[0].weight.device
    table = table_of(device, list(chain.from_iterable(rows))).view(-1, ROW.value)
    rates, found_inf = step.rates, step.found_inf
    beta1, beta2 = rates.betas
    by_triton(
        scalars_kernel, len(together), device,
        table, rates.lr, 1 - beta1, beta2, 1 - beta2, logarithm(beta1), logarithm(beta2), rates.eps,
        rates.weight_decay, table if found_inf is None else found_inf,
        RATE_IS_TENSOR=isinstance(rates.lr, Tensor), SKIPS=found_inf is not None, num_warps=1,
    )  # fmt: skip
    for fitting in launches:
        start(fitting, table, step)
        table = table[len(fitting) :]
    torch.autograd.graph.increment_version([t for w in together for t in w.written])


def step_then_pack(given: Weight24, step: Step) -> None:
    """Step one weight, whose operands cuSPARSELt packs from the dense one, in its own layout."""
    out, dense = given.packed or given.transposed, given.dense
    assert out is not None
    if dense is None:
        dense = torch.empty_like(given.weight, dtype=out.dtype)
    stepped = replace(given, dense=dense, packed=None, transposed=None)
    adamw24_([[stepped]], step)
    for packed, matrix in (given.packed, dense), (given.transposed, dense.t()):
        if packed is not None:
            torch.autograd.graph.increment_version(by_library(matrix, packed.buffer))


def fits(given: Weight24) -> bool:
    """True if the kernel can address the tensors: row-major, and whole blocks if packed."""
    rows, columns = given.weight.shape
    packs = given.packed is not None or given.transposed is not None
    return not (packs and (rows % TILE or columns % TILE)) and all(
        t.is_contiguous() for t in given.tensors.values() if t is not None
    )


def start(weights: list[Weight24], table: Tensor, step: Step) -> None:
    first, rule, grad_scale, found_inf = weights[0], step.rule, step.grad_scale, step.found_inf
    rows, columns = first.weight.shape
    operands = [t for t in (first.dense, first.packed, first.transposed) if t is not None]
    blocks = len(weights) * triton.cdiv(rows, TILE) * triton.cdiv(columns, TILE)
    words = row_words(first.weight.device) if rule.choose == "exact" else first.weight
    by_triton(
        adamw_kernel, blocks, first.weight.device,
        table, rows, columns, rule.alpha,
        first.weight if grad_scale is None else grad_scale,
        first.weight if found_inf is None else found_inf, words,
        GRAD=DTYPES[first.grad.dtype],
        OPERAND=DTYPES[operands[0].dtype] if operands else tl.float32,
        SCALED=grad_scale is not None, SKIPS=found_inf is not None, DECAYS=rule.alpha != 0,
        CHOOSE=CHOICES[rule.choose], SOURCE=SOURCES[rule.source],
        NETWORK=network(16) if rule.choose == "greedy" else (),
        DENSE=first.dense is not None, PACKED=first.packed is not None,
        TRANSPOSED=first.transposed is not None,
        ORDER=order(first.packed), ORDER_T=order(first.transposed), AMAX=first.amax is not None,
        WHOLE=rows % TILE == 0 and columns % TILE == 0,
        num_warps=WARPS, maxnreg=REGISTERS, enable_reflect_ftz=False,
    )  # fmt: skip


def order(packed: Packed24 | None) -> str:
    return "" if packed is None else order_of(packed.layout, packed.dtype)


def logarithm(beta: float) -> float:
    return math.log2(beta) if beta else -math.inf


def addresses(given: Weight24) -> tuple[int, ...]:
    """The table row of a weight: its tensors' addresses in the kernel's order. A missing tensor is
    given the weight's address."""
    weight = given.weight.data_ptr()  # not kept: `tensor.data = ...` changes it
    out = [weight if t is None else t.data_ptr() for t in given.kept]
    out.insert(1, given.grad.data_ptr())
    values = given.weight.numel() // 2
    for packed, place in (given.packed, 8), (given.transposed, 9):  # the metadata follow the values
        out.append(weight if packed is None else out[place] + values * packed.dtype.itemsize)
    return (*out, *NO_SCALARS)


@triton.jit
def bools_of(word):
    return word & 1 != 0, word >> 8 & 1 != 0, word >> 16 & 1 != 0, word >> 24 & 1 != 0


@triton.jit
def scalars_kernel(
    table, lr, one_minus_beta1, beta2, one_minus_beta2, log_beta1, log_beta2, eps, weight_decay,
    found_inf,
    RATE_IS_TENSOR: tl.constexpr, SKIPS: tl.constexpr,
):  # fmt: skip
    """Raise a weight's step count and write the scalars of all its entries: the step size and eps,
    both times sqrt(1 - beta2^t), and the factors of weight decay and of the moments."""
    at = table + tl.program_id(0) * ROW
    count = pointer(at, 4, tl.float32)
    step = tl.load(count) + 1
    rate = tl.load(lr) if RATE_IS_TENSOR else lr
    # In fp64, because beta^t is close to 1 and the difference would cancel.
    left1 = 1 - tl.exp2(step.to(tl.float64) * log_beta1)
    left2 = tl.sqrt_rn((1 - tl.exp2(step.to(tl.float64) * log_beta2)).to(tl.float32))
    out = (at + SCALARS).to(tl.pointer_type(tl.float32))
    tl.store(out, (rate / left1).to(tl.float32) * left2)
    tl.store(out + 1, eps * left2)
    tl.store(out + 2, 1 - rate * weight_decay)
    tl.store(out + 3, one_minus_beta1)
    tl.store(out + 4, beta2)
    tl.store(out + 5, one_minus_beta2)
    tl.store(count, step - tl.load(found_inf) if SKIPS else step)


@triton.jit
def adamw_kernel(
    table, rows, columns, alpha, grad_scale, found_inf, words,
    GRAD: tl.constexpr, OPERAND: tl.constexpr, SCALED: tl.constexpr,
    SKIPS: tl.constexpr, DECAYS: tl.constexpr, CHOOSE: tl.constexpr, SOURCE: tl.constexpr,
    NETWORK: tl.constexpr, DENSE: tl.constexpr, PACKED: tl.constexpr, TRANSPOSED: tl.constexpr,
    ORDER: tl.constexpr, ORDER_T: tl.constexpr, AMAX: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    across, down = tl.cdiv(columns, 64), tl.cdiv(rows, 64)
    block = tl.program_id(0) % (across * down)
    at = table + tl.program_id(0) // (across * down) * ROW
    top, left = (block // across).to(tl.int64) * 64, (block % across).to(tl.int64) * 64
    scalars = (at + SCALARS).to(tl.pointer_type(tl.float32))
    skipped = tl.load(found_inf) != 0 if SKIPS else False

    weight, grad = vectors(at, 0, tl.float32), vectors(at, 1, GRAD)
    exp_avg, exp_avg_sq = vectors(at, 2, tl.float32), vectors(at, 3, tl.float32)
    mask, dense = vectors(at, 5, tl.uint8), vectors(at, 7, OPERAND)
    entry = tl.arange(0, 1024)
    # Each thread loads four entries: one row of a tile.
    row, column = top + 4 * (entry // 64), left + tl.max_contiguous(entry % 64, 4)
    a, k = (), ()
    for h in tl.static_range(0, 4, HELD):
        held = ()
        for q in tl.static_range(h, h + HELD):
            i = (row + q) * columns + column
            inside = tl.full([1024], True, tl.int1)
            if not WHOLE:
                inside = (row + q < rows) & (column < columns)
            w, g = tl.load(weight + i, inside, 0), tl.load(grad + i, inside, 0)
            m, v = tl.load(exp_avg + i, inside, 0), tl.load(exp_avg_sq + i, inside, 0)
            kept = inside
            if DECAYS or (CHOOSE == 0 and SOURCE == 1):
                kept = tl.load(mask + i, inside, 0) != 0
            held += ((w, g, m, v, kept, i, inside),)
        # Issue all loads before any arithmetic. Without the barrier the assembler interleaves
        # them; the arithmetic depends on a load behind the barrier, so it cannot move up.
        tl.debug_barrier()
        step_size, eps, shrunk = tl.load(scalars), tl.load(scalars + 1), tl.load(scalars + 2)
        one_minus_beta1, beta2 = tl.load(scalars + 3), tl.load(scalars + 4)
        one_minus_beta2 = tl.load(scalars + 5)
        if SCALED:
            divisor = tl.load(grad_scale)
        for r in tl.static_range(HELD):
            w, g, m, v, kept, i, inside = held[r]
            g = g.to(tl.float32)
            if SCALED:
                g = tl.div_rn(g, divisor)
            if DECAYS:
                g = tl.where(kept, g, g + alpha * w)
            new_m = m + one_minus_beta1 * (g - m)
            new_v = beta2 * v + one_minus_beta2 * g * g
            new = w * shrunk - tl.div_rn(step_size * new_m, tl.sqrt_rn(new_v) + eps)
            if SKIPS:
                new, new_m = tl.where(skipped, w, new), tl.where(skipped, m, new_m)
                new_v = tl.where(skipped, v, new_v)
            tl.store(weight + i, new, inside)
            tl.store(exp_avg + i, new_m, inside)
            tl.store(exp_avg_sq + i, new_v, inside)
            if AMAX and not WHOLE:
                new = tl.where(inside, new, 0.0)
            a += (split_groups(new, 2),)
            if CHOOSE == 0 and SOURCE == 1:
                k += (split_groups(kept, 2),)

    if CHOOSE == 1 or SOURCE == 2:
        for r in tl.static_range(4):
            k += (
                keep24(
                    magnitude(a[r][0]), magnitude(a[r][1]), magnitude(a[r][2]), magnitude(a[r][3])
                ),
            )
    elif CHOOSE == 2:
        place = best_place(a[0], a[1], a[2], a[3])
        for r in tl.static_range(4):
            k += (bools_of(tl.load(words + 4 * place + r)),)
    elif CHOOSE == 3:
        taken = greedy_bits(a, NETWORK)
        for r in tl.static_range(4):
            k += (bools_of(row_word(taken, r)),)
    if CHOOSE != 0:
        store_rows(mask, k, row, column, rows, columns, WHOLE)

    if SOURCE == 2:
        scale = tl.load(pointer(at, 6, tl.float32))
        values = ()
        for r in tl.static_range(4):
            s0, s1, s2, s3 = shrink(a[r][0], a[r][1], a[r][2], a[r][3], 0.0, False)
            values += ((scale * s0, scale * s1, scale * s2, scale * s3),)
        a = values
    if AMAX:
        bits = tl.zeros([256], tl.int32)
        for r in tl.static_range(4):
            for c in tl.static_range(4):
                bits = tl.maximum(bits, tl.where(k[r][c], magnitude(a[r][c]), 0))
        tl.atomic_max(pointer(at, 10, tl.int32), tl.max(bits, 0))
    if DENSE:
        if SOURCE == 1:
            values = ()
            for r in tl.static_range(4):
                entries = ()
                for c in tl.static_range(4):
                    entries += (tl.where(k[r][c], a[r][c], 0.0),)
                values += (entries,)
            store_rows(dense, values, row, column, rows, columns, WHOLE)
        else:
            store_rows(dense, a, row, column, rows, columns, WHOLE)
    if PACKED:
        pairs, nibbles = tiles.tiles_stored(a, k)
        values, meta = vectors(at, 8, OPERAND), vectors(at, 11, tl.int32)
        tiles.store_tiles(values, meta, pairs, nibbles, top, left, rows, columns, ORDER)
    if TRANSPOSED:
        pairs, nibbles = tiles.tiles_stored(tiles.columns_of(a), tiles.columns_of(k))
        values, meta = vectors(at, 9, OPERAND), vectors(at, 12, tl.int32)
        tiles.store_tiles(values, meta, pairs, nibbles, top, left, rows, columns, ORDER_T, True)


@triton.jit
def store_rows(out, a, row, column, rows, columns, WHOLE: tl.constexpr):
    """Store the four rows of the tiles, four columns each, into a row-major matrix."""
    for r in tl.static_range(4):
        inside = tl.full([1024], True, tl.int1)
        if not WHOLE:
            inside = (row + r < rows) & (column < columns)
        i = (row + r) * columns + column
        tl.store(out + i, cast(join_groups(a[r], 2), out.dtype.element_ty), inside)
