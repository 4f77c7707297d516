"""Masked decay by definition: what the tests hold every backend against."""

import torch


def masked_decay(
    grad: torch.Tensor, weight: torch.Tensor, mask: torch.Tensor, alpha: float
) -> torch.Tensor:
    """grad + alpha * weight where mask is False, computed in fp32 and rounded once, and grad
    elsewhere (SR-STE, arXiv 2102.04010; on gradients in FST, arXiv 2404.01847, section 4.2).
    """
    decayed = (grad.float() + alpha * weight.float()).to(grad.dtype)
    return torch.where(mask, grad, decayed)
