"""Per-tensor FP8 quantisation in plain PyTorch."""

import torch

FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
NAMES = {dtype: name for name, dtype in FORMATS.items()}


def amax_of(x: torch.Tensor) -> torch.Tensor:
    """The largest magnitude in fp32, or NaN if x holds a NaN; x must not be empty."""
    low, high = x.aminmax()
    return torch.maximum(-low, high).float().abs()  # abs turns -0.0 into 0.0


def scale_from(amax: torch.Tensor, fmt: str) -> torch.Tensor:
    """Largest code / amax, clamped to the largest fp32 number, so that zeros stay zeros."""
    # Both are tensors, because torch computes number / tensor as number * reciprocal.
    top = torch.full_like(amax, torch.finfo(FORMATS[fmt]).max)
    return (top / amax).clamp_max(torch.finfo(torch.float32).max)


def scale_of(x: torch.Tensor, fmt: str) -> torch.Tensor:
    """The scale of `quantize_fp8`; 1 for an empty x."""
    return scale_from(amax_of(x), fmt) if x.numel() else torch.ones((), device=x.device)


def codes_of(x: torch.Tensor, scale: torch.Tensor, fmt: str) -> torch.Tensor:
    """x * scale in the format, rounded to nearest even and saturated at the largest code."""
    top = torch.finfo(FORMATS[fmt]).max
    return (x.float() * scale).clamp_(-top, top).to(FORMATS[fmt])


def quantize_fp8(
    x: torch.Tensor, fmt: str, amax: torch.Tensor | None = None, seen: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    scale = scale_of(x, fmt) if amax is None else scale_from(amax, fmt)
    record(seen, x)
    return codes_of(x, scale, fmt), scale


def record(seen: torch.Tensor | None, x: torch.Tensor) -> None:
    """Raise `seen`, if given, to the largest magnitude of x."""
    if seen is not None and x.numel():
        seen.copy_(torch.maximum(seen, amax_of(x)))


def fake_fp8(x: torch.Tensor, fmt: str) -> torch.Tensor:
    scale = scale_of(x, fmt)
    numbers = codes_of(x, scale, fmt).float() + 0.0  # no zero is -0.0
    return torch.empty_like(x).copy_(numbers / scale)


def fp8_numbers(
    x: torch.Tensor, fmt: str, kept: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The codes as numbers, the codes in format `kept` (empty: none), and both scales, fp32 [2]."""
    amax = amax_of(x) if x.numel() else None
    numbers, scale = quantize_fp8(x, fmt, amax)
    codes, other = quantize_fp8(x if kept else x.new_empty(0), kept or fmt, amax)
    return numbers.to(exact(x)), codes, torch.stack([scale, other])


def exact(x: torch.Tensor) -> torch.dtype:
    """The dtype in which codes are multiplied exactly (methods.nn.operands.exact_product)."""
    return torch.bfloat16 if x.is_cuda else torch.float32
