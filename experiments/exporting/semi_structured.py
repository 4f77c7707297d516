"""Gives plain models torch's `SparseSemiStructuredTensor` as weights, for inference."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import common_kernels
from common_kernels import check24, pack24
from common_kernels.matmul import unavailable
from experiments.support.errors import UserError


def semi_structured_layout(device: torch.device, dtype: torch.dtype) -> str:
    """The layout of packed 2:4 weights that `device` can multiply with.

    Raises:
        UserError: it can run none, and why.
    """
    backends = {"cusparselt": "cusparselt_sm90", "cutlass": "cutlass_sm80"}
    reasons = {name: unavailable(name, device, dtype) for name in backends}
    for name, layout in backends.items():
        if reasons[name] is None:
            return layout
    raise UserError(f"no 2:4 products here: {'; '.join(str(r) for r in reasons.values())}")


class SemiStructuredLinear(nn.Linear):
    """`nn.Linear` with a `SparseSemiStructuredTensor` as its weight, for inputs of any strides.

    torch's class only multiplies two matrices. For a batch that is not contiguous torch would
    expand the weight, which the class does not support.
    """

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        y = F.linear(x.reshape(-1, self.in_features), self.weight, self.bias)
        return y.reshape(*x.shape[:-1], self.out_features)


@torch.no_grad()
def to_semi_structured(model: nn.Module, layout: str | None = None) -> list[str]:
    """Replace the weights of a plain model's 2:4 linears by torch's `SparseSemiStructuredTensor`,
    in place, for inference. The values are unchanged.

    Args:
        model: on its device, in bf16 or fp16. Linears that are not 2:4 stay dense.
        layout: a layout of `Packed24`; None for one that the device can multiply with.
    Returns:
        The names of the linears.
    Raises:
        UserError: the device cannot run 2:4 products, no linear is 2:4, or one has a shape that
            torch does not support.
    """
    first = next(model.parameters())
    layout = layout or semi_structured_layout(first.device, first.dtype)
    linears = {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and module.in_features % 4 == 0
        and int(check24(module.weight)) == 0
    }
    if not linears:
        raise UserError("no linear of this model is 2:4, so there is nothing to pack")
    for name, module in linears.items():
        try:
            packed = pack24(module.weight, module.weight != 0, layout)
            tensor = common_kernels.to_semi_structured(packed)
        except ValueError as error:
            raise UserError(f"{name} cannot be packed: {error}") from error
        module.weight = nn.Parameter(tensor, requires_grad=False)
        module.__class__ = SemiStructuredLinear
    return list(linears)
