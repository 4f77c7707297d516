"""Unbiased 2:4 sampling in plain PyTorch: the specification."""

import torch

from common_kernels.philox import philox4x32


def uniform(word: torch.Tensor) -> torch.Tensor:
    """[0, 1) in steps of 2^-24, exact in fp32."""
    return (word >> 8).to(torch.float32) * 2.0**-24


def exact(x: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """x `[..., 4]` fp32, u `[...]`."""
    a = x.abs()
    a0, a1, a2, a3 = a.unbind(-1)
    s01, s23 = a0 + a1, a2 + a3
    others = torch.stack((a1 + s23, a0 + s23, a3 + s01, a2 + s01), -1)
    half = torch.minimum((s01 + s23) / 2, others.amin(-1))
    dominant = a > others
    c = a.masked_fill(dominant, 0).cumsum(-1)[..., :3]
    p = (u * half)[..., None]
    lanes = torch.arange(4, device=x.device)
    first = (c <= p).sum(-1, keepdim=True) == lanes
    second = (c - half[..., None] <= p).sum(-1, keepdim=True) == lanes
    kept = first | torch.where(dominant.any(-1, keepdim=True), dominant, second)
    return torch.where(kept, x.sign() * torch.maximum(a, half[..., None]), 0)


def sequential(x: torch.Tensor, u: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """x `[..., 4]` fp32, u and v `[...]`."""
    a = x.abs()
    total = a.sum(-1, keepdim=True)
    t = a / total
    others = torch.stack([a[..., [j for j in range(4) if j != i]].sum(-1) for i in range(4)], -1)
    lanes = torch.arange(4, device=x.device)

    def draw(b, u):
        c = b.cumsum(-1)
        return ((c[..., :3] <= u[..., None] * c[..., 3:]).sum(-1, keepdim=True)) == lanes

    first = draw(a, u)
    second = draw(a.masked_fill(first, 0), v)
    k = torch.where(others > 0, t / others, 0)
    k_others = torch.stack([k[..., [j for j in range(4) if j != i]].sum(-1) for i in range(4)], -1)
    pi = t + a * k_others
    return torch.where((first | second) & (a > 0), x / pi, 0)


def mvue24(x, seed, offset, design, dim):
    out = torch.empty_like(x)
    groups = x.movedim(dim, -1).unflatten(-1, (-1, 4)).float()
    grouped = list(x.shape)
    grouped[dim] //= 4
    q = torch.arange(x.numel() // 4, device=x.device).view(grouped).movedim(dim, -1) + offset
    if design == "exact":
        words = torch.stack(philox4x32(seed, q >> 2), -1)
        value = exact(groups, uniform(words.gather(-1, (q & 3)[..., None])[..., 0]))
    else:
        w0, w1, _, _ = philox4x32(seed, q)
        value = sequential(groups, uniform(w0), uniform(w1))
    out.movedim(dim, -1).unflatten(-1, (-1, 4)).copy_(value)
    return out
