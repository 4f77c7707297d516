"""SLoRB: a sparse weight boosted by a low-rank term (AST, arXiv 2407.20584, section 3.4).

    y = x W~^T + b + (x X^T) S^T        S [out, in / k],  X [in / k, in]

X starts as the indicator of blocks of k consecutive inputs, so that x X^T holds the block sums of
x. If X is trained it becomes dense; a fixed X is neither stored nor multiplied. Merging S X into W~
would lose the 2:4 pattern, so a trained layer ends as a `BoostedLinear`.

A state dict has, besides `weight` and `bias`, `slorb_s`, and `slorb_x` if X was trained.
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
    """Initialise S and X in place for a dense weight [out, in] and its mask.

    `mean`: S holds the sum of each block's pruned weights divided by k, so that W~ + S X has the
    block sums of W. `sum`: k times that. `xavier`: X is random and S zero, so that the layer
    computes with W~ alone.
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
    """A sparse linear with a low-rank term, in plain PyTorch; a trained SLoRB layer becomes one."""

    slorb_s: nn.Parameter
    slorb_x: nn.Parameter | None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        return super().forward(x) + boost(x, self.slorb_s, self.slorb_x)

    def low_rank(self) -> tuple[Tensor | None, Tensor, float]:
        """X [in / k, in] or None for block sums, S^T [in / k, out], and the scale of their term."""
        return self.slorb_x, self.slorb_s.t(), 1.0

    def merged_weight(self) -> Tensor:
        """W~ + S X [out, in], the dense weight that computes the same function."""
        if self.slorb_x is not None:
            return self.weight + self.slorb_s @ self.slorb_x
        k = self.in_features // self.slorb_s.shape[1]
        return self.weight + self.slorb_s.repeat_interleave(k, dim=1)


def attach(model: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    """Add to the linears of a plain `model`, in place, the low-rank terms that `state` has for
    them.

    `state` is the state dict of a finalized model with SLoRB; afterwards `model` can load it.
    """
    modules = dict(model.named_modules())
    for key in state:
        if key.endswith(".slorb_s"):
            name = key.removesuffix(".slorb_s")
            layer = modules.get(name)
            if type(layer) is not nn.Linear:
                continue  # another architecture: loading `state` will raise the error
            layer.__class__ = BoostedLinear
            layer.slorb_s = nn.Parameter(torch.zeros_like(state[key]))
            projection = state.get(f"{name}.slorb_x")
            zeros = None if projection is None else nn.Parameter(torch.zeros_like(projection))
            layer.register_parameter("slorb_x", zeros)
    return model


@torch.no_grad()
def merge(model: nn.Module) -> nn.Module:
    """Turn every `BoostedLinear` into a dense `nn.Linear` that computes the same, in place.

    The 2:4 pattern is lost. This is for tools that support only plain linears.
    """
    for layer in model.modules():
        if isinstance(layer, BoostedLinear):
            layer.weight.copy_(layer.merged_weight())
            del layer.slorb_s, layer.slorb_x
            layer.__class__ = nn.Linear  # type: ignore[assignment]
    return model
