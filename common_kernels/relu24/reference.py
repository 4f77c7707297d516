"""Squared ReLU pruned to 2:4 by definition (arXiv 2503.16672), for tests of every backend."""

import torch

from common_kernels.masks.reference import each_group, nm_mask


def relu24(z: torch.Tensor, prune: bool = True) -> torch.Tensor:
    """H' = relu(Z)^2 in fp32, of which each four along the last dim keep the two largest."""

    def group(entries: list[float], _: int) -> list[float]:
        a = torch.tensor(entries).relu()
        return torch.where(nm_mask(a), a * a, 0.0).tolist() if prune else (a * a).tolist()

    return each_group(group, z, 4, -1, torch.float32).to(z.dtype)


def relu24_backward(dh: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    """dZ = 2 dH sqrt(H') in fp32, 0 where H' is 0, so that it has the pattern of H'."""
    dz = [
        0.0 if kept == 0 else float(2 * grad * kept.sqrt())
        for grad, kept in zip(dh.float().flatten(), h.float().flatten(), strict=True)
    ]
    return torch.tensor(dz).view(dh.shape).to(dh.dtype)
