"""Operands of FP8 products on a GPU's FP8 units: codes, codes of the transpose, and packed codes.

Each tensor has one scale, as in `quantize_fp8`: its codes are approximately x * scale. A product of
codes must therefore be rescaled, by the library if it can (`torch._scaled_mm`), else by `rescale`.
"""

from typing import Any

import torch
from torch import Tensor

from common_kernels import backend as backends
from common_kernels import checks
from common_kernels.fp8 import cpu as fp8
from common_kernels.library import custom_op, kernels_of, launched_by_cpp
from common_kernels.mvue import sampled24
from common_kernels.pack import BUFFERED, Packed24, cpu
from common_kernels.pack.operands import MULTIPLE, fill_up, tokens_multiple

FORMATS = tuple(fp8.FORMATS)


def quantize_both(
    x: Tensor,
    fmt: str,
    fmt_transposed: str,
    amax: Tensor | None = None,
    seen: Tensor | None = None,
    *,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantise x [..., k] with n rows in all, and x^T, after one search for the largest magnitude,
    in one more read of x. Returns the codes of x in `fmt`, the codes of x^T [k, n rounded up to a
    multiple of 64] in `fmt_transposed`, padded with zeros, and the scale of each. amax, seen: as
    for `quantize_fp8`."""
    name = backends.resolve_fp8(checks.one_device(x=x, amax=amax, seen=seen), backend)
    given = x, FORMATS.index(fmt), FORMATS.index(fmt_transposed)
    if name != "triton" or (amax is not None and not x.numel()):
        return _quantize_both(*given, amax, seen)
    return _both_at_once(*given) if amax is None else _both_delayed(*given, amax, _written(seen))


# In the operators formats are indices into FORMATS, as C++ takes them.
@custom_op("sparse24::quantize_both", mutates_args=("seen",))
def _quantize_both(
    x: Tensor,
    fmt: int,
    fmt_transposed: int,
    amax: Tensor | None = None,
    seen: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    codes, scale = fp8.quantize_fp8(x.contiguous(), FORMATS[fmt], amax, seen)
    x = x.reshape(-1, x.shape[-1])
    turned, scale_turned = fp8.quantize_fp8(x, FORMATS[fmt_transposed], amax)
    return codes, fill_up(turned, -len(x) % MULTIPLE).t().contiguous(), scale, scale_turned


@_quantize_both.register_fake
def _both_like(x: Tensor, fmt: int, fmt_transposed: int, *_: Any) -> tuple[Tensor, ...]:
    rows = (x.numel() // x.shape[-1] + MULTIPLE - 1) // MULTIPLE * MULTIPLE
    scale = x.new_empty((), dtype=torch.float32)
    return (
        x.new_empty(x.shape, dtype=fp8.FORMATS[FORMATS[fmt]]),
        x.new_empty((x.shape[-1], rows), dtype=fp8.FORMATS[FORMATS[fmt_transposed]]),
        scale,
        torch.empty_like(scale),
    )


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
    """Quantise dy [..., out] and a packed, transposed 2:4 sample of it along its tokens.

    Returns the codes of dy, the packed codes of the transposed sample, and the scale of dy. The
    sample is mvue24(dy, key[0], key[1] * stride, dim=0), its tokens padded with zeros to a multiple
    of 64 or of what `layout` needs. Its entries are at most twice the largest of dy, so its scale
    is half of dy's and needs no search of its own.

    Args:
        key: int64 [2]; key[1] * stride must be a multiple of 4.
        amax, seen: as for `quantize_fp8`.
    """
    device = checks.one_device(dy=dy, key=key, amax=amax, seen=seen)
    name = backends.resolve_fp8(device, backend)
    given = dy, key, stride, FORMATS.index(fmt), layout
    if name != "triton" or layout == cpu.VENDOR or (amax is not None and not dy.numel()):
        codes, buffer, scale = _quantize_and_sample(*given, amax, seen)
    elif amax is None:
        codes, buffer, scale = _sample_at_once(*given)
    else:
        codes, buffer, scale = _sample_delayed(*given, amax, _written(seen))
    shape = dy.shape[-1], _filled_up(dy, layout)
    return codes, Packed24(buffer, shape, codes.dtype, layout), scale


def _written(seen: Any) -> Any:
    """`seen`, for an operator that autograd passes by and that writes into it."""
    if not torch.compiler.is_compiling() and not seen.is_inference():
        torch.autograd.graph.increment_version(seen)
    return seen


def _filled_up(dy: Tensor, layout: str) -> int:
    """The number of tokens of dy [..., out], rounded up to what a layout of codes needs."""
    multiple = tokens_multiple(layout, torch.float8_e5m2)
    return (dy.numel() // dy.shape[-1] + multiple - 1) // multiple * multiple


@custom_op("sparse24::quantize_and_sample", mutates_args=("seen",))
def _quantize_and_sample(
    dy: Tensor,
    key: Tensor,
    stride: int,
    fmt: int,
    layout: str,
    amax: Tensor | None = None,
    seen: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    codes, scale = fp8.quantize_fp8(dy.contiguous(), FORMATS[fmt], amax, seen)
    rows = dy.reshape(-1, dy.shape[-1])
    filled = fill_up(rows, _filled_up(dy, layout) - len(rows))
    sample = sampled24(filled.float(), key, stride, dim=0).t().contiguous()
    own = fp8.codes_of(sample, 0.5 * scale, FORMATS[fmt])
    return codes, cpu.pack(own, sample != 0, layout), scale


@_quantize_and_sample.register_fake
def _sample_like(
    dy: Tensor, key: Tensor, stride: int, fmt: int, layout: str, *_: Any
) -> tuple[Tensor, ...]:
    dtype = fp8.FORMATS[FORMATS[fmt]]
    return (
        dy.new_empty(dy.shape, dtype=dtype),
        cpu.new_buffer(dy.shape[-1], _filled_up(dy, layout), dtype, dy.device, layout),
        dy.new_empty((), dtype=torch.float32),
    )


# The same by one kernel each, which C++ launches on GPUs (matmul/native.py).
def _both_by_kernel(x: Tensor, fmt: int, other: int, *scaling: Tensor) -> tuple[Tensor, ...]:
    from common_kernels.fp8 import operands_triton

    if not x.numel():  # asked here, where torch.compile need not know the size
        return _quantize_both(x, fmt, other, *scaling)
    return operands_triton.quantize_both(x.contiguous(), FORMATS[fmt], FORMATS[other], *scaling)


def _sample_by_kernel(
    dy: Tensor, key: Tensor, stride: int, fmt: int, layout: str, *scaling: Tensor
) -> tuple[Tensor, ...]:
    from common_kernels.fp8 import operands_triton

    if not dy.numel():
        return _quantize_and_sample(dy, key, stride, fmt, layout, *scaling)
    given = dy.contiguous(), key.contiguous(), stride, FORMATS[fmt], layout
    return operands_triton.quantize_and_sample(*given, _filled_up(dy, layout), *scaling)


# Without delayed scaling nothing is written to, so torch.compile quantises an input of several
# layers once.
_SCALINGS = ("", ""), ("_", ", Tensor amax, Tensor(a!) seen")
_both_at_once, _both_delayed = (
    launched_by_cpp(
        f"quantize_both24{mark}(Tensor x, int fmt, int fmt_transposed{scaling}) -> "
        "(Tensor, Tensor, Tensor, Tensor)",
        _both_like,
    )(_both_by_kernel)
    for mark, scaling in _SCALINGS
)
_sample_at_once, _sample_delayed = (
    launched_by_cpp(
        f"quantize_and_sample24{mark}(Tensor dy, Tensor key, SymInt stride, int fmt, str layout"
        f"{scaling}) -> (Tensor, Tensor, Tensor)",
        _sample_like,
    )(_sample_by_kernel)
    for mark, scaling in _SCALINGS
)


@kernels_of("quantize_both24")
def _(fmt: int, other: int, x: Tensor, *scaling: Tensor) -> None:
    _both_by_kernel(x, fmt, other, *scaling)


@kernels_of("quantize_and_sample24")
def _(layout: str, stride: int, fmt: int, dy: Tensor, key: Tensor, *scaling: Tensor) -> Tensor:
    return _sample_by_kernel(dy, key, stride, fmt, layout, *scaling)[1]


@kernels_of("rescale")
def _(factor: int, y: Tensor, out: Tensor, *scales_and_bias: Tensor) -> None:
    from common_kernels.fp8 import operands_triton

    scale, other, *bias = scales_and_bias
    out = torch.empty_like(out)  # it may be y, which C++ rescales next
    operands_triton.rescale(y, out, scale, other, float(factor), bias[0] if bias else None)


@kernels_of("inverse")
def _(*scales: Tensor) -> None:
    from common_kernels.fp8 import operands_triton

    operands_triton.inverse(*scales)


@custom_op("sparse24::rescale", mutates_args=())
def rescale(
    y: Tensor,
    scale: Tensor,
    other: Tensor,
    factor: float = 1.0,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    """y [rows, columns] * factor / (scale * other) + bias [columns], computed in fp32 and rounded
    once to `dtype` (default: y's). scale, other: fp32 []."""
    device = checks.one_device(y=y, scale=scale, other=other, bias=bias)
    dtype = dtype or y.dtype
    if backends.resolve(device, backend) == "triton" and y.numel() and y.is_contiguous():
        from common_kernels.fp8 import operands_triton

        out = torch.empty_like(y, dtype=dtype)
        bias = None if bias is None else bias.contiguous()
        operands_triton.rescale(y, out, scale, other, factor, bias)
        return out
    result = y.float() * (factor / scale / other)
    return (result if bias is None else result + bias.float()).to(dtype, copy=True)


@rescale.register_fake
def _(y, scale, other, factor=1.0, bias=None, dtype=None, backend=None):
    checks.one_device(y=y, scale=scale, other=other, bias=bias)
    return torch.empty_like(y, dtype=dtype)


def scaled_linear(
    x: Tensor,
    w: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """The product of FP8 codes: x [..., k] w^T [k, m] / (x_scale * w_scale) + bias [m], in `dtype`.
    On a GPU cuBLAS multiplies: at most one operand may be e5m2, the bias may not be fp32, and k and
    m must be multiples of 16 (x's rows are padded). On a CPU codes are multiplied in fp32."""
    checks.one_device(x=x, w=w, x_scale=x_scale, w_scale=w_scale, bias=bias)
    if not x.numel():  # no tokens, which wgrad sums over
        return x.new_zeros((*x.shape[:-1], len(w)), dtype=dtype)
    rows = x.numel() // x.shape[-1]
    if not rows % 16:
        return _scaled_linear(x, w, x_scale, w_scale, bias, dtype)
    filled = fill_up(x.reshape(rows, -1), -rows % 16)
    y = _scaled_linear(filled, w, x_scale, w_scale, bias, dtype).narrow_copy(0, 0, rows)
    return torch.ops.aten._unsafe_view(y, [*x.shape[:-1], len(w)])


@launched_by_cpp(
    "scaled_linear24(Tensor x, Tensor w, Tensor x_scale, Tensor w_scale, Tensor? bias, "
    "ScalarType dtype) -> Tensor",
    lambda x, w, x_scale, w_scale, bias, dtype: x.new_empty(
        (*x.shape[:-1], w.shape[0]), dtype=dtype
    ),
)
def _scaled_linear(
    x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    if x.device.type == "cpu":
        with torch.autocast("cpu", enabled=False):
            y = x.float() @ w.float().t() / x_scale / w_scale  # x_scale * w_scale may overflow
        return (y if bias is None else y + bias).to(dtype)
    y = torch._scaled_mm(
        x.reshape(-1, x.shape[-1]).contiguous(),
        w.contiguous().t(),
        x_scale.reciprocal(),
        w_scale.reciprocal(),
        bias=None if bias is None else bias.to(torch.bfloat16).contiguous(),
        out_dtype=dtype,
        use_fast_accum=torch.float8_e5m2 not in (x.dtype, w.dtype),
    )
    return torch.ops.aten._unsafe_view(y, [*x.shape[:-1], w.shape[0]])
