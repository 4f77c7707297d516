"""S-STE's soft threshold in plain PyTorch: the specification."""

import torch

from common_kernels import chunks
from common_kernels.masks import naive as masks


def soft_threshold24(x: torch.Tensor, gamma: float) -> torch.Tensor:
    out = torch.empty_like(x)
    if x.numel() == 0:
        return out
    rows = -1
    for piece, result in chunks.split(chunks.as_groups(x, -1, 4), chunks.as_groups(out, -1, 4)):
        if len(piece) != rows:  # the first piece, and a smaller last one
            rows, _, lanes = piece.shape
            a = torch.empty(4, rows, lanes, device=x.device)
            # As integers: the bits of non-negative floats rank as the numbers do, NaN highest.
            bits = a.view(torch.int32)
            low, high = (torch.empty_like(bits[:2]) for _ in range(2))
            t2, t3 = low[1].view(torch.float32), high[1].view(torch.float32)
        for magnitude, entry in zip(a, piece.unbind(1), strict=True):
            torch.abs(entry.float(), out=magnitude)
        # Two rounds of a sorting network leave the second and third smallest in the middle.
        torch.minimum(bits[:2], bits[2:], out=low)
        torch.maximum(bits[:2], bits[2:], out=high)
        torch.maximum(low[0], low[1], out=low[0])
        torch.minimum(high[0], high[1], out=high[0])
        torch.maximum(low[0], high[0], out=high[1])
        torch.minimum(low[0], high[0], out=low[1])
        t = torch.lerp(t2, t3, gamma) if gamma else t2
        torch.sub(a, t, out=a).relu_()
        for value, entry, target in zip(a, piece.unbind(1), result.unbind(1), strict=True):
            torch.copysign(value, entry, out=target)
        # With three or more entries that are not finite, Inf - Inf = NaN appears in as many; only
        # two may stay.
        if x.device.type != "cpu" or not t.amax().isfinite():
            legal = torch.empty_like(piece, dtype=torch.bool)
            masks.keep(masks.magnitude_bits(piece), legal, 2)
            result.masked_fill_(~legal, 0)
    return out
