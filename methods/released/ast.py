"""AST with the decay's sign as an integer mask makes it: all weights of a sparse layer grow.

The released GPT-2 code (github.com/thu-ml/Adaptive-Sparse-Trainer) holds masks as int32
(`new_mask.int()`, sparse_modeling.py) and means the pruned weights by `~p.mask` (adamw.py). Of
integers that is the bitwise complement: -1 where the mask is 0 and -2 where it is 1. So in place of

    u = m + lambda (1 - M) W    it computes    u = m - lambda (1 + M) W

and the step along -u enlarges pruned weights by as much as it should shrink them, and kept ones by
twice that. The second moment follows this u. All else is that of `methods.ast`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import ast

Config = ast.Config


class AdamW(ast.AdamW):
    def decay_of(self, weight: Tensor, mask: Tensor) -> Tensor:
        return self.decay * (weight * torch.where(mask, -2.0, -1.0))


class Method(ast.Method):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if not self.needs_adamw:
            raise ValueError(
                f"decay_route={config.decay_route}; released.ast is about the optimizer of "
                "decay_route=decoupled_first_moment"
            )

    def optimizer(self, groups: Any, **options: Any) -> torch.optim.Optimizer:
        options.pop("fused", None)  # a matter of speed alone
        return AdamW(groups, **options)
