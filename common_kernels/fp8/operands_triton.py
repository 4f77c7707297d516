"""FP8 operands in Triton, bit for bit equal to the PyTorch paths of operands.py, except that the
factor of `rescale` may differ in its last bit."""

import torch
import triton
import triton.language as tl

from common_kernels import backend
from common_kernels.fp8.cpu import FORMATS
from common_kernels.fp8.triton import BLOCK, coded, constants, largest, scale_from
from common_kernels.launch import INTERPRETED, cast, launch, load_groups, magnitude
from common_kernels.mvue.triton import philox, sample_stored, uniform
from common_kernels.pack.triton import (
    largest_two,
    new_buffer,
    order_of,
    split,
    split_fours,
    store_meta,
)
from common_kernels.soft_threshold.triton import less, threshold

TILE = 64


def codes_like(shape: tuple[int, ...], fmt: str, device: torch.device) -> torch.Tensor:
    """Uninitialised memory for codes: in fp32 under Triton's interpreter, which casts to FP8
    wrongly."""
    dtype = torch.float32 if backend.interpreted() else FORMATS[fmt]
    return torch.empty(shape, dtype=dtype, device=device)


def quantize_both(
    x: torch.Tensor,
    fmt: str,
    fmt_transposed: str,
    amax: torch.Tensor | None = None,
    seen: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    columns = x.shape[-1]
    rows = x.numel() // columns
    padded = triton.cdiv(rows, TILE) * TILE
    codes = codes_like(x.shape, fmt, x.device)
    transposed = codes_like((columns, padded), fmt_transposed, x.device)
    scales = torch.empty((), device=x.device), torch.empty((), device=x.device)
    bits = largest(x) if amax is None else amax.view(torch.int32)
    # Codes of one format are written in two launches, for the reason given in project_quantize24_.
    parts = ((True, True),) if fmt != fmt_transposed else ((True, False), (False, True))
    for own, other in parts:
        launch(
            quantize_both_kernel, padded // TILE * triton.cdiv(columns, TILE), x.device,
            x, codes, transposed, bits, *scales,
            scales[0] if seen is None else seen.view(torch.int32), rows, columns, padded,
            *constants(fmt), *constants(fmt_transposed), OWN=own, TRANSPOSED=other,
            SEEN=seen is not None, TILE=TILE,
        )  # fmt: skip
    return codes.to(FORMATS[fmt]), transposed.to(FORMATS[fmt_transposed]), *scales


@triton.jit
def encode(y, TOP: tl.constexpr, SMALLEST: tl.constexpr, LIFT: tl.constexpr):
    """Scaled numbers rounded to codes, in fp32; a negative number that rounds to zero is -0.0.

    Only the interpreter needs it: a GPU's cast to FP8 rounds to nearest even and saturates.
    """
    if not INTERPRETED:
        return y
    return coded(y, TOP, SMALLEST, LIFT)


@triton.jit
def quantize_both_kernel(
    x, codes, transposed, amax, own_scale, other_scale, seen, rows, columns, padded,
    TOP: tl.constexpr, SMALLEST: tl.constexpr, LIFT: tl.constexpr,
    TOP_T: tl.constexpr, SMALLEST_T: tl.constexpr, LIFT_T: tl.constexpr,
    OWN: tl.constexpr, TRANSPOSED: tl.constexpr, SEEN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    bits = tl.load(amax)
    scale, scale_t = scale_from(bits, TOP), scale_from(bits, TOP_T)
    if tl.program_id(0) == 0:
        tl.store(own_scale, scale)
        tl.store(other_scale, scale_t)
    across = tl.cdiv(columns, TILE)
    r = (tl.program_id(0) // across).to(tl.int64) * TILE + tl.arange(0, TILE)
    c = (tl.program_id(0) % across).to(tl.int64) * TILE + tl.arange(0, TILE)
    at = r[:, None] * columns + c[None, :]
    inside = (r < rows)[:, None] & (c < columns)[None, :]
    values = tl.load(x + at, mask=inside, other=0).to(tl.float32)
    if SEEN:
        tl.atomic_max(seen, tl.max(magnitude(values)))
    if OWN:
        code = encode(values * scale, TOP, SMALLEST, LIFT)
        tl.store(codes + at, code.to(codes.dtype.element_ty), mask=inside)
    if TRANSPOSED:
        code = tl.trans(encode(values * scale_t, TOP_T, SMALLEST_T, LIFT_T))
        at = c[:, None] * padded + r[None, :]
        tl.store(transposed + at, code.to(transposed.dtype.element_ty), mask=(c < columns)[:, None])


def project_quantize24_(
    buffer: torch.Tensor | None,
    dtype: torch.dtype | None,
    layout: str,
    codes: torch.Tensor | None,
    transposed: torch.Tensor,
    scales: torch.Tensor,
    w: torch.Tensor,
    beta: torch.Tensor,
    amax: torch.Tensor | None,
) -> None:
    rows, columns = w.shape
    if amax is None:
        bits = torch.zeros((), dtype=torch.int32, device=w.device)
        size = w.numel() // 4
        launch(
            projected_amax_kernel, triton.cdiv(size, BLOCK // 4), w.device, w, beta, bits, size,
            BLOCK=BLOCK // 4,
        )  # fmt: skip
    else:
        bits = amax.view(torch.int32)
    values, meta, order = scales, scales, ""  # not written to
    if buffer is not None:
        assert dtype is not None
        values, meta = split(buffer, w.numel(), dtype)
        order = order_of(layout, dtype)
    formats = {dtype: name for name, dtype in FORMATS.items()}

    def run(own: torch.Tensor, **outputs: bool) -> None:
        launch(
            project_kernel, rows // TILE * (columns // TILE), w.device,
            w, beta, bits, values, meta, own, transposed, scales, rows, columns,
            *constants(formats[own.dtype]), *constants(formats[transposed.dtype]),
            **outputs, ORDER=order, num_warps=8,
        )  # fmt: skip

    packed = buffer is not None
    run(values if packed else transposed, PACKED=packed, CODES=False, TRANSPOSED=True)
    if codes is not None:
        # A launch of its own: if it also writes the transpose in the same format, Triton 3.6 drops
        # some of the stores.
        run(codes, PACKED=False, CODES=True, TRANSPOSED=False)


@triton.jit
def project(a0, a1, a2, a3, beta, dtype: tl.constexpr):
    """beta * soft_threshold24 of four entries, each step rounded as the separate operators do."""
    m0, m1, m2, m3 = magnitude(a0), magnitude(a1), magnitude(a2), magnitude(a3)
    t = threshold(m0, m1, m2, m3, 0.0, False)
    return (
        cast(less(a0, t), dtype).to(tl.float32) * beta,
        cast(less(a1, t), dtype).to(tl.float32) * beta,
        cast(less(a2, t), dtype).to(tl.float32) * beta,
        cast(less(a3, t), dtype).to(tl.float32) * beta,
    )


@triton.jit
def projected_amax_kernel(w, beta, amax, size, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    a0, a1, a2, a3 = load_groups(w, start, size, 1, BLOCK, True)
    p0, p1, p2, p3 = project(
        a0.to(tl.float32), a1.to(tl.float32), a2.to(tl.float32), a3.to(tl.float32),
        tl.load(beta), w.dtype.element_ty,
    )  # fmt: skip
    bits = tl.maximum(
        tl.maximum(magnitude(p0), magnitude(p1)), tl.maximum(magnitude(p2), magnitude(p3))
    )
    tl.atomic_max(amax, tl.max(bits, 0))


@triton.jit
def project_kernel(
    w, beta, amax, values, meta, codes, transposed, scales, rows, columns,
    TOP: tl.constexpr, SMALLEST: tl.constexpr, LIFT: tl.constexpr,
    TOP_T: tl.constexpr, SMALLEST_T: tl.constexpr, LIFT_T: tl.constexpr,
    PACKED: tl.constexpr, CODES: tl.constexpr, TRANSPOSED: tl.constexpr, ORDER: tl.constexpr,
):  # fmt: skip
    """Write the codes of a 64 x 64 block of the projected weight."""
    bits = tl.load(amax)
    s, s_t = scale_from(bits, TOP), scale_from(bits, TOP_T)
    if tl.program_id(0) == 0:
        if PACKED or CODES:
            tl.store(scales, s)
        if TRANSPOSED:
            tl.store(scales + 1, s_t)
    across = columns // 64
    top = (tl.program_id(0) // across).to(tl.int64) * 64
    left = (tl.program_id(0) % across).to(tl.int64) * 64
    r, c = top + tl.arange(0, 64), left + tl.arange(0, 64)
    at = r[:, None] * columns + c[None, :]
    a0, a1, a2, a3 = split_fours(tl.load(w + at), 64, 16)
    a0, a1, a2, a3 = a0.to(tl.float32), a1.to(tl.float32), a2.to(tl.float32), a3.to(tl.float32)
    p0, p1, p2, p3 = project(a0, a1, a2, a3, tl.load(beta), w.dtype.element_ty)
    if PACKED:
        m0, m1, m2, m3 = magnitude(a0), magnitude(a1), magnitude(a2), magnitude(a3)
        one, other, nibbles = largest_two(p0, p1, p2, p3, m0, m1, m2, m3)
        pairs = encode(tl.join(one, other) * s, TOP, SMALLEST, LIFT)
        pairs = tl.reshape(pairs, [64, 32])
        place = left // 2 + tl.arange(0, 32)
        tl.store(
            values + r[:, None] * (columns // 2) + place[None, :],
            pairs.to(values.dtype.element_ty),
        )
        store_meta(meta, nibbles, top // 64, left // 4, rows, columns, ORDER, 16)
    p = tl.reshape(tl.join(tl.join(p0, p2), tl.join(p1, p3)), [64, 64])
    if CODES:
        tl.store(codes + at, encode(p * s, TOP, SMALLEST, LIFT).to(codes.dtype.element_ty))
    if TRANSPOSED:
        code = tl.trans(encode(p * s_t, TOP_T, SMALLEST_T, LIFT_T))
        tl.store(transposed + c[:, None] * rows + r[None, :], code.to(transposed.dtype.element_ty))


def quantize_and_sample(
    dy: torch.Tensor,
    key: torch.Tensor,
    stride: int,
    fmt: str,
    layout: str,
    padded: int,
    amax: torch.Tensor | None = None,
    seen: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See operands.quantize_and_sample. padded: tokens of the sample, a multiple of 64."""
    out = dy.shape[-1]
    tokens = dy.numel() // out
    codes = codes_like(dy.shape, fmt, dy.device)
    buffer = new_buffer(out, padded, FORMATS[fmt], dy.device, layout)
    stored, meta = split(buffer, out * padded, FORMATS[fmt])
    values = codes_like(stored.shape, fmt, dy.device) if backend.interpreted() else stored
    scale = torch.empty((), device=dy.device)
    launch(
        quantize_and_sample_kernel, padded // TILE * (out // TILE), dy.device,
        dy, key, stride, codes, values, meta,
        largest(dy) if amax is None else amax.view(torch.int32), scale,
        scale if seen is None else seen.view(torch.int32), tokens, padded, out,
        *constants(fmt), SEEN=seen is not None, ORDER=order_of(layout, FORMATS[fmt]),
    )  # fmt: skip
    if backend.interpreted():
        stored.copy_(values)
    return codes.to(FORMATS[fmt]), buffer, scale


@triton.jit
def quantize_and_sample_kernel(
    dy, key, stride, codes, values, meta, amax, scale, seen, tokens, padded, out,
    TOP: tl.constexpr, SMALLEST: tl.constexpr, LIFT: tl.constexpr, SEEN: tl.constexpr,
    ORDER: tl.constexpr,
):  # fmt: skip
    """Sample 64 tokens (16 groups) of 64 features, as pack.sample_triton does, and write codes."""
    s = scale_from(tl.load(amax), TOP)
    if tl.program_id(0) == 0:
        tl.store(scale, s)
    seed, offset = tl.load(key), tl.load(key + 1) * stride
    across = out // 64
    token = (tl.program_id(0) // across).to(tl.int64) * 64
    feature = (tl.program_id(0) % across).to(tl.int64) * 64
    group = token // 4 + tl.arange(0, 16)[:, None]
    column = feature + tl.arange(0, 64)[None, :]
    x0 = load_and_encode(dy, codes, 4 * group, column, tokens, out, s, TOP, SMALLEST, LIFT)
    x1 = load_and_encode(dy, codes, 4 * group + 1, column, tokens, out, s, TOP, SMALLEST, LIFT)
    x2 = load_and_encode(dy, codes, 4 * group + 2, column, tokens, out, s, TOP, SMALLEST, LIFT)
    x3 = load_and_encode(dy, codes, 4 * group + 3, column, tokens, out, s, TOP, SMALLEST, LIFT)
    if SEEN:
        bits = tl.maximum(
            tl.maximum(magnitude(x0), magnitude(x1)), tl.maximum(magnitude(x2), magnitude(x3))
        )
        tl.atomic_max(seen, tl.max(bits))
    # Four neighbouring features share a counter of the random generator.
    counters = ((offset + group * out + feature) >> 2) + tl.arange(0, 16)[None, :]
    w0, w1, w2, w3 = philox(seed, counters)
    bits = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [16, 64])
    one, other, nibbles = sample_stored(x0, x1, x2, x3, uniform(bits))
    pairs = encode(tl.join(one, other) * (0.5 * s), TOP, SMALLEST, LIFT)
    place = token // 2 + tl.arange(0, 32)[None, :]
    row = (feature + tl.arange(0, 64)[:, None]) * (padded // 2)
    pairs = tl.reshape(tl.permute(pairs, 1, 0, 2), [64, 32])
    tl.store(values + row + place, pairs.to(values.dtype.element_ty))
    store_meta(meta, tl.trans(nibbles), feature // 64, token // 4, out, padded, ORDER, 16)


@triton.jit
def load_and_encode(
    dy, codes, row, column, tokens, out, s,
    TOP: tl.constexpr, SMALLEST: tl.constexpr, LIFT: tl.constexpr,
):  # fmt: skip
    at, inside = row * out + column, (row < tokens) & (column < out)
    x = tl.load(dy + at, mask=inside, other=0).to(tl.float32)
    code = encode(x * s, TOP, SMALLEST, LIFT)
    tl.store(codes + at, code.to(codes.dtype.element_ty), mask=inside)
    return x


def rescale(
    y: torch.Tensor,
    out: torch.Tensor,
    scale: torch.Tensor,
    other: torch.Tensor,
    factor: float,
    bias: torch.Tensor | None,
) -> None:
    launch(
        rescale_kernel, triton.cdiv(y.numel(), 2048), y.device, y, out, scale, other,
        y if bias is None else bias, y.numel(), y.shape[-1],
        FACTOR=factor, BIASED=bias is not None, BLOCK=2048,
    )  # fmt: skip


def inverse(*scales: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The reciprocals of two fp32 numbers, in one launch."""
    found = tuple(torch.empty_like(scale) for scale in scales)
    launch(inverse_kernel, 1, found[0].device, *scales, *found)
    return found


@triton.jit
def inverse_kernel(a, b, inverse, other):
    one = tl.full([], 1.0, tl.float32)
    tl.store(inverse, tl.div_rn(one, tl.load(a)))
    tl.store(other, tl.div_rn(one, tl.load(b)))


@triton.jit
def rescale_kernel(
    y, out, scale, other, bias, size, columns,
    FACTOR: tl.constexpr, BIASED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Divide twice: the product of the two scales may overflow.
    factor = tl.div_rn(tl.full([], FACTOR, tl.float32), tl.load(scale))
    factor = tl.div_rn(factor, tl.load(other))
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    result = tl.load(y + at, mask=inside, other=0).to(tl.float32) * factor
    if BIASED:
        result += tl.load(bias + at % columns, mask=inside, other=0).to(tl.float32)
    tl.store(out + at, cast(result, out.dtype.element_ty), mask=inside)
