"""FP8 operands in Triton, bit for bit equal to the PyTorch paths of operands.py, except that the
factor of `rescale` may differ in its last bit."""

import torch
import triton
import triton.language as tl

from common_kernels.fp8.cpu import FORMATS
from common_kernels.fp8.triton import coded, largest, scale_from
from common_kernels.launch import INTERPRETED, cast, launch, magnitude
from common_kernels.masks import triton as masks
from common_kernels.mvue.triton import philox, sample_stored, uniform
from common_kernels.pack.triton import new_buffer, order_of, split, store_meta

TILE = 64


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
    codes = x.new_empty(x.shape, dtype=FORMATS[fmt])
    transposed = x.new_empty((columns, padded), dtype=FORMATS[fmt_transposed])
    scales = torch.empty((), device=x.device), torch.empty((), device=x.device)
    bits = largest(x) if amax is None else amax.view(torch.int32)
    # Codes of one format are written in two launches: in one, Triton 3.6 drops some of the stores.
    parts = ((True, True),) if fmt != fmt_transposed else ((True, False), (False, True))
    for own, other in parts:
        launch(
            quantize_both_kernel, padded // TILE * triton.cdiv(columns, TILE), x.device,
            x, codes, transposed, bits, *scales,
            scales[0] if seen is None else seen.view(torch.int32), rows, columns, padded,
            FMT=fmt, FMT_T=fmt_transposed, OWN=own, TRANSPOSED=other,
            SEEN=seen is not None, TILE=TILE,
        )  # fmt: skip
    return codes, transposed, *scales


@triton.jit
def encode(y, FMT: tl.constexpr):
    """Scaled numbers as the codes that a cast makes of them, in fp32.

    Only the interpreter rounds here: a GPU's cast to FP8 rounds to nearest even and saturates.
    """
    return coded(y, FMT) if INTERPRETED else y


@triton.jit
def quantize_both_kernel(
    x, codes, transposed, amax, own_scale, other_scale, seen, rows, columns, padded,
    FMT: tl.constexpr, FMT_T: tl.constexpr, OWN: tl.constexpr, TRANSPOSED: tl.constexpr,
    SEEN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    bits = tl.load(amax)
    scale, scale_t = scale_from(bits, FMT), scale_from(bits, FMT_T)
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
        code = encode(values * scale, FMT)
        tl.store(codes + at, code.to(codes.dtype.element_ty), mask=inside)
    if TRANSPOSED:
        code = tl.trans(encode(values * scale_t, FMT_T))
        at = c[:, None] * padded + r[None, :]
        tl.store(transposed + at, code.to(transposed.dtype.element_ty), mask=(c < columns)[:, None])


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
    codes = dy.new_empty(dy.shape, dtype=FORMATS[fmt])
    buffer = new_buffer(out, padded, codes.dtype, dy.device, layout)
    scale = torch.empty((), device=dy.device)
    launch(
        quantize_and_sample_kernel, padded // TILE * (out // TILE), dy.device,
        dy, key, stride, codes, *split(buffer, out * padded, codes.dtype),
        largest(dy) if amax is None else amax.view(torch.int32), scale,
        scale if seen is None else seen.view(torch.int32), tokens, padded, out,
        FMT=fmt, SEEN=seen is not None, ORDER=order_of(layout, codes.dtype),
    )  # fmt: skip
    return codes, buffer, scale


@triton.jit
def quantize_and_sample_kernel(
    dy, key, stride, codes, values, meta, amax, scale, seen, tokens, padded, out,
    FMT: tl.constexpr, SEEN: tl.constexpr, ORDER: tl.constexpr,
):  # fmt: skip
    """Sample 64 tokens (16 groups) of 64 features, as pack.sample_triton does, and write codes."""
    s = scale_from(tl.load(amax), FMT)
    if tl.program_id(0) == 0:
        tl.store(scale, s)
    seed, offset = tl.load(key), tl.load(key + 1) * stride
    across = out // 64
    token = (tl.program_id(0) // across).to(tl.int64) * 64
    feature = (tl.program_id(0) % across).to(tl.int64) * 64
    group = token // 4 + tl.arange(0, 16)[:, None]
    column = feature + tl.arange(0, 64)[None, :]
    x = ()
    for i in tl.static_range(4):
        row = 4 * group + i
        at, inside = row * out + column, (row < tokens) & (column < out)
        x += (tl.load(dy + at, mask=inside, other=0).to(tl.float32),)  # type: ignore[assignment]
        code = encode(x[i] * s, FMT)
        tl.store(codes + at, code.to(codes.dtype.element_ty), mask=inside)
    if SEEN:
        tl.atomic_max(seen, tl.max(masks.largest(x)))
    # Four neighbouring features share a counter of the random generator.
    counters = ((offset + group * out + feature) >> 2) + tl.arange(0, 16)[None, :]
    w0, w1, w2, w3 = philox(seed, counters)
    bits = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [16, 64])
    one, other, nibbles = sample_stored(x[0], x[1], x[2], x[3], uniform(bits))  # type: ignore[misc]
    pairs = encode(tl.join(one, other) * (0.5 * s), FMT)
    place = token // 2 + tl.arange(0, 32)[None, :]
    row = (feature + tl.arange(0, 64)[:, None]) * (padded // 2)
    pairs = tl.reshape(tl.permute(pairs, 1, 0, 2), [64, 32])
    tl.store(values + row + place, pairs.to(values.dtype.element_ty))
    store_meta(meta, tl.trans(nibbles), feature // 64, token // 4, out, padded, ORDER, 16)


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
