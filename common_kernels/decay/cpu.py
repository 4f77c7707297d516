"""Masked decay in plain PyTorch."""

import torch


def masked_decay_(
    grad: torch.Tensor, weight: torch.Tensor, mask: torch.Tensor, alpha: float
) -> None:
    if alpha:
        # Adding -0.0 is the only addition that leaves every number as it is, even signed zeros.
        grad.add_((alpha * weight.float()).masked_fill_(mask, -0.0))
