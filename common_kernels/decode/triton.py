"""Products with few tokens on the sparse units, in Triton with PTX for the product of a warp.

A program takes 16 rows and its warps take turns along the columns; up to 16 tokens are two sets of
eight, which the same values of W multiply one after the other. As x has as many bytes as the rows
then, a program takes 32 rows with more than eight tokens. In the loop all tensors are
`[threads]`, so that entry t belongs to thread t: the product is an instruction of all lanes of a
warp, each with its own part of the operands. (With tensors of two dims Triton may deal the entries
out in another way; a test looks at what it does.)

Integers become pairs of 16-bit floats in registers (`unpacking`). As the columns of a part share
their scales, these multiply its fp32 sums.
"""

import torch
import triton
import triton.language as tl

from common_kernels.decode.cpu import bits_of
from common_kernels.launch import launch


def product(kind: str) -> str:
    """The code for two products of a warp, of 16 x 64 entries of W with 64 x 8 of x.

    $0 to $3 are sums of two rows and two tokens, $4 to $11 pairs of values, $12 positions, $13 to
    $20 pairs of entries of x, $21 to $24 the sums so far.
    """
    one = f"mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.{kind}.{kind}.f32"
    sums, before = "{$0, $1, $2, $3}", "{$21, $22, $23, $24}"
    return f"""{one} {sums}, {{$4, $5, $6, $7}}, {{$13, $14, $15, $16}}, {before}, $12, 0x0;
{one} {sums}, {{$8, $9, $10, $11}}, {{$17, $18, $19, $20}}, {sums}, $12, 0x1;"""


def unpacking(bits: int, kind: str) -> str:
    """The code that makes pairs of 16-bit floats ($0, ...) of a word of pairs of integers.

    The bits of a pair are those from `bits` * j and from 16 + `bits` * j on. They are put into the
    mantissa of 128 (fp16: 1024), from which the same without the integer is subtracted. Eight bits
    do not fit there: then the sign is in the number that is subtracted.
    """
    count = 16 // bits
    middle, minus = (0x4300, 0xBF80) if kind == "bf16" else (0x6400, 0xBC00)  # and -1
    middle, minus, sign = 0x10001 * middle, 0x10001 * minus, 0x10001 << bits - 1  # of both floats
    low = sign - 0x10001
    lines = [f"mov.b32 minus, {minus};", f"mov.b32 base, {middle | sign};"]
    for j in range(count):
        lines.append(f"shr.b32 word, ${count}, {bits * j};")
        if bits == 4:
            lines.append(f"lop3.b32 number, word, {low | sign}, base, 0x6a;")
        else:
            lines.append(f"lop3.b32 number, word, {low}, {middle}, 0xea;")
            lines.append(f"lop3.b32 base, word, {sign}, {middle}, 0xea;")
        lines.append(f"fma.rn.{kind}x2 ${j}, base, minus, number;")
    return "\n".join(["{", ".reg .b32 minus, base, word, number;", *lines, "}"])


KINDS = {torch.bfloat16: "bf16", torch.float16: "f16"}
PRODUCTS = {dtype: product(kind) for dtype, kind in KINDS.items()}
UNPACKING = {(d, bits): unpacking(bits, k) for d, k in KINDS.items() for bits in (8, 4)}
CONSTRAINTS = tl.constexpr(",".join(["=&f"] * 4 + ["r"] * 17 + ["f"] * 4))


def few_tokens24(
    values: torch.Tensor, meta: torch.Tensor, scales: torch.Tensor | None, x: torch.Tensor,
    bias: torch.Tensor | None, rows: int,
) -> torch.Tensor:  # fmt: skip
    tokens, columns = x.shape
    y = x.new_empty(tokens, rows)
    if tokens == 0:
        return y
    x = x.contiguous()
    x = x.clone() if x.storage_offset() % 2 else x  # it is read as pairs
    bits, dtype = bits_of(values, rows, columns), y.dtype
    form, parts = settings(bits, rows, columns, tokens > 8), columns // 64
    x = x.view(torch.int32)
    arranged = bits < 16 and tokens > 4  # on an H200 it is worth a launch then
    if arranged:
        sets = 1 + (tokens > 8)
        words = parts * sets * 128
        given, x = x, torch.empty(words, dtype=torch.int64, device=x.device)
        launch(
            arrange_kernel, triton.cdiv(words, 512), x.device, given, x, tokens, parts, SETS=sets
        )  # fmt: skip
    launch(
        few_tokens_kernel, rows // (16 * form["TILES"]), x.device, values, meta,
        meta if scales is None else scales, x,
        y if bias is None else bias.contiguous(), y, tokens, rows, parts,
        PRODUCT=PRODUCTS[dtype], UNPACKING=UNPACKING.get((dtype, bits), ""), BITS=bits,
        BIAS=bias is not None, TWO=tokens > 8, ARRANGED=arranged, **form,
        num_warps=form["WARPS"], num_stages=1,
    )  # fmt: skip
    return y


def settings(bits: int, rows: int, columns: int, two: bool) -> dict[str, int]:
    """How the work is dealt out: enough warps to have many lines of W on their way, measured on an
    H100 with 16 bits and on an H200 with 8 and 4; `two` with more than eight tokens."""
    tiles = 2 if two and rows % 32 == 0 else 1
    if two:
        warps = 4 if rows > 8192 else 8
    else:
        warps = 4 if rows >= 16384 else 16 if rows <= 4096 or columns > 2 * rows else 8
    depth, unroll = (1, 1 if two else 2) if bits == 16 else (2 if two or warps == 8 else 4, 1)
    return {"TILES": tiles, "DEPTH": depth, "UNROLL": unroll, "WARPS": warps}


@triton.jit(do_not_specialize=["tokens", "parts"])
def few_tokens_kernel(
    values, meta, scales, x, bias, y, tokens, rows, parts,
    PRODUCT: tl.constexpr, UNPACKING: tl.constexpr, BITS: tl.constexpr, BIAS: tl.constexpr,
    TWO: tl.constexpr, ARRANGED: tl.constexpr, TILES: tl.constexpr, DEPTH: tl.constexpr,
    UNROLL: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """x: pairs of entries [tokens, 32 * parts], or as `arrange_kernel` leaves them."""
    thread = tl.arange(0, 32 * WARPS)
    lane, warp = thread % 32, thread // 32
    group, quarter = lane // 4, lane % 4
    row = tl.program_id(0).to(tl.int64) * (16 * TILES)
    runs = (parts + 1) // 2  # parts in twos share scales
    at_values = values + row * parts * (BITS // 2) + (8 * BITS * warp + lane)
    at_meta = meta + row * parts * 2 + thread
    at_scales = scales + row // 2 * runs + (warp // 2 * 8 + group)
    # The words of a part of x, and from those of eight tokens to those of the next eight.
    part_of_x, set_of_x = (128 * (1 + TWO), 128) if ARRANGED else (32, 256 * parts)
    if ARRANGED:
        at_x = x + (part_of_x * warp + lane)
    else:
        at_x = x + group.to(tl.int64) * (32 * parts) + (32 * warp + quarter)
    zero = tl.zeros([32 * WARPS], tl.float32)
    # Of each set of tokens, the second first, and in it of each 16 rows.
    sums = ()
    for _ in tl.static_range((1 + TWO) * TILES):
        sums += ((zero, zero, zero, zero),)
    for start in tl.range(0, parts, DEPTH * WARPS, loop_unroll_factor=UNROLL):
        held, tokens_held = (), ()
        for i in tl.static_range(DEPTH):  # what is read is on its way before the first product
            inside = start + i * WARPS + warp < parts
            for tile in tl.static_range(TILES):
                held += (
                    part(
                        at_values + 8 * BITS * (i * WARPS + tile * parts),
                        at_meta + 32 * (i * WARPS + tile * parts),
                        at_scales + (4 * i * WARPS + 8 * tile * runs), inside, BITS,
                    ),
                )  # fmt: skip
            for n in tl.static_range(1 + TWO):
                at = at_x + (n * set_of_x + i * WARPS * part_of_x)
                tokens_held += (pairs(at, inside, group + 8 * n < tokens, ARRANGED),)
        for i in tl.static_range(DEPTH):
            rows_held, new = (), ()
            for tile in tl.static_range(TILES):
                rows_held += (floats(held[TILES * i + tile], UNPACKING, BITS),)
            for n in tl.static_range((1 + TWO) * TILES):
                b = tokens_held[(1 + TWO) * i + TWO - n // TILES]
                new += (added(PRODUCT, BITS, rows_held[n % TILES], b, sums[n]),)
            sums = new
        at_values += 8 * BITS * DEPTH * WARPS
        at_meta += 32 * DEPTH * WARPS
        at_scales += 4 * DEPTH * WARPS
        at_x += part_of_x * DEPTH * WARPS
    for n in tl.static_range((1 + TWO) * TILES):
        first, tile = 8 * (TWO - n // TILES), n % TILES
        store(sums[n], y, bias, first, row + 16 * tile, tokens, rows, BIAS, WARPS)


@triton.jit
def part(at_values, at_meta, at_scales, inside, BITS: tl.constexpr):
    """The values, positions and scales of 16 x 64 entries of W that a lane has in two products."""
    values = ()
    for i in tl.static_range(BITS // 4):
        at = at_values + 32 * i
        values += (tl.load(at, mask=inside, other=0, eviction_policy="evict_first"),)
    places = tl.load(at_meta, mask=inside, other=0x44444444)  # 0 and 1 in every group
    scales = tl.load(at_scales, mask=inside, other=0) if BITS < 16 else 0
    return values, places, scales


@triton.jit
def floats(a, UNPACKING: tl.constexpr, BITS: tl.constexpr):
    """A part with its values as pairs of 16-bit floats, and the scales of a lane's two rows."""
    words, places, scales = a
    factors, found = (1.0, 1.0), ()
    for i in tl.static_range(BITS // 4):
        for high in tl.static_range(2):
            word = (words[i] >> 32 * high).to(tl.int32)
            found += unpacked(UNPACKING, BITS, word) if BITS < 16 else (word,)
    if BITS < 16:
        factors = (
            (scales << 16).to(tl.float32, bitcast=True),
            (scales & -65536).to(tl.float32, bitcast=True),
        )
    return found, places, factors


@triton.jit
def unpacked(UNPACKING: tl.constexpr, BITS: tl.constexpr, word):
    """The pairs of 16-bit floats in words of pairs of integers."""
    if BITS == 8:
        return tl.inline_asm_elementwise(
            UNPACKING, "=&r,=&r,r", [word], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )
    else:
        return tl.inline_asm_elementwise(
            UNPACKING, "=&r,=&r,=&r,=&r,r", [word],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def pairs(at_x, inside, token, ARRANGED: tl.constexpr):
    """The eight pairs of entries of x that a lane has in two products."""
    found = ()
    if ARRANGED:
        for i in tl.static_range(4):
            word = tl.load(at_x + 32 * i, mask=inside, other=0)
            found += (word.to(tl.int32), (word >> 32).to(tl.int32))
    else:
        for i in tl.static_range(8):
            found += (tl.load(at_x + 4 * i, mask=inside & token, other=0),)
    return found


@triton.jit(do_not_specialize=["tokens", "parts"])
def arrange_kernel(x, y, tokens, parts, SETS: tl.constexpr):
    """y: the pairs of x in the order of the lanes, so that a warp reads whole lines: by part, set
    of eight tokens, two of a lane's eight pairs, and lane; zeros for tokens that there are not."""
    at = tl.program_id(0) * 512 + tl.arange(0, 512)
    lane, two, block = at % 32, at // 32 % 4, at // 128
    token, part = block % SETS * 8 + lane // 4, block // SETS
    inside = (part < parts) & (token < tokens)
    first = token.to(tl.int64) * (32 * parts) + (32 * part + 8 * two + lane % 4)
    low = tl.load(x + first, mask=inside, other=0).to(tl.int64) & 0xFFFFFFFF
    high = tl.load(x + first + 4, mask=inside, other=0).to(tl.int64)
    tl.store(y + at, high << 32 | low, mask=part < parts)


@triton.jit
def added(PRODUCT: tl.constexpr, BITS: tl.constexpr, a, b, sums):
    """The sums plus the two products of each warp of a part of W, times its scales, with x."""
    values, places, factors = a
    if BITS == 16:
        return warp_product(PRODUCT, values, places, b, sums)
    zero = tl.zeros_like(sums[0])
    new = warp_product(PRODUCT, values, places, b, (zero, zero, zero, zero))
    found = ()
    for i in tl.static_range(4):
        found += (tl.fma(factors[i // 2], new[i], sums[i]),)
    return found


@triton.jit
def warp_product(PRODUCT: tl.constexpr, values, places, b, sums):
    """The sums plus the two products of each warp, from the registers of its lanes."""
    return tl.inline_asm_elementwise(
        PRODUCT, CONSTRAINTS,
        values + (places,) + b + sums,  # noqa: RUF005 - of the kernel's language
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def store(sums, y, bias, first, row, tokens, rows, BIAS: tl.constexpr, WARPS: tl.constexpr):
    """Add up over the warps the sums of the eight tokens from `first` on, two rows of two tokens in
    each lane, add the bias, and write y."""
    lane = tl.arange(0, 32)
    for i in tl.static_range(4):
        row_of, token = row + 8 * (i // 2) + lane // 4, first + 2 * (lane % 4) + i % 2
        total = tl.sum(tl.reshape(sums[i], [WARPS, 32]), axis=0)
        if BIAS:
            total += tl.load(bias + row_of).to(tl.float32)
        at = y + token.to(tl.int64) * rows + row_of
        tl.store(at, total.to(y.dtype.element_ty), mask=token < tokens)
