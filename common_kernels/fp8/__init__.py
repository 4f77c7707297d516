"""Simulated FP8 (S-STE, arXiv 2409.09099, section 5.2): per-tensor scaling by the current amax."""

import torch

from common_kernels import backend as backends
from common_kernels import checks
from common_kernels.fp8 import cpu
from common_kernels.library import custom_op, operator_of


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
    name = check(x, fmt, backend)
    if amax is not None or seen is not None:
        amax, seen = check_delayed(x, amax, seen)
    return _quantize_fp8(x, fmt, amax, seen, name)


def fake_fp8(x: torch.Tensor, fmt: str, *, backend: str | None = None) -> torch.Tensor:
    """x quantised to FP8 and back: codes / scale of `quantize_fp8`, in x's shape, dtype and
    strides.

    No gradient is defined; the caller supplies a straight-through rule.
    """
    return _fake_fp8(x, fmt, check(x, fmt, backend))


def check_delayed(
    x: torch.Tensor, amax: torch.Tensor | None, seen: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """amax and seen; raises ValueError unless both are 0-dim fp32 tensors on x's device."""
    for name, tensor in (("amax", amax), ("seen", seen)):
        if tensor is None or tensor.ndim or tensor.dtype != torch.float32:
            given = None if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
            raise ValueError(f"delayed scaling takes amax and seen, fp32 []; {name} is {given}")
    assert amax is not None and seen is not None
    checks.one_device(x=x, amax=amax, seen=seen)
    return amax, seen


def check(x: torch.Tensor, fmt: str, backend: str | None) -> str:
    """Check x and fmt, and return the name of the backend that serves x."""
    checks.float_tensor(x)
    if fmt not in cpu.FORMATS:
        raise ValueError(f"unknown format {fmt!r}: choose one of {', '.join(cpu.FORMATS)}")
    return backends.resolve_fp8(x.device, backend)


@custom_op("sparse24::quantize_fp8", mutates_args=("seen",))
def _quantize_fp8(
    x: torch.Tensor,
    fmt: str,
    amax: torch.Tensor | None,
    seen: torch.Tensor | None,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    if backend == "triton":
        from common_kernels.fp8 import triton

        return triton.quantize_fp8(x, fmt, amax, seen)
    return cpu.quantize_fp8(x, fmt, amax, seen)


@_quantize_fp8.register_fake
def _(x, fmt, amax, seen, backend):
    return torch.empty_like(x, dtype=cpu.FORMATS[fmt]), x.new_empty((), dtype=torch.float32)


_fake_fp8 = operator_of(cpu.fake_fp8, lambda x, fmt: torch.empty_like(x))
