"""The image encoder of SAM, which torchao's benchmark calls ViT-L.

Its script (benchmarks/benchmark_semi_sparse_training.py of pytorch/ao, removed in August 2026)
takes `image_encoder` of segment-anything-fast on 8 x 3 x 1024 x 1024 random pixels, all in fp16:
forward, backward from a random gradient down to the pixels, no optimizer. Here it is timm's,
without trained weights.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.bench import arms
from experiments.bench.arms import Converted

# max-autotune without its two slowest parts, which would take minutes: kernels that inductor
# writes are tuned, products stay with cuBLAS. CUDA graphs come from experiments.bench.timing.
COMPILED = {"max_autotune": True, "max_autotune_gemm_backends": "ATEN"}


def encoder(name: str, **changed: Any) -> nn.Module:
    """timm's model `name` up to its neck: images [B, 3, S, S] to features [B, 256, S/16, S/16].

    changed: arguments of the model in place of timm's.
    """
    import timm

    model: Any = timm.create_model(name, num_classes=0, global_pool="", **changed)
    for block in model.blocks:
        block.attn = Attention(block.attn)
    return model


class Attention(nn.Module):
    """timm's attention with relative positions, in a form that a GPU has fused kernels for.

    timm hands batch and heads as one dim to torch, which then falls back to products in fp32, and
    makes its indices on the CPU in every call, which no CUDA graph can hold. The original has
    neither.
    """

    index: Tensor

    def __init__(self, of: Any) -> None:
        super().__init__()
        self.heads: int = of.num_heads
        self.qkv, self.proj = of.qkv, of.proj
        self.rel_pos_h, self.rel_pos_w = of.rel_pos_h, of.rel_pos_w
        size = (len(self.rel_pos_h) + 1) // 2
        at = torch.arange(size, device=self.rel_pos_h.device)
        self.register_buffer("index", at[:, None] - at + size - 1, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, H, W, C] -> the same; H = W, the side for which the positions are."""
        batch, height, width, _ = x.shape
        tokens = height * width
        qkv = self.qkv(x).view(batch, tokens, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        grid = q.reshape(batch, self.heads, height, width, -1)
        rows = torch.einsum("bnhwc,hkc->bnhwk", grid, self.rel_pos_h[self.index])
        columns = torch.einsum("bnhwc,wkc->bnhwk", grid, self.rel_pos_w[self.index])
        bias = rows[..., :, None] + columns[..., None, :]
        bias = bias.reshape(batch, self.heads, tokens, tokens)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.proj(y.transpose(1, 2).reshape(x.shape))


class Arm:
    """The encoder under a method, and its step: forward and backward with the method's hooks.

    bytes: of what it holds between steps.
    """

    def __init__(self, name: str, converted: Converted, images: Tensor, gradient: Tensor) -> None:
        self.name, self.converted, self.model = name, converted, converted.model
        self.images, self.gradient = images, gradient
        self.bytes = 0

    def step(self, _: int = 0) -> None:
        self.clear()
        self.converted.before(0)
        self.model(self.images).backward(self.gradient)
        self.converted.after(0)

    def clear(self) -> None:
        """Drop the gradients."""
        self.images.grad = None
        self.model.zero_grad()

    def compile(self, **how: Any) -> None:
        """Compile the blocks, which share their code; UserError if gradients come out otherwise.

        how: arguments of torch.compile; none = as `COMPILED` says.
        """
        self.step()
        want = self.gradients()
        for block in self.model.blocks:  # type: ignore[union-attr]
            block.compile(fullgraph=True, **(how or {"options": COMPILED}))
        with arms.compiling():
            self.step()
        arms.check_same(self.name, self.gradients(), want)
        self.clear()

    def gradients(self) -> list[Tensor | None]:
        return [self.images.grad, *(p.grad for p in self.model.parameters())]

    def peak(self, others: int) -> int:
        """Bytes that torch allocated for a step at its peak, beside those that others hold."""
        torch.cuda.reset_peak_memory_stats()
        self.step()
        self.clear()
        return torch.cuda.max_memory_allocated() - others
