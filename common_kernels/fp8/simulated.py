"""FP8 codes as ordinary numbers, for simulated FP8 products. A GPU multiplies them in bf16, which
represents every code exactly."""

import torch
from torch import Tensor

from common_kernels.fp8 import check
from common_kernels.fp8 import cpu as fp8
from common_kernels.library import custom_op


def fp8_numbers(x: Tensor, fmt: str, *, backend: str | None = None) -> tuple[Tensor, Tensor]:
    """The codes of `quantize_fp8(x, fmt)` as numbers (bf16 on a GPU, fp32 on a CPU), and their
    scale."""
    return _fp8_numbers(x, fmt, check(x, fmt, backend))


def fp8_numbers_and_codes(
    x: Tensor, fmt: str, kept: str, *, backend: str | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`fp8_numbers(x, fmt)` and `quantize_fp8(x, kept)` together: one search for the largest
    magnitude, then one read of x."""
    name = check(x, fmt, backend)
    numbers, codes, scales = _fp8_numbers_and_codes(x, fmt, kept, check(x, kept, name))
    return numbers, scales[0], codes, scales[1]


@custom_op("sparse24::fp8_numbers", mutates_args=())
def _fp8_numbers(x: Tensor, fmt: str, backend: str) -> tuple[Tensor, Tensor]:
    if backend == "triton" and x.numel():
        from common_kernels.fp8 import triton

        numbers, _, scales = triton.fp8_numbers(x, fmt, None, _dtype(x))
        return numbers, scales[0]
    codes, scale = fp8.quantize_fp8(x, fmt)
    return codes.to(_dtype(x)), scale


@_fp8_numbers.register_fake
def _(x, fmt, backend):
    return torch.empty_like(x, dtype=_dtype(x)), x.new_empty((), dtype=torch.float32)


@custom_op("sparse24::fp8_numbers_and_codes", mutates_args=())
def _fp8_numbers_and_codes(
    x: Tensor, fmt: str, kept: str, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    if backend == "triton" and x.numel():
        from common_kernels.fp8 import triton

        numbers, codes, scales = triton.fp8_numbers(x, fmt, kept, _dtype(x))
        return numbers, codes, scales
    amax = fp8.amax_of(x) if x.numel() else None
    own, scale = fp8.quantize_fp8(x, fmt, amax)
    codes, kept_scale = fp8.quantize_fp8(x, kept, amax)
    return own.to(_dtype(x)), codes, torch.stack([scale, kept_scale])


@_fp8_numbers_and_codes.register_fake
def _(x, fmt, kept, backend):
    return (
        torch.empty_like(x, dtype=_dtype(x)),
        torch.empty_like(x, dtype=fp8.FORMATS[kept]),
        x.new_empty(2, dtype=torch.float32),
    )


def _dtype(x: Tensor) -> torch.dtype:
    """The dtype in which codes are multiplied exactly (methods.nn.operands.exact_product)."""
    return torch.bfloat16 if x.is_cuda else torch.float32
