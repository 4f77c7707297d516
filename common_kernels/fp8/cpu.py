"""Per-tensor FP8 quantisation in plain PyTorch."""

import torch

from common_kernels import chunks

FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
NAMES = {dtype: name for name, dtype in FORMATS.items()}
EXPONENT = 0x7F800000


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
    x: torch.Tensor,
    fmt: str,
    amax: torch.Tensor | None = None,
    seen: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    scale = scale_of(x, fmt) if amax is None else scale_from(amax, fmt)
    record(seen, x)
    return codes_of(x, scale, fmt), scale


def record(seen: torch.Tensor | None, x: torch.Tensor) -> None:
    """Raise `seen`, if given, to the largest magnitude of x."""
    if seen is not None and x.numel():
        seen.copy_(torch.maximum(seen, amax_of(x)))


def fake_fp8(x: torch.Tensor, fmt: str) -> torch.Tensor:
    """codes / scale, computed without an FP8 cast: adding and subtracting
    1.5 * 2^(e + 23 - mantissa bits) rounds a number of exponent e to the format's mantissa, to
    nearest even. Below the smallest normal number e is held fixed, which gives the subnormals'
    constant step."""
    out = torch.empty_like(x)
    if x.numel() == 0:
        return out
    info, scale = torch.finfo(FORMATS[fmt]), scale_of(x, fmt)
    mantissa = {"e4m3": 3, "e5m2": 2}[fmt]
    smallest = torch.tensor(info.smallest_normal).view(torch.int32).item()
    # On the bits of a power of two: times 2^(23 - mantissa bits), and times 1.5.
    lift = (23 - mantissa << 23) + (1 << 22)
    scratch = chunks.Scratch(x.device)
    for piece, result in chunks.split(*(chunks.in_memory_order(t) for t in (x, out))):
        y, magic = scratch("y", *piece.shape), scratch("magic", *piece.shape)
        y.copy_(piece).mul_(scale).clamp_(-info.max, info.max)
        torch.bitwise_and(y.view(torch.int32), EXPONENT, out=magic.view(torch.int32))
        magic.view(torch.int32).clamp_min_(smallest).add_(lift)
        result.copy_(y.add_(magic).sub_(magic).div_(scale))
    return out
