"""Products with few tokens on the sparse units, in Triton with PTX for the product of a warp.

A program takes 16 rows and its warps take turns along the columns. All tensors are `[tokens / 8,
threads]`: entry t of the last dim belongs to thread t, as the product needs, which is an
instruction of all lanes of a warp. (Tested by compiling: nothing is exchanged in the loop.)
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from common_kernels.launch import launch

SMALL, LARGE = 4, 16  # warps of a program


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
    tiles = triton.next_power_of_2(triton.cdiv(tokens, 8))
    warps = SMALL if rows >= 16384 else LARGE if columns > 2 * rows else 8
    if tiles > 1:
        x = arranged(F.pad(x, (0, 0, 0, 8 * tiles - tokens)))
        warps = max(SMALL, warps // 2)
    launch(
        few_tokens_kernel, rows // 16, x.device, values, meta,
        x.contiguous().view(torch.int32), y if bias is None else bias, y, tokens, rows,
        columns // 64, PRODUCT=PRODUCTS[y.dtype], BIAS=bias is not None, TILES=tiles, WARPS=warps,
        num_warps=warps, num_stages=1,
    )  # fmt: skip
    return y


def arranged(x: torch.Tensor) -> torch.Tensor:
    """x [8 tiles, columns] in the order in which the lanes take it: a lane's lie together."""
    pairs = x.view(torch.int32).view(-1, 8, x.shape[1] // 64, 2, 4, 4)  # tile, g, part, half, i, q
    return pairs.permute(2, 0, 3, 1, 5, 4).contiguous()


@triton.jit(do_not_specialize=["tokens", "parts"])
def few_tokens_kernel(
    values, meta, x, bias, y, tokens, rows, parts,
    PRODUCT: tl.constexpr, BIAS: tl.constexpr, TILES: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    thread = tl.arange(0, 32 * WARPS)
    lane, warp = thread % 32, thread // 32
    group, quarter = (lane // 4)[None, :], (lane % 4)[None, :]
    tile = tl.arange(0, TILES)[:, None]
    row = tl.program_id(0).to(tl.int64) * 16
    at_values = values + row * parts * 8 + (128 * warp + lane)[None, :]
    at_meta = meta + row * parts * 2 + (32 * warp + lane)[None, :]
    if TILES == 1:
        at_x = x + (8 * tile + group).to(tl.int64) * (32 * parts) + 32 * warp[None, :] + quarter
    else:
        at_x = x + (256 * (TILES * warp[None, :] + tile) + 4 * lane[None, :])
        at_x = at_x[:, :, None] + tl.arange(0, 4)[None, None, :]
    s0 = tl.zeros([TILES, 32 * WARPS], tl.float32)
    s1, s2, s3 = s0, s0, s0
    for start in tl.range(0, parts, WARPS, loop_unroll_factor=2):
        inside = (start + warp < parts)[None, :]
        a0 = tl.load(at_values, mask=inside, other=0, eviction_policy="evict_first")
        a1 = tl.load(at_values + 32, mask=inside, other=0, eviction_policy="evict_first")
        a2 = tl.load(at_values + 64, mask=inside, other=0, eviction_policy="evict_first")
        a3 = tl.load(at_values + 96, mask=inside, other=0, eviction_policy="evict_first")
        positions = tl.load(at_meta, mask=inside, other=0x44444444)  # 0 and 1 in every group
        if TILES == 1:
            here = inside & (8 * tile + group < tokens)
            b0 = tl.load(at_x, mask=here, other=0)
            b1 = tl.load(at_x + 4, mask=here, other=0)
            b2 = tl.load(at_x + 8, mask=here, other=0)
            b3 = tl.load(at_x + 12, mask=here, other=0)
            b4 = tl.load(at_x + 16, mask=here, other=0)
            b5 = tl.load(at_x + 20, mask=here, other=0)
            b6 = tl.load(at_x + 24, mask=here, other=0)
            b7 = tl.load(at_x + 28, mask=here, other=0)
            at_x += 32 * WARPS
        else:
            b0, b1, b2, b3 = four(at_x, inside, TILES, WARPS)
            b4, b5, b6, b7 = four(at_x + 128, inside, TILES, WARPS)
            at_x += 256 * TILES * WARPS
        s0, s1, s2, s3 = tl.inline_asm_elementwise(
            PRODUCT, CONSTRAINTS,
            [a0, a1, a2, a3, positions, b0, b1, b2, b3, b4, b5, b6, b7, s0, s1, s2, s3],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
        at_values += 128 * WARPS
        at_meta += 32 * WARPS
    lane = tl.arange(0, 32)[None, :]
    row += lane // 4
    token = 8 * tile + 2 * (lane % 4)
    store(s0, y, bias, token, row, tokens, rows, BIAS, TILES, WARPS)
    store(s1, y, bias, token + 1, row, tokens, rows, BIAS, TILES, WARPS)
    store(s2, y, bias, token, row + 8, tokens, rows, BIAS, TILES, WARPS)
    store(s3, y, bias, token + 1, row + 8, tokens, rows, BIAS, TILES, WARPS)


@triton.jit
def four(at, inside, TILES: tl.constexpr, WARPS: tl.constexpr):
    """Four neighbouring words of each thread."""
    words = tl.load(at, mask=inside[:, :, None], other=0)
    even, odd = tl.split(tl.reshape(words, [TILES, 32 * WARPS, 2, 2]))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3


@triton.jit
def store(
    sums, y, bias, token, row, tokens, rows,
    BIAS: tl.constexpr, TILES: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Add up over the warps, add the bias, and write y[token, row]."""
    total = tl.sum(tl.reshape(sums, [TILES, WARPS, 32]), axis=1)
    if BIAS:
        total += tl.load(bias + row).to(tl.float32)
    at = y + token.to(tl.int64) * rows + row
    tl.store(at, total.to(y.dtype.element_ty), mask=token < tokens)
