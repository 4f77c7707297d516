"""Masked decay in Triton, bit for bit that of naive.py."""

import torch
import triton
import triton.language as tl

from common_kernels import chunks
from common_kernels.launch import cast, launch

BLOCK = 4096


def masked_decay_(
    grad: torch.Tensor, weight: torch.Tensor, mask: torch.Tensor, alpha: float
) -> None:
    if not alpha or grad.numel() == 0:
        return
    order = chunks.memory_order(grad)
    if not grad.permute(order).is_contiguous():
        update = grad.clone()
        masked_decay_(update, weight, mask, alpha)
        grad.copy_(update)
        return
    # The others in the memory order of grad: views unless they are laid out differently.
    grad, weight, mask = (t.permute(order).contiguous() for t in (grad, weight, mask))
    launch(
        decay_kernel, triton.cdiv(grad.numel(), BLOCK), grad.device,
        grad, weight, mask.view(torch.uint8), alpha, grad.numel(), BLOCK=BLOCK,
    )  # fmt: skip


@triton.jit
def decay_kernel(grad, weight, mask, alpha, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    pruned = (tl.load(mask + at, mask=at < size, other=1) == 0) & (at < size)
    decay = alpha * tl.load(weight + at, mask=pruned, other=0).to(tl.float32)
    total = tl.load(grad + at, mask=pruned, other=0).to(tl.float32) + decay
    tl.store(grad + at, cast(total, grad.dtype.element_ty), mask=pruned)
