"""Sparse linears with a low-rank term, in plain PyTorch, as trained layers of SLoPe and AST end."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common_kernels import lowrank_addmm

from . import slorb
from .conversion import become
from .gemms import under_autocast


class SparsePlusLowRank(nn.Linear):
    """SLoPe's adapters: `left` = L^T [r, in] and `right` = R [r, out], with the scale 1 / r."""

    factors = ("left", "right")  # the names of the term's Parameters, in a state dict too
    left: nn.Parameter
    right: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        x = under_autocast(x)
        weight, left, right = (t.to(x.dtype) for t in (self.weight, self.left, self.right))
        return lowrank_addmm(
            F.linear(x, weight), F.linear(x, left), right, self.bias, 1 / len(left)
        )

    def low_rank(self) -> tuple[Tensor | None, Tensor, float]:
        """L^T [r, in] (None for sums of blocks of inputs), R [r, out] and the scale of X L R."""
        return self.left, self.right, 1 / len(self.left)

    def add_term_(self) -> None:
        """Add the term to the weight."""
        self.weight.addmm_(self.right.t(), self.left, alpha=1 / len(self.left))


class BoostedLinear(nn.Linear):
    """SLoRB: `slorb_s` = S [out, in / k], and `slorb_x` = X [in / k, in] if it was trained."""

    factors = ("slorb_s", "slorb_x")
    slorb_s: nn.Parameter
    slorb_x: nn.Parameter | None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        return super().forward(x) + slorb.boost(x, self.slorb_s, self.slorb_x)

    def low_rank(self) -> tuple[Tensor | None, Tensor, float]:
        return self.slorb_x, self.slorb_s.t(), 1.0

    def add_term_(self) -> None:
        if self.slorb_x is not None:
            self.weight += self.slorb_s @ self.slorb_x
        else:
            k = self.in_features // self.slorb_s.shape[1]
            self.weight += self.slorb_s.repeat_interleave(k, dim=1)


# A linear [out, in] with explicit zeros, and a term of low rank.
LowRankLinear = SparsePlusLowRank | BoostedLinear


def attach(model: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    """Add to the linears of a plain `model`, in place, the low-rank terms that `state` has.

    `state` is the state dict of a finalized model; afterwards `model` can load it.
    """
    modules = dict(model.named_modules())
    for key in state:
        name, _, last = key.rpartition(".")
        layer = modules.get(name)
        kinds = [kind for kind in (SparsePlusLowRank, BoostedLinear) if last == kind.factors[0]]
        if not kinds or type(layer) is not nn.Linear:
            continue  # another architecture: loading `state` will raise the error
        become(layer, kinds[0])
        for factor in kinds[0].factors:
            own = state.get(f"{name}.{factor}")
            if own is not None:
                own = nn.Parameter(torch.zeros_like(own, device=layer.weight.device))
            layer.register_parameter(factor, own)
    return model


@torch.no_grad()
def merge(model: nn.Module) -> nn.Module:
    """Turn each linear with a low-rank term, in place, into a dense one that computes the same.

    The N:M pattern is lost. This is for tools that support only plain linears.
    """
    for layer in model.modules():
        if isinstance(layer, LowRankLinear):
            layer.add_term_()
            for name in layer.factors:
                delattr(layer, name)
            become(layer, nn.Linear)
    return model
