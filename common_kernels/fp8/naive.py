"""Per-tensor FP8 quantisation in plain PyTorch: the specification."""

import torch

FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def quantize_fp8(x: torch.Tensor, fmt: str) -> tuple[torch.Tensor, torch.Tensor]:
    top = torch.finfo(FORMATS[fmt]).max
    amax = x.abs().amax().float() if x.numel() else torch.zeros((), device=x.device)
    scale = top / amax.clamp_min(top * 2.0**-126)
    return (x.float() * scale).clamp(-top, top).to(FORMATS[fmt]), scale


def fake_fp8(x: torch.Tensor, fmt: str) -> torch.Tensor:
    codes, scale = quantize_fp8(x, fmt)
    return (codes.float() / scale).to(x.dtype)
