"""STE: hard 2:4 magnitude pruning with a straight-through gradient.

    GEMM   operand 1   operand 2     sparse operand, along
    Y      X           W * M         weight, 2:4 along `in`
    dX     dY          W * M         the same weight (2:4 along `in`: a dense product on hardware)
    dW     dY          X             none; flows to W unmasked

M keeps the two largest magnitudes of four consecutive inputs and is chosen again in every
optimizer step. The model ends 2:4 sparse. The baseline "hard threshold" of S-STE.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from common_kernels import nm_mask
from common_kernels.prepare import prune_pack24_

from . import base
from .gemms import Products


class Config(base.Config):
    """No options beyond those of every method."""


class Linear(base.SparseLinear):
    """State beyond the base class: `mask` (bool [out, in]), saved."""

    mask: Tensor

    def setup(self, name: str, config: Any, dtype: torch.dtype | None) -> None:
        super().setup(name, config, dtype)
        self.register_buffer("mask", torch.zeros_like(self.weight, dtype=torch.bool))

    def sparse_products(self) -> Products:
        return replace(super().sparse_products(), forward=True)

    def current_mask(self) -> Tensor:
        return self.mask

    def refresh_mask(self) -> None:
        self.mask.copy_(nm_mask(self.weight.detach()))

    def effective_weight(self) -> Tensor:
        return torch.where(self.mask, self.weight.detach(), 0.0)

    def pack(self) -> None:
        assert self.packed is not None
        prune_pack24_(self.packed, self.weight.detach(), "mask", self.mask, dense=self.operand)


class Method(base.Method):
    Config = Config
    Linear = Linear
