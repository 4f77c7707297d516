"""Simulated FP8 (S-STE, arXiv 2409.09099, section 5.2): per-tensor scaling by the current amax."""

import torch

from common_kernels import backend as backends
from common_kernels import checks
from common_kernels.fp8 import naive


def quantize_fp8(x: torch.Tensor, fmt: str, *, backend: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (torch.float8_e4m3fn or float8_e5m2, x's shape) and the 0-dim fp32 scale; x ~ codes / scale."""
    _check(x, fmt, backend)
    return torch.ops.sparse24.quantize_fp8(x, fmt)


def fake_fp8(x: torch.Tensor, fmt: str, *, backend: str | None = None) -> torch.Tensor:
    """codes / scale of `quantize_fp8`, in x's dtype. No gradient is defined."""
    _check(x, fmt, backend)
    return torch.ops.sparse24.fake_fp8(x, fmt)


def _check(x: torch.Tensor, fmt: str, backend: str | None) -> None:
    checks.float_tensor(x)
    if fmt not in naive.FORMATS:
        raise ValueError(f"unknown format {fmt!r}: choose one of {', '.join(naive.FORMATS)}")
    backends.resolve(x.device, backend)


@torch.library.custom_op("sparse24::quantize_fp8", mutates_args=())
def _quantize_fp8(x: torch.Tensor, fmt: str) -> tuple[torch.Tensor, torch.Tensor]:
    return naive.quantize_fp8(x, fmt)


@_quantize_fp8.register_fake
def _(x, fmt):
    return torch.empty_like(x, dtype=naive.FORMATS[fmt]), x.new_empty((), dtype=torch.float32)


@torch.library.custom_op("sparse24::fake_fp8", mutates_args=())
def _fake_fp8(x: torch.Tensor, fmt: str) -> torch.Tensor:
    return naive.fake_fp8(x, fmt)


@_fake_fp8.register_fake
def _(x, fmt):
    return torch.empty_like(x)
