"""SLoRB: a sparse weight boosted by a low-rank term (AST, arXiv 2407.20584, section 3.4).

    y = x W~^T + b + (x X^T) S^T        S [out, in / k],  X [in / k, in]

X starts as the indicator of blocks of k consecutive inputs, so that x X^T holds their sums. As a
trained matrix it becomes dense; fixed, it is neither stored nor multiplied with. S X cannot be
merged into W~ without losing its 2:4 pattern: a trained layer ends as a `BoostedLinear`.

Names in a state dict, beside `weight` and `bias`: `slorb_s`, and `slorb_x` where X was trained.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INITS = ("mean", "sum", "xavier")


def check(in_features: int, k: int) -> None:
    """Raise ValueError if blocks of k do not divide the inputs of a linear."""
    if in_features % k:
        raise ValueError(f"slorb_k={k} does not divide its {in_features} inputs; choose another k")


def indicator(in_features: int, k: int) -> Tensor:
    """X_ij = 1 where i k <= j < (i + 1) k, else 0: [in / k, in]."""
    return torch.eye(in_features // k).repeat_interleave(k, dim=1)


def boost(x: Tensor, s: Tensor, projection: Tensor | None) -> Tensor:
    """(x X^T) S^T for x [..., in]; without a projection X is the indicator."""
    if projection is not None:
        return F.linear(F.linear(x, projection), s)
    return F.linear(x.unflatten(-1, (s.shape[1], -1)).sum(-1), s)


@torch.no_grad()
def initialize(
    weight: Tensor,
    mask: Tensor,
    s: Tensor,
    projection: Tensor | None,
    init: str,
    generator: torch.Generator,
) -> None:
    """Fill S and X for a dense weight [out, in] and its mask, in place.

    `mean`: S holds the pruned sum of each block over k, so that W~ + S X keeps the block sums of
    W. `sum`: k times that. `xavier`: X random and S zero, the function of W~ alone.
    """
    blocks = s.shape[1]
    k = weight.shape[1] // blocks
    if projection is not None:
        projection.copy_(indicator(weight.shape[1], k))
    if init == "xavier":
        assert projection is not None
        drawn = torch.empty(projection.shape)
        nn.init.xavier_uniform_(drawn, generator=generator)
        projection.copy_(drawn)
        s.zero_()
        return
    pruned = torch.where(mask, 0.0, weight.float()).unflatten(1, (blocks, k)).sum(-1)
    s.copy_(pruned if init == "sum" else pruned / k)


class BoostedLinear(nn.Linear):
    """A sparse linear with its low-rank term, as a trained SLoRB layer is left: plain PyTorch."""

    slorb_s: nn.Parameter
    slorb_x: nn.Parameter | None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        return super().forward(x) + boost(x, self.slorb_s, self.slorb_x)

    def merged_weight(self) -> Tensor:
        """W~ + S X, [out, in]: one dense weight for the same function."""
        if self.slorb_x is not None:
            return self.weight + self.slorb_s @ self.slorb_x
        k = self.in_features // self.slorb_s.shape[1]
        return self.weight + self.slorb_s.repeat_interleave(k, dim=1)


def attach(model: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    """Give the linears of a plain `model` the low-rank terms that they have in `state`, in place.

    `state` was saved from a finished model with SLoRB; afterwards it fits `model`.
    """
    modules = dict(model.named_modules())
    for key in state:
        if key.endswith(".slorb_s"):
            name = key.removesuffix(".slorb_s")
            layer = modules.get(name)
            if type(layer) is not nn.Linear:
                continue  # another architecture, as loading `state` will tell
            layer.__class__ = BoostedLinear
            layer.slorb_s = nn.Parameter(torch.zeros_like(state[key]))
            projection = state.get(f"{name}.slorb_x")
            zeros = None if projection is None else nn.Parameter(torch.zeros_like(projection))
            layer.register_parameter("slorb_x", zeros)
    return model


@torch.no_grad()
def merge(model: nn.Module) -> nn.Module:
    """Turn every `BoostedLinear` into a dense `nn.Linear` of the same function, in place.

    The 2:4 pattern is lost; it is for tools that know nothing but plain linears.
    """
    for layer in model.modules():
        if isinstance(layer, BoostedLinear):
            layer.weight.copy_(layer.merged_weight())
            del layer.slorb_s, layer.slorb_x
            layer.__class__ = nn.Linear  # type: ignore[assignment]
    return model
