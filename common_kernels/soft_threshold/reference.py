"""S-STE's soft threshold by definition: what the tests hold every backend against."""

import torch

from common_kernels.masks.reference import each_group, nm_mask


def soft_threshold24(x: torch.Tensor, gamma: float = 0.0) -> torch.Tensor:
    """sign(a_i) * max(|a_i| - t, 0) for each group of four along the last dim, in fp32 (S-STE,
    arXiv 2409.09099, section 4.1). t is the second smallest magnitude, or with gamma > 0 a point
    between it and the third. Only entries of the hard 2:4 mask survive, which matters if Inf - Inf
    gives NaN."""

    def shrink(group: list[float], _: int) -> list[float]:
        a = torch.tensor(group)
        _, second, third, _ = a.abs().sort().values
        t = torch.lerp(second, third, gamma)
        return torch.where(nm_mask(a), a.sign() * torch.relu(a.abs() - t), 0.0).tolist()

    return each_group(shrink, x, 4, -1, torch.float32).to(x.dtype)
