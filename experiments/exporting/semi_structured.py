"""Gives plain models torch's `SparseSemiStructuredTensor` as weights, for inference."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import common_kernels
from common_kernels import check24, pack24
from experiments.support.errors import UserError
from models.packed import layout_for


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
        layout: `cusparselt_sm90` or `cutlass_sm80`; None for one that the device can multiply with.

    Returns:
        The names of the linears.

    Raises:
        ValueError: the device cannot run 2:4 products.
        UserError: no linear is 2:4, or one has a shape that torch does not support.
    """
    if layout is None:
        first = next(model.parameters())
        layout_for(first.device, first.dtype)  # refuses a device without 2:4 products
        ampere = first.is_cuda and torch.cuda.get_device_capability(first.device)[0] == 8
        layout = "cutlass_sm80" if ampere else "cusparselt_sm90"
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
