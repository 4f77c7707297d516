"""S-STE's soft threshold in plain PyTorch."""

import torch

from common_kernels.masks.cpu import magnitude_bits, nm_mask


def soft_threshold24(x: torch.Tensor, gamma: float) -> torch.Tensor:
    """x - clamp(x, -t, t), which is sign(x) * max(|x| - t, 0).

    Two rounds of a sorting network leave the second and third smallest magnitude in the middle.
    They compare bits, because the bits of non-negative floats rank as the numbers do, NaN highest.
    A group with a threshold that is not finite has three or more entries of NaN (Inf - Inf), and is
    pruned to the two entries of the hard mask.
    """
    values = x.float()
    a0, a1, a2, a3 = magnitude_bits(values).unflatten(-1, (-1, 4)).unbind(-1)
    low = torch.maximum(torch.minimum(a0, a2), torch.minimum(a1, a3))
    high = torch.minimum(torch.maximum(a0, a2), torch.maximum(a1, a3))
    t, third = (f(low, high).view(torch.float32) for f in (torch.minimum, torch.maximum))
    if gamma:
        t = torch.lerp(t, third, gamma)
    t = t.repeat_interleave(4, -1)
    out = torch.empty_like(x)
    out.copy_(values - torch.clamp(values, -t, t)).add_(0.0)  # no zero is -0.0
    if not t.isfinite().all():
        out.masked_fill_(~t.isfinite() & ~nm_mask(x, 2, 4, x.ndim - 1), 0)
    return out
