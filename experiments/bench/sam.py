"""The image encoder of SAM, which torchao's benchmark of 2:4 training calls ViT-L."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

PATCH = 16  # side of a patch in pixels
# The only fused attention that gives the gradient of a bias; torch may prefer others on some GPUs.
ATTENTION = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def encoder(name: str, **changed: Any) -> nn.Module:
    """timm's model `name` up to its neck: images [B, 3, S, S] to features [B, 256, S/16, S/16].

    changed: arguments of the model that replace timm's.
    """
    import timm

    model: Any = timm.create_model(name, num_classes=0, global_pool="", **changed)
    for block in model.blocks:
        block.attn = Attention(block.attn)
    return model


class Attention(nn.Module):
    """timm's attention with relative positions, in a form for which a GPU has fused kernels.

    timm passes batch and heads to torch as one dim, for which torch falls back to fp32 products,
    and creates indices on the CPU in every call, which CUDA graphs cannot capture. SAM's original
    code does neither.
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
        """x [B, H, W, C] -> [B, H, W, C]; H = W, the side that the position embeddings are for."""
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
