"""Ternary: 2:4 weights that are -D, 0 or D, and inputs in int8, with straight-through gradients.

    GEMM   operand 1   operand 2   sparse operand, along
    fprop  Q(X)        q           weight, 2:4 along `in` (here a dense product)
    dgrad  dY          q           the same weight; flows to X unchanged
    wgrad  dY          Q(X)        none; flows to W unmasked and unscaled

Sparse-BitNet (arXiv 2603.05168). M keeps the `n` largest magnitudes of `m` consecutive inputs and
is chosen again in every optimizer step, D is the mean magnitude of the whole weight, pruned entries
included, and

    q = D clip(round(W M / D), -1, 1)

so that a kept weight up to D / 2 is zero, too. Q rounds each token to multiples of 1/127 of its
largest magnitude. With `sparse=False` M keeps all: the dense ternary model (BitNet b1.58) with
which 2:4 is compared. Dense products multiply these numbers in the run's dtype; there is no 2:4
product of integers for training here, so that no time is saved. The model ends with q in plain
linears, which do not round their inputs.

The rule is that of the released code (github.com/AAzdi/Sparse-BitNet, llm/arch/model.py), which has
int8 inputs, D of the unmasked weight, and at least 1e-5 for D. There Q, K and V in one weight have
a D each, as gate and up have; here a linear has one.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .nn import base
from .nn.gemms import DENSE, Products
from .nn.linear import MaskedLinear

LEAST = 1e-5  # of D and of a token's largest magnitude, so that zeros stay zeros


@dataclass(frozen=True, kw_only=True)
class Config(base.NMConfig):
    """Options of ternary training.

    sparse: False keeps all weights, for the dense ternary baseline; the model then ends dense.
    activation_bits: 8, or 0 to leave the inputs as they are.
    """

    sparse: bool = True
    activation_bits: int = base.choice(8, (8, 0))


class RoundedTokens(torch.autograd.Function):
    """x [..., in], each token in int8 steps of its largest magnitude; gradients pass through."""

    @staticmethod
    def forward(ctx, x):
        exact = x.float()
        step = exact.abs().amax(-1, keepdim=True).clamp(min=LEAST) / 127
        return ((exact / step).round() * step).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        return grad


class Linear(MaskedLinear):
    """A linear that computes with q.

    State besides `MaskedLinear`'s: `scale` (D, fp32 [], saved).
    """

    config: Config
    scale: Tensor
    rounds_first = False  # D and the choice between zero and D need the unrounded weight
    rows_together = 0  # D is a mean over all rows

    def setup(self, name: str, config: Any, dtype: torch.dtype | None) -> None:
        super().setup(name, config, dtype)
        self.register_buffer("scale", torch.ones((), device=self.weight.device))

    def sparse_products(self) -> Products:
        return DENSE

    def choose_mask(self) -> None:
        if self.config.sparse:
            super().choose_mask()
        else:
            self.mask.fill_(True)

    @torch.no_grad()
    def update_buffers(self) -> None:
        self.scale.copy_(self.weight.float().abs().mean().clamp(min=LEAST))

    def effective_weight(self) -> Tensor:
        kept = torch.where(self.mask, self.weight.detach().float(), 0.0)
        return (self.scale * (kept / self.scale).round().clamp(-1, 1)).to(self.weight.dtype)

    def checked_input(self, x: Tensor) -> Tensor:
        x = super().checked_input(x)
        return RoundedTokens.apply(x) if self.config.activation_bits else x


class Method(base.Method):
    Config = Config
    Linear = Linear

    @property
    def capabilities(self) -> base.Capabilities:
        config = self.config
        own = replace(super().capabilities, ends_dense=not config.sparse)
        return replace(own, changes_only_weights=not config.activation_bits)

    def phase(self) -> str:
        return "sparse" if self.config.sparse else "dense"

    def finetuning(self, total_steps: int) -> base.Config:
        """The same config: weights stay ternary, and masks follow them."""
        return replace(self.config, total_steps=total_steps)
