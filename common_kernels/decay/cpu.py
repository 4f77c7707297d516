"""Masked decay in plain PyTorch."""

import torch


def masked_decay_(
    grad: torch.Tensor, weight: torch.Tensor, mask: torch.Tensor, alpha: float
) -> None:
    if alpha:
        # -0.0 is the one number that leaves every other as it is when added, signed zeros included.
        grad.add_((alpha * weight.float()).masked_fill_(mask, -0.0))
