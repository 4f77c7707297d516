"""S-STE's soft threshold in plain PyTorch: the specification."""

import torch


def soft_threshold24(x: torch.Tensor, gamma: float) -> torch.Tensor:
    out = torch.empty_like(x)
    groups = x.unflatten(-1, (-1, 4)).float()
    a = groups.abs()
    low, high = torch.minimum(a[..., 0::2], a[..., 1::2]), torch.maximum(a[..., 0::2], a[..., 1::2])
    inner = torch.maximum(low[..., 0], low[..., 1]), torch.minimum(high[..., 0], high[..., 1])
    t2, t3 = torch.minimum(*inner), torch.maximum(*inner)
    t = t2 if gamma == 0 else (1 - gamma) * t2 + gamma * t3
    value = torch.copysign((a - t.unsqueeze(-1)).clamp_min(0), groups)
    out.unflatten(-1, (-1, 4)).copy_(value)
    return out
