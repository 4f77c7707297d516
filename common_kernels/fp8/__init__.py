"""Simulated FP8 (S-STE, arXiv 2409.09099, section 5.2): per-tensor scaling by the current amax."""

import torch

from common_kernels import backend as backends
from common_kernels import checks
from common_kernels.fp8 import cpu
from common_kernels.library import operator_of


def quantize_fp8(
    x: torch.Tensor,
    fmt: str,
    amax: torch.Tensor | None = None,
    seen: torch.Tensor | None = None,
    *,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise x to FP8 codes and a scale, such that x is approximately codes / scale.

    The codes have x's shape and dtype torch.float8_e4m3fn (fmt `e4m3`) or torch.float8_e5m2 (fmt
    `e5m2`), rounded to nearest even. The scale is a 0-dim fp32 tensor, largest code / amax. A NaN
    or Inf in x gives NaNs, except an Inf under delayed scaling.

    Args:
        amax, seen: both fp32 [], given together for delayed scaling. amax replaces x's largest
            magnitude, so that x is read once; larger entries, Inf included, saturate at the largest
            code. seen is raised in place to x's largest magnitude if that is larger.
    """
    checks.one_device(x=x, amax=amax, seen=seen)
    return _quantize_fp8(x, fmt, amax, seen, check(x, fmt, backend))


_quantize_fp8 = operator_of(
    cpu.quantize_fp8,
    lambda x, fmt, amax, seen: (
        torch.empty_like(x, dtype=cpu.FORMATS[fmt]),
        x.new_empty((), dtype=torch.float32),
    ),
    mutates_args=("seen",),
)


def fake_fp8(x: torch.Tensor, fmt: str, *, backend: str | None = None) -> torch.Tensor:
    """x quantised to FP8 and back: codes / scale of `quantize_fp8`, of x's shape, dtype, strides.

    No gradient is defined; the caller supplies a straight-through rule.
    """
    return _fake_fp8(x, fmt, check(x, fmt, backend))


_fake_fp8 = operator_of(cpu.fake_fp8, lambda x, fmt: torch.empty_like(x))


def fp8_numbers(
    x: torch.Tensor, fmt: str, *, backend: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes of `quantize_fp8(x, fmt)` as ordinary numbers (bf16 on a GPU, fp32 on a CPU), and
    their scale. Products of them are exact, which simulates FP8 products."""
    numbers, _, scales = _fp8_numbers(x, fmt, "", check(x, fmt, backend))
    return numbers, scales[0]


def fp8_numbers_and_codes(
    x: torch.Tensor, fmt: str, kept: str, *, backend: str | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`fp8_numbers(x, fmt)` and `quantize_fp8(x, kept)` together: one search for the largest
    magnitude, then one read of x."""
    numbers, codes, scales = _fp8_numbers(x, fmt, kept, check(x, fmt, backend))
    return numbers, scales[0], codes, scales[1]


_fp8_numbers = operator_of(
    cpu.fp8_numbers,
    lambda x, fmt, kept: (
        torch.empty_like(x, dtype=cpu.exact(x)),
        torch.empty_like(x if kept else x.new_empty(0), dtype=cpu.FORMATS[kept or fmt]),
        x.new_empty(2, dtype=torch.float32),
    ),
)


def check(x: torch.Tensor, fmt: str, backend: str | None) -> str:
    """Check x and fmt, and return the name of the backend that serves x."""
    checks.float_tensor(x)
    if fmt not in cpu.FORMATS:
        raise ValueError(f"unknown format {fmt!r}: choose one of {', '.join(cpu.FORMATS)}")
    return backends.resolve_fp8(x.device, backend)
