"""Masked decay in plain PyTorch: the specification."""

import torch


def masked_decay_(grad: torch.Tensor, weight: torch.Tensor, mask: torch.Tensor, alpha: float) -> None:
    grad.copy_(torch.where(mask, grad, grad + alpha * weight))
