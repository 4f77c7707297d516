"""Semi-sparse training with torchao's ranking of weights: by signed value, not by magnitude.

`SemiSparseLinear` of torchao (torchao/sparsity/training, removed in 0.19) calls the packing kernel
without naming an algorithm, and has no argument for it. The default, `largest_values_greedy`,
visits a 4x4 tile from the largest signed value down. After a ReLU that is correct, but of weights
it keeps the positive ones and prunes -3 before 0.

Everything except the choice of the mask is as in `methods.semi_sparse`.
"""

from typing import Any

from torch import Tensor

from common_kernels import transposable_mask24

from .. import semi_sparse
from ..nn import base
from ..nn.phases import TransposableLinear
from . import needs

Config = semi_sparse.Config


def ranks(weight: Tensor) -> Tensor:
    """The rank of each weight in its 4x4 tile when sorted by value, fp32 [out, in], from 0 up;
    among equal weights the first has the highest."""
    tiles = weight.unflatten(0, (-1, 4)).unflatten(2, (-1, 4)).transpose(1, 2).flatten(2)
    places = tiles.flip(-1).argsort(dim=-1, stable=True).argsort(dim=-1).flip(-1).float()
    return places.unflatten(2, (4, 4)).transpose(1, 2).reshape(weight.shape)


class Linear(TransposableLinear):
    def choose_mask(self) -> None:
        self.mask.copy_(transposable_mask24(ranks(self.weight.detach()), self.config.algorithm))


class Method(semi_sparse.Method):
    step_work = base.Method.step_work  # an optimizer would choose the masks by magnitude

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        needs(config, "semi_sparse", mode="weight", algorithm="greedy")
        self.Linear = Linear  # type: ignore[misc]
