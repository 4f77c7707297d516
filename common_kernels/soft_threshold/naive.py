"""S-STE's soft threshold in plain PyTorch: the specification."""

import torch

from common_kernels import chunks
from common_kernels.masks import naive as masks

MAGNITUDE, SIGN = 0x7FFFFFFF, -(1 << 31)


def soft_threshold24(x: torch.Tensor, gamma: float) -> torch.Tensor:
    out = torch.empty_like(x)
    if x.numel() == 0:
        return out
    scratch = chunks.Scratch(x.device)
    for piece, result in chunks.split(chunks.as_groups(x, -1, 4), chunks.as_groups(out, -1, 4)):
        rows, _, lanes = piece.shape
        v = chunks.gather_lanes(piece, scratch("v", 4, rows, lanes))
        magnitude = scratch("magnitude", 4, rows, lanes)
        # The bits of non-negative floats rank as the numbers do; two rounds of a sorting network leave the second
        # and the third smallest in the middle.
        a, low, high = (
            part.view(torch.int32)
            for part in (magnitude, scratch("low", 2, rows, lanes), scratch("high", 2, rows, lanes))
        )
        torch.bitwise_and(v.view(torch.int32), MAGNITUDE, out=a)
        torch.minimum(a[:2], a[2:], out=low)
        torch.maximum(a[:2], a[2:], out=high)
        middle = torch.maximum(low[0], low[1], out=low[0]), torch.minimum(high[0], high[1], out=high[0])
        t = torch.minimum(*middle, out=low[1]).view(torch.float32)
        if gamma:
            t = torch.lerp(t, torch.maximum(*middle, out=high[1]).view(torch.float32), gamma)
        torch.sub(magnitude, t, out=magnitude).relu_()
        a.bitwise_or_(v.view(torch.int32).bitwise_and_(SIGN))
        chunks.scatter_lanes(magnitude, result)
        # With three or more entries that are not finite, Inf - Inf = NaN appears in as many; only two may stay.
        if x.device.type != "cpu" or not t.amax().isfinite():
            legal = torch.empty_like(piece, dtype=torch.bool)
            masks.keep(masks.magnitude_bits(piece), legal, 2)
            result.masked_fill_(~legal, 0)
    return out
