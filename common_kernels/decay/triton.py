"""Masked decay in Triton, bit for bit that of cpu.py."""

import torch
import triton
import triton.language as tl

from common_kernels import layout
from common_kernels.launch import cast, launch

BLOCK = 4096


def masked_decay_(
    grad: torch.Tensor, weight: torch.Tensor, mask: torch.Tensor, alpha: float
) -> None:
    if not alpha or grad.numel() == 0:
        return
    order = layout.memory_order(grad)
    if not grad.permute(order).is_contiguous():
        update = grad.clone()
        masked_decay_(update, weight, mask, alpha)
        grad.copy_(update)
        return
    # Put all three in grad's memory order; this copies only a tensor of another layout.
    grad, weight, mask = (t.permute(order).contiguous() for t in (grad, weight, mask))
    launch(
        decay_kernel, triton.cdiv(grad.numel(), BLOCK), grad.device,
        grad, weight, mask.view(torch.uint8), alpha, grad.numel(), BLOCK=BLOCK,
    )  # fmt: skip


@triton.jit
def decay_kernel(grad, weight, mask, alpha, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # Memory moves in whole lines whatever the mask says, so every lane loads and stores.
    g = tl.load(grad + at, mask=at < size, other=0)
    decay = alpha * tl.load(weight + at, mask=at < size, other=0).to(tl.float32)
    total = cast(g.to(tl.float32) + decay, g.dtype)
    kept = tl.load(mask + at, mask=at < size, other=1) != 0
    tl.store(grad + at, tl.where(kept, g, total), mask=at < size)
