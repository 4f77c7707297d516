"""AST whose decay has the wrong sign because of an integer mask, so that weights grow.

The released GPT-2 code (github.com/thu-ml/Adaptive-Sparse-Trainer) holds masks as int32
(`new_mask.int()`, sparse_modeling.py) and selects pruned weights with `~p.mask` (adamw.py). For
integers `~` is the bitwise complement: -1 where the mask is 0 and -2 where it is 1. So instead of

    u = m + lambda (1 - M) W    it computes    u = m - lambda (1 + M) W

and the step along -u enlarges pruned weights by as much as it should shrink them, and kept ones by
twice that. The second moment uses this u. Everything else is as in `methods.ast`.
"""

from typing import Any

import torch
from torch import Tensor

from .. import ast
from . import needs

Config = ast.Config


class AdamW(ast.AdamW):
    def decay_of(self, weight: Tensor, mask: Tensor) -> Tensor:
        return self.decay * (weight * torch.where(mask, -2.0, -1.0))


class Method(ast.Method):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        needs(config, "ast", decay_route="decoupled_first_moment")

    def optimizer(self, groups: Any, **options: Any) -> torch.optim.Optimizer:
        return AdamW(groups, **options)
