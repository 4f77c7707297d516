"""Products with few tokens on the sparse units, in Triton with PTX for the product of a warp.

A program takes 16 rows and its warps take turns along the columns; up to 16 tokens are two sets of
eight, which the same values of W multiply one after the other. As x has as many bytes as the rows
then, a program takes 32 rows with more than eight tokens. In the loop all tensors are
`[threads]`, so that entry t belongs to thread t: the product is an instruction of all lanes of a
warp, each with its own part of the operands. (With tensors of two dims Triton may deal the entries
out in another way; a test looks at what it does.)
"""

import torch
import triton
import triton.language as tl

from common_kernels.launch import launch


def product(kind: str) -> str:
    """The code for two products of a warp, of 16 x 64 entries of W with 64 x 8 of x.

    $0 to $3 are sums of two rows and two tokens, $4 to $7 values, $8 positions, $9 to $16 pairs of
    entries of x, $17 to $20 the sums so far.
    """
    one = f"mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.{kind}.{kind}.f32"
    a, sums = "{a0, a1, a2, a3}", "{$0, $1, $2, $3}"
    return f"""{{
.reg .b32 a0, a1, a2, a3;
mov.b64 {{a0, a1}}, $4;
mov.b64 {{a2, a3}}, $5;
{one} {sums}, {a}, {{$9, $10, $11, $12}}, {{$17, $18, $19, $20}}, $8, 0x0;
mov.b64 {{a0, a1}}, $6;
mov.b64 {{a2, a3}}, $7;
{one} {sums}, {a}, {{$13, $14, $15, $16}}, {sums}, $8, 0x1;
}}"""


PRODUCTS = {torch.bfloat16: product("bf16"), torch.float16: product("f16")}
CONSTRAINTS = tl.constexpr(",".join(["=&f"] * 4 + ["l"] * 4 + ["r"] * 9 + ["f"] * 4))


def few_tokens24(
    values: torch.Tensor, meta: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None, rows: int
) -> torch.Tensor:
    tokens, columns = x.shape
    y = x.new_empty(tokens, rows)
    if tokens == 0:
        return y
    x = x.contiguous()
    x = x.clone() if x.storage_offset() % 2 else x  # it is read as pairs
    two = tokens > 8
    tiles = 2 if two and rows % 32 == 0 else 1
    # Enough warps to have many lines of W on their way, measured on an H100.
    if two:
        warps = 4 if rows > 8192 else 8
    else:
        warps = 4 if rows >= 16384 else 16 if rows <= 4096 or columns > 2 * rows else 8
    launch(
        few_tokens_kernel, rows // (16 * tiles), x.device, values, meta,
        x.view(torch.int32), y if bias is None else bias.contiguous(), y, tokens, rows,
        columns // 64, PRODUCT=PRODUCTS[y.dtype], BIAS=bias is not None, TWO=two, TILES=tiles,
        UNROLL=1 if two else 2, WARPS=warps, num_warps=warps, num_stages=1,
    )  # fmt: skip
    return y


@triton.jit(do_not_specialize=["tokens", "parts"])
def few_tokens_kernel(
    values, meta, x, bias, y, tokens, rows, parts,
    PRODUCT: tl.constexpr, BIAS: tl.constexpr, TWO: tl.constexpr, TILES: tl.constexpr,
    UNROLL: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    thread = tl.arange(0, 32 * WARPS)
    lane, warp = thread % 32, thread // 32
    group, quarter = lane // 4, lane % 4
    row = tl.program_id(0).to(tl.int64) * (16 * TILES)
    at_values = values + row * parts * 8 + (128 * warp + lane)
    at_meta = meta + row * parts * 2 + thread
    at_x = x + group.to(tl.int64) * (32 * parts) + (32 * warp + quarter)
    zero = tl.zeros([32 * WARPS], tl.float32)
    sums, more = (zero, zero, zero, zero), (zero, zero, zero, zero)
    lower, lower_more = sums, more  # of the second 16 rows
    for start in tl.range(0, parts, WARPS, loop_unroll_factor=UNROLL):
        inside = start + warp < parts
        a = part(at_values, at_meta, inside)
        if TILES == 2:
            low = part(at_values + 128 * parts, at_meta + 32 * parts, inside)
        b = pairs(at_x, inside & (group < tokens))
        if TWO:
            c = pairs(at_x + 256 * parts, inside & (group + 8 < tokens))
            more = warp_product(PRODUCT, a, c, more)
            if TILES == 2:
                lower_more = warp_product(PRODUCT, low, c, lower_more)
        sums = warp_product(PRODUCT, a, b, sums)
        if TILES == 2:
            lower = warp_product(PRODUCT, low, b, lower)
        at_values += 128 * WARPS
        at_meta += 32 * WARPS
        at_x += 32 * WARPS
    store(sums, y, bias, 0, row, tokens, rows, BIAS, WARPS)
    if TWO:
        store(more, y, bias, 8, row, tokens, rows, BIAS, WARPS)
    if TILES == 2:
        store(lower, y, bias, 0, row + 16, tokens, rows, BIAS, WARPS)
        if TWO:
            store(lower_more, y, bias, 8, row + 16, tokens, rows, BIAS, WARPS)


@triton.jit
def part(at_values, at_meta, inside):
    """The values and the positions of 16 x 64 entries of W that a lane has in two products."""
    return (
        tl.load(at_values, mask=inside, other=0, eviction_policy="evict_first"),
        tl.load(at_values + 32, mask=inside, other=0, eviction_policy="evict_first"),
        tl.load(at_values + 64, mask=inside, other=0, eviction_policy="evict_first"),
        tl.load(at_values + 96, mask=inside, other=0, eviction_policy="evict_first"),
        tl.load(at_meta, mask=inside, other=0x44444444),  # 0 and 1 in every group
    )


@triton.jit
def pairs(at_x, here):
    """The eight pairs of entries of x that a lane has in two products."""
    return (
        tl.load(at_x, mask=here, other=0),
        tl.load(at_x + 4, mask=here, other=0),
        tl.load(at_x + 8, mask=here, other=0),
        tl.load(at_x + 12, mask=here, other=0),
        tl.load(at_x + 16, mask=here, other=0),
        tl.load(at_x + 20, mask=here, other=0),
        tl.load(at_x + 24, mask=here, other=0),
        tl.load(at_x + 28, mask=here, other=0),
    )


@triton.jit
def warp_product(PRODUCT: tl.constexpr, a, b, sums):
    """The sums plus the two products of each warp, from the registers of its lanes."""
    return tl.inline_asm_elementwise(
        PRODUCT, CONSTRAINTS,
        [a[0], a[1], a[2], a[3], a[4], b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7],
         sums[0], sums[1], sums[2], sums[3]],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def store(sums, y, bias, first, row, tokens, rows, BIAS: tl.constexpr, WARPS: tl.constexpr):
    """Write the sums of the eight tokens from `first` on: two rows of two tokens in each lane."""
    lane = tl.arange(0, 32)
    row, token = row + lane // 4, first + 2 * (lane % 4)
    put(sums[0], y, bias, token, row, tokens, rows, BIAS, WARPS)
    put(sums[1], y, bias, token + 1, row, tokens, rows, BIAS, WARPS)
    put(sums[2], y, bias, token, row + 8, tokens, rows, BIAS, WARPS)
    put(sums[3], y, bias, token + 1, row + 8, tokens, rows, BIAS, WARPS)


@triton.jit
def put(sums, y, bias, token, row, tokens, rows, BIAS: tl.constexpr, WARPS: tl.constexpr):
    """Add up over the warps, add the bias, and write y[token, row]."""
    total = tl.sum(tl.reshape(sums, [WARPS, 32]), axis=0)
    if BIAS:
        total += tl.load(bias + row).to(tl.float32)
    at = y + token.to(tl.int64) * rows + row
    tl.store(at, total.to(y.dtype.element_ty), mask=token < tokens)
