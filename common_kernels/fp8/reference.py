"""Per-tensor FP8 quantisation by definition: what the tests hold every backend against."""

import torch

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def codes_of(fmt: str) -> list[float]:
    """All finite numbers of the format, those with an even mantissa first."""
    order = [*range(0, 256, 2), *range(1, 256, 2)]
    numbers = torch.tensor(order, dtype=torch.uint8).view(DTYPES[fmt]).float()
    return numbers[numbers.isfinite()].tolist()


def quantize_fp8(x: torch.Tensor, fmt: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (in fp32) and scale: the numbers of the format nearest to x * scale, ties to the even
    mantissa, and the format's largest number over x's largest magnitude (1 for an empty x).
    """
    codes = codes_of(fmt)
    scale = torch.ones(())
    if x.numel():
        top = torch.tensor(max(codes))
        scale = (top / x.float().abs().max()).clamp_max(torch.finfo(torch.float32).max)

    def nearest(number: float) -> float:
        return min(codes, key=lambda code: abs(number - code))

    scaled = (x.float() * scale).flatten().tolist()
    return torch.tensor([nearest(number) for number in scaled]).view(x.shape), scale


def fake_fp8(x: torch.Tensor, fmt: str) -> torch.Tensor:
    """Quantise x and go back: codes / scale, in x's dtype."""
    codes, scale = quantize_fp8(x, fmt)
    return (codes / scale).to(x.dtype)
