"""The check that a finished model is 2:4."""

import torch
from torch import nn

from common_kernels import check_nm

from . import matrices
from .conversion import as_globs, every_matrix, is_conv1d, is_linear, some_names
from .dtensors import rows_of
from .linear import SparseLinear


class Check(dict[str, bool]):
    """The finding for each linear, n:m along its inputs or not, by name. It is printed as two
    lines, and a third one names the linears in `all_zero`, which are n:m because they are empty."""

    pattern = "2:4"
    all_zero: tuple[str, ...] = ()

    def __str__(self) -> str:
        holding = [name for name, holds in self.items() if holds]
        others = [name for name, holds in self.items() if not holds]
        kinds = {self.pattern: holding, f"not {self.pattern}": others}
        if self.all_zero:
            kinds[f"of the {self.pattern} all zero"] = [*self.all_zero]
        mixed = {*as_globs(holding)} & {*as_globs(others)}  # say nothing; their names do
        return "\n".join(
            f"{len(names)} {kind}: {some_names(as_globs(names, mixed)) or 'none'}"
            for kind, names in kinds.items()
        )


@torch.no_grad()
def check(model: nn.Module, n: int = 2, m: int = 4) -> Check:
    """Say of each linear of a plain model (`nn.Linear`, transformers' `Conv1D`, and weights that a
    module multiplies itself, as of experts) whether at most n of m consecutive inputs are not zero.
    Call it after `finalize`, after adapters were merged, or on a model that was loaded. Of sharded
    weights it looks at this rank's rows. Raises ValueError if a layer is still converted."""
    found = Check()
    found.pattern = f"{n}:{m}"
    for name, module, attribute in every_matrix(model):
        if isinstance(module, SparseLinear):
            raise ValueError(f"{name} is still converted: call method.finalize(model) first")
        linear = is_linear(module) and attribute == "weight"
        if linear or matrices.multiplies(module, attribute):
            weight = rows_of(getattr(module, attribute))
            weight = weight.t() if is_conv1d(module) else weight
            found[name] = weight.shape[-1] % m == 0 and not check_nm(weight, n, m)
            if found[name] and not weight.any():
                found.all_zero += (name,)
    return found
