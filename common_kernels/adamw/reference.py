"""One step of AdamW with masked decay by definition: what the tests hold every backend against."""

import torch


def adamw(
    weight: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    step: int,
    mask: torch.Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    alpha: float = 0.0,
    grad_scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weight and moments after step number `step` (1 for the first), in fp64. The gradient is
    divided by `grad_scale`, gains alpha * weight where mask is False (SR-STE, arXiv 2102.04010;
    FST, arXiv 2404.01847) and goes through AdamW (arXiv 1711.05101) as in torch."""
    w, g, m, v = (t.double() for t in (weight, grad, exp_avg, exp_avg_sq))
    beta1, beta2 = betas
    g = g / grad_scale
    g = torch.where(mask, g, g + alpha * w)
    w = w - lr * weight_decay * w
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    m_hat, v_hat = m / (1 - beta1**step), v / (1 - beta2**step)
    return w - lr * m_hat / (v_hat.sqrt() + eps), m, v
