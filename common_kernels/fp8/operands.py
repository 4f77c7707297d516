"""Operands of FP8 products on a GPU's FP8 units: codes, codes of the transpose, and packed codes.

Each tensor has one scale, as in `quantize_fp8`: its codes are approximately x * scale. A product of
codes must therefore be rescaled, by the library if it can (`torch._scaled_mm`), else by `rescale`.
"""

from typing import Any

import torch
from torch import Tensor

from common_kernels import backend as backends
from common_kernels import checks
from common_kernels.fp8 import check_delayed
from common_kernels.fp8 import cpu as fp8
from common_kernels.library import custom_op
from common_kernels.masks import nm_mask
from common_kernels.mvue import sampled24
from common_kernels.pack import BUFFERED, Packed24, cpu
from common_kernels.pack.operands import MULTIPLE, fill_up, row_major, tokens_multiple
from common_kernels.soft_threshold import soft_threshold24


def quantize_both(
    x: Tensor,
    fmt: str,
    fmt_transposed: str,
    amax: Tensor | None = None,
    seen: Tensor | None = None,
    *,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantise x [n, k] and x^T after one search for the largest magnitude, in one more read of x.

    Returns the codes of x in `fmt`, the codes of x^T [k, n rounded up to a multiple of 64] in
    `fmt_transposed`, padded with zeros, and the scale of each. amax, seen: as for `quantize_fp8`.
    """
    checks.float_tensor(x)
    for name in (fmt, fmt_transposed):
        if name not in fp8.FORMATS:
            raise ValueError(f"unknown format {name!r}: choose one of {', '.join(fp8.FORMATS)}")
    if x.ndim != 2:
        raise ValueError(f"x must have two dims, not shape {tuple(x.shape)}")
    name = backends.resolve_fp8(x.device, backend)
    if amax is None and seen is None:
        codes, transposed, scales = _quantize_both(x, fmt, fmt_transposed, name)
    else:
        delayed = check_delayed(x, amax, seen)
        codes, transposed, scales = _quantize_both_delayed(x, fmt, fmt_transposed, *delayed, name)
    return codes, transposed, *scales.unbind()


@custom_op("sparse24::quantize_both", mutates_args=())
def _quantize_both(
    x: Tensor, fmt: str, fmt_transposed: str, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    return _both(x, fmt, fmt_transposed, None, None, backend)


@custom_op("sparse24::quantize_both_delayed", mutates_args=("seen",))
def _quantize_both_delayed(
    x: Tensor, fmt: str, fmt_transposed: str, amax: Tensor, seen: Tensor, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    return _both(x, fmt, fmt_transposed, amax, seen, backend)


def _both(
    x: Tensor, fmt: str, fmt_transposed: str, amax: Tensor | None, seen: Tensor | None, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    if backend == "triton" and x.numel():
        from common_kernels.fp8 import operands_triton

        return operands_triton.quantize_both(x.contiguous(), fmt, fmt_transposed, amax, seen)
    codes, scale = fp8.quantize_fp8(x.contiguous(), fmt, amax, seen)
    transposed, scale_transposed = fp8.quantize_fp8(x, fmt_transposed, amax)
    transposed = fill_up(transposed, -len(x) % MULTIPLE).t().contiguous()
    scales = torch.stack([scale, scale_transposed])
    return codes, transposed, scales


@_quantize_both.register_fake
@_quantize_both_delayed.register_fake
def _both_like(x: Tensor, fmt: str, fmt_transposed: str, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    rows = (x.shape[0] + MULTIPLE - 1) // MULTIPLE * MULTIPLE
    return (
        x.new_empty(x.shape, dtype=fp8.FORMATS[fmt]),
        x.new_empty((x.shape[1], rows), dtype=fp8.FORMATS[fmt_transposed]),
        x.new_empty(2, dtype=torch.float32),
    )


def project_quantize24_(
    out: Packed24 | None,
    codes: Tensor | None,
    transposed: Tensor,
    scales: Tensor,
    w: Tensor,
    beta: Tensor,
    amax: Tensor | None = None,
    *,
    backend: str | None = None,
) -> None:
    """Write the FP8 codes of P = beta * soft_threshold24(w) and of P^T, for w [rows, columns].

    Args:
        out: receives the packed codes of P, or None.
        codes: [rows, columns] of the same dtype, receives the dense codes of P, or None.
        transposed: [columns, rows] of any FP8 dtype, receives the dense codes of P^T.
        scales: fp32 [2], receives the scales of P and of P^T.
        beta: fp32 [].
        amax: fp32 [], the largest magnitude of P if it is known.
    """
    checks.float_tensor(w, "w")
    buffer, dtype, layout = None, None, BUFFERED
    if out is not None:
        buffer, dtype, layout = out.buffer, out.dtype, out.layout
    device = checks.one_device(
        w=w, beta=beta, out=buffer, codes=codes, transposed=transposed, scales=scales, amax=amax
    )
    name = backends.resolve_fp8(device, backend)
    _project_quantize24_(buffer, dtype, layout, codes, transposed, scales, w, beta, amax, name)


@custom_op(
    "sparse24::project_quantize24_", mutates_args=("buffer", "codes", "transposed", "scales")
)
def _project_quantize24_(
    buffer: Tensor | None,
    dtype: torch.dtype | None,
    layout: str,
    codes: Tensor | None,
    transposed: Tensor,
    scales: Tensor,
    w: Tensor,
    beta: Tensor,
    amax: Tensor | None,
    backend: str,
) -> None:
    # Triton's interpreter cannot store FP8 codes.
    if backend == "triton" and layout != cpu.VENDOR and not backends.interpreted():
        from common_kernels.fp8 import operands_triton

        with row_major(codes) as own, row_major(transposed) as other:
            operands_triton.project_quantize24_(
                buffer, dtype, layout, own, other, scales, w.contiguous(), beta, amax
            )
        return
    projected = soft_threshold24(w).float() * beta
    dtype = dtype if codes is None else codes.dtype
    if dtype is not None:
        own, scales[0] = fp8.quantize_fp8(projected, fp8.NAMES[dtype], amax)
        if codes is not None:
            codes.copy_(own)
        if buffer is not None:
            buffer.copy_(cpu.pack(own, nm_mask(w), layout))
    other, scales[1] = fp8.quantize_fp8(projected, fp8.NAMES[transposed.dtype], amax)
    transposed.copy_(other.t())


def quantize_and_sample(
    dy: Tensor,
    key: Tensor,
    stride: int,
    fmt: str,
    amax: Tensor | None = None,
    seen: Tensor | None = None,
    *,
    layout: str = BUFFERED,
    backend: str | None = None,
) -> tuple[Tensor, Packed24, Tensor]:
    """Quantise dy [tokens, out] and a packed, transposed 2:4 sample of it.

    Returns the codes of dy, the packed codes of the transposed sample, and the scale of dy. The
    sample is mvue24(dy, key[0], key[1] * stride, dim=0), its tokens padded with zeros to a multiple
    of 64 or of what `layout` needs. Its entries are at most twice the largest of dy, so its scale
    is half of dy's and needs no search of its own.

    Args:
        key: int64 [2]; key[1] * stride must be a multiple of 4.
        amax, seen: as for `quantize_fp8`.
    """
    checks.float_tensor(dy, "dy")
    if dy.ndim != 2 or dy.shape[1] % MULTIPLE:
        raise ValueError(f"dy must be [tokens, a multiple of {MULTIPLE}], not {tuple(dy.shape)}")
    name = backends.resolve_fp8(checks.one_device(dy=dy, key=key), backend)
    if amax is None and seen is None:
        codes, buffer, scale = _quantize_and_sample(dy, key, stride, fmt, layout, name)
    else:
        amax, seen = check_delayed(dy, amax, seen)
        codes, buffer, scale = _quantize_and_sample_delayed(
            dy, key, stride, fmt, amax, seen, layout, name
        )
    shape = dy.shape[1], _filled_up(dy, layout)
    return codes, Packed24((buffer,), shape, codes.dtype, layout), scale


def _filled_up(dy: Tensor, layout: str) -> int:
    """The number of tokens of dy [tokens, out], rounded up to what a layout of codes needs."""
    multiple = tokens_multiple(layout, torch.float8_e5m2)
    return (dy.shape[0] + multiple - 1) // multiple * multiple


@custom_op("sparse24::quantize_and_sample", mutates_args=())
def _quantize_and_sample(
    dy: Tensor, key: Tensor, stride: int, fmt: str, layout: str, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    return _and_sample(dy, key, stride, fmt, None, None, layout, backend)


@custom_op("sparse24::quantize_and_sample_delayed", mutates_args=("seen",))
def _quantize_and_sample_delayed(
    dy: Tensor,
    key: Tensor,
    stride: int,
    fmt: str,
    amax: Tensor,
    seen: Tensor,
    layout: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return _and_sample(dy, key, stride, fmt, amax, seen, layout, backend)


def _and_sample(
    dy: Tensor,
    key: Tensor,
    stride: int,
    fmt: str,
    amax: Tensor | None,
    seen: Tensor | None,
    layout: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    if backend == "triton" and layout != cpu.VENDOR and dy.numel():
        from common_kernels.fp8 import operands_triton

        return operands_triton.quantize_and_sample(
            dy.contiguous(), key.contiguous(), stride, fmt, layout, _filled_up(dy, layout), amax,
            seen,
        )  # fmt: skip
    codes, scale = fp8.quantize_fp8(dy.contiguous(), fmt, amax, seen)
    filled = fill_up(dy, _filled_up(dy, layout) - len(dy))
    sample = sampled24(filled.float(), key, stride, dim=0)
    top = torch.finfo(fp8.FORMATS[fmt]).max
    sample = sample.t().contiguous()
    own = (sample * (0.5 * scale)).clamp_(-top, top).to(codes.dtype)
    return codes, cpu.pack(own, sample != 0, layout), scale


@_quantize_and_sample.register_fake
@_quantize_and_sample_delayed.register_fake
def _and_sample_like(
    dy: Tensor, key: Tensor, stride: int, fmt: str, *more: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dtype, layout = fp8.FORMATS[fmt], more[-2]
    size = cpu.buffer_bytes(dy.shape[1], _filled_up(dy, layout), dtype, layout)
    return (
        dy.new_empty(dy.shape, dtype=dtype),
        dy.new_empty(size, dtype=torch.uint8),
        dy.new_empty((), dtype=torch.float32),
    )


def rescale(
    y: Tensor,
    scale: Tensor,
    other: Tensor,
    factor: float = 1.0,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """y [rows, columns] * factor / (scale * other) + bias [columns], computed in fp32 and rounded
    once to `dtype` (default: y's). scale, other: fp32 []."""
    checks.float_tensor(y, "y")
    device = checks.one_device(y=y, scale=scale, other=other, bias=bias)
    name = backends.resolve(device, backend)
    return _rescale(y, scale, other, factor, bias, dtype or y.dtype, name)


@custom_op("sparse24::rescale", mutates_args=())
def _rescale(
    y: Tensor,
    scale: Tensor,
    other: Tensor,
    factor: float,
    bias: Tensor | None,
    dtype: torch.dtype,
    backend: str,
) -> Tensor:
    if backend == "triton" and y.numel() and y.is_contiguous():
        from common_kernels.fp8 import operands_triton

        out = torch.empty_like(y, dtype=dtype)
        bias = None if bias is None else bias.contiguous()
        operands_triton.rescale(y, out, scale, other, factor, bias)
        return out
    result = y.float() * (factor / scale / other)
    return (result if bias is None else result + bias.float()).to(dtype, copy=True)


@_rescale.register_fake
def _(y, scale, other, factor, bias, dtype, backend):
    return torch.empty_like(y, dtype=dtype)


def scaled_linear(
    x: Tensor,
    w: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """The product of FP8 codes: x [n, k] w^T [k, m] / (x_scale * w_scale) + bias [m], in `dtype`.

    On a GPU cuBLAS multiplies: at most one operand may be e5m2, the bias may not be fp32, and k and
    m must be multiples of 16 (n is padded). On a CPU the codes are multiplied in fp32.
    """
    checks.one_device(x=x, w=w, x_scale=x_scale, w_scale=w_scale, bias=bias)
    if x.device.type == "cpu":
        with torch.autocast("cpu", enabled=False):
            y = x.float() @ w.float().t() / x_scale / w_scale  # x_scale * w_scale may overflow
        return (y if bias is None else y + bias).to(dtype)
    rows = len(x)
    y = torch._scaled_mm(
        fill_up(x, -rows % 16).contiguous(),
        w.contiguous().t(),
        x_scale.reciprocal(),
        w_scale.reciprocal(),
        bias=None if bias is None else bias.to(torch.bfloat16).contiguous(),
        out_dtype=dtype,
        use_fast_accum=torch.float8_e5m2 not in (x.dtype, w.dtype),
    )
    return y[:rows]
