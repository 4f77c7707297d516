"""Per-tensor FP8 quantisation in Triton, bit for bit that of cpu.py. x is read once for its largest
magnitude and once for the codes."""

import torch
import triton
import triton.language as tl

from common_kernels import layout
from common_kernels.fp8 import cpu
from common_kernels.fp8.cpu import FORMATS
from common_kernels.launch import INTERPRETED, cast, launch, magnitude

BLOCK = 4096


def quantize_fp8(
    x: torch.Tensor, fmt: str, amax: torch.Tensor | None = None, seen: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    if x.numel() == 0:
        return cpu.quantize_fp8(x, fmt, amax, seen)
    codes = torch.empty_like(x, dtype=FORMATS[fmt])
    return codes, run(x, codes, fmt, amax=amax, seen=seen)[0]


def fp8_numbers(
    x: torch.Tensor, fmt: str, kept: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if x.numel() == 0:
        return cpu.fp8_numbers(x, fmt, kept)
    numbers = torch.empty_like(x, dtype=cpu.exact(x))
    codes = torch.empty_like(x if kept else x.new_empty(0), dtype=FORMATS[kept or fmt])
    return numbers, codes, run(x, numbers, fmt, codes, kept)


def fake_fp8(x: torch.Tensor, fmt: str) -> torch.Tensor:
    out = torch.empty_like(x)
    if x.numel():
        run(x, out, fmt, fake=True)
    return out


def run(
    x: torch.Tensor,
    out: torch.Tensor,
    fmt: str,
    codes: torch.Tensor | None = None,
    kept: str = "",
    fake: bool = False,
    amax: torch.Tensor | None = None,
    seen: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write the codes of x, or what they stand for if `fake`, into `out`, and with `kept` those in
    another format into `codes`. Returns both scales, fp32 [2]."""
    x, out = layout.in_memory_order(x), layout.in_memory_order(out)
    bits = largest(x) if amax is None else amax.view(torch.int32)
    scales = torch.empty(2, device=x.device)
    launch(
        fp8_kernel, triton.cdiv(x.numel(), BLOCK), x.device,
        x, out, layout.in_memory_order(codes) if kept else out, bits, scales,
        bits if seen is None else seen.view(torch.int32), x.numel(),
        FMT=fmt, FMT_K=kept or fmt, FAKE=fake, KEPT=kept != "",
        SEEN=seen is not None, BLOCK=BLOCK,
    )  # fmt: skip
    return scales


@triton.constexpr_function
def constants(fmt):
    """The format's largest code, the bits of its smallest normal number, and the integer that
    `rounded` adds to the bits of a power of two to get the rounding constant."""
    top, exponent, mantissa = {"e4m3": (448.0, -6, 3), "e5m2": (57344.0, -14, 2)}[fmt]
    return top, 127 + exponent << 23, (23 - mantissa << 23) + (1 << 22)


def largest(x: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of x as its fp32 bits, int32 []; x must be dense in memory."""
    amax = torch.zeros((), dtype=torch.int32, device=x.device)
    launch(
        amax_kernel, triton.cdiv(x.numel(), BLOCK), x.device, x, amax, x.numel(), BLOCK=BLOCK
    )  # fmt: skip
    return amax


@triton.jit
def amax_kernel(x, amax, size, BLOCK: tl.constexpr):
    """Raise `amax` to the largest magnitude, as fp32 bits, which rank alike, NaN highest."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    bits = magnitude(tl.load(x + at, mask=at < size, other=0).to(tl.float32))
    tl.atomic_max(amax, tl.max(bits, 0))


@triton.jit
def fp8_kernel(
    x, out, codes, amax, scales, seen, size,
    FMT: tl.constexpr, FMT_K: tl.constexpr, FAKE: tl.constexpr, KEPT: tl.constexpr,
    SEEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    bits = tl.load(amax)
    s, s_k = scale_from(bits, FMT), scale_from(bits, FMT_K)
    if tl.program_id(0) == 0:
        tl.store(scales, s)
        tl.store(scales + 1, s_k)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + at, mask=at < size, other=0).to(tl.float32)
    if SEEN:
        tl.atomic_max(seen, tl.max(magnitude(a), 0))
    y = tl.div_rn(rounded(a * s, FMT), s) if FAKE else coded(a * s, FMT)
    tl.store(out + at, cast(y, out.dtype.element_ty), mask=at < size)
    if KEPT:
        y = coded(a * s_k, FMT_K)
        tl.store(codes + at, cast(y, codes.dtype.element_ty), mask=at < size)


@triton.jit
def scale_from(bits, FMT: tl.constexpr):
    """Largest code / amax, clamped to the largest fp32 number."""
    amax = bits.to(tl.float32, bitcast=True)
    top: tl.constexpr = constants(FMT)[0]
    largest: tl.constexpr = 3.4028234663852886e38
    return tl.minimum(
        tl.div_rn(tl.full([], top, tl.float32), amax), largest, propagate_nan=tl.PropagateNan.ALL
    )


@triton.jit
def coded(y, FMT: tl.constexpr):
    """y rounded as by `rounded`; a negative number that rounds to zero is -0.0."""
    sign = y.to(tl.int32, bitcast=True) & -2147483648
    code = rounded(y, FMT).to(tl.int32, bitcast=True)
    if INTERPRETED:  # its cast makes a NaN's mantissa, rounded to three or two bits, the code's
        nan = 0x7FF00000 if FMT == "e4m3" else 0x7FE00000
        code = tl.where((code & 0x7FFFFFFF) > 0x7F800000, nan, code)
    return (code | sign).to(tl.float32, bitcast=True)


@triton.jit
def rounded(y, FMT: tl.constexpr):
    """y rounded to the nearest number of the format, in fp32, as cpu.fake_fp8 does."""
    top: tl.constexpr = constants(FMT)[0]
    y = tl.minimum(y, top, propagate_nan=tl.PropagateNan.ALL)
    y = tl.maximum(y, -top, propagate_nan=tl.PropagateNan.ALL)
    exponent = tl.maximum(y.to(tl.int32, bitcast=True) & 0x7F800000, constants(FMT)[1])
    magic = (exponent + constants(FMT)[2]).to(tl.float32, bitcast=True)
    return (y + magic) - magic
