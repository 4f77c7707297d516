"""Finds the input columns of a finished weight that stayed dense beside 2:4 ones.

Training with `dense_columns` leaves W P = [2:4 | dense], P a permutation: the columns that are not
dense, in their order, form groups of four. A finished model is plain, so which ones these are is
read off its zeros. Any division whose first part is 2:4 gives the same product.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from common_kernels import check24
from common_kernels.decode import COLUMNS
from models.linears import has_24, is_linear, matrix_of

Division = tuple[Tensor, Tensor]  # the columns of a weight that are 2:4, and the dense ones
FULL = 1 / 8  # a column with at most this share of zeros may be dense
WIDTH = 32  # the number of divisions that are followed at once


def linears_and_divisions(model: nn.Module) -> tuple[dict[str, nn.Module], dict[str, Division]]:
    """The linears of a model that are 2:4, with or without dense columns beside, by name, and the
    divisions of those that have them. Raises ValueError if no linear is 2:4."""
    linears: dict[str, nn.Module] = {}
    divisions: dict[str, Division] = {}
    modules: Any = model.named_modules()
    for name, module in modules:
        if not is_linear(module) or module.weight.is_meta:
            continue
        if has_24(module):
            linears[name] = module
        elif (division := divide(matrix_of(module))) is not None:
            linears[name], divisions[name] = module, division
    if not linears:
        held = (m for m in model.modules() if isinstance(m, nn.Linear) and has_24(m))
        others = sorted({type(m).__name__ for m in held})
        why = f": its 2:4 weights are in {', '.join(others)}" if others else ""
        raise ValueError(
            f"no plain linear of this model is 2:4{why} (after training with a method, call "
            "method.finalize(model) first; fst ends dense)"
        )
    return linears, divisions


@torch.no_grad()
def divide(matrix: Tensor) -> Division | None:
    """The columns of a matrix [out, in], which is not 2:4, that are 2:4 without the others, and the
    others, both int64 and in their order. The first are as many as the kernels can take, a multiple
    of `COLUMNS`, so that up to 15 groups are among the others. None if there are no such columns.
    """
    kept = matrix != 0
    zeros = len(matrix) - kept.sum(0)
    if 2 * int(zeros.sum()) < COLUMNS * len(matrix):  # so many groups have more
        return None
    dense = zeros == 0
    grouped = matrix[:, ~dense]
    if grouped.shape[1] % 4 or int(check24(grouped)):
        # A column of the groups may have no zero, and a dense one some.
        dense = _dense_columns(kept, zeros <= FULL * len(matrix)).to(matrix.device)
    order = dense.long().argsort(stable=True)
    count = int((~dense).sum()) // COLUMNS * COLUMNS
    return (order[:count], order[count:].sort().values) if count else None


def _dense_columns(kept: Tensor, full: Tensor) -> Tensor:
    """The fewest columns (bool [in]) among the `full` ones without which a matrix is 2:4; all
    columns if none are found. kept: where it is not zero, bool [out, in].

    From left to right, each column joins the group that is being filled or, if it is full, is
    dense. What matters of the columns so far is that group: how many columns it has, and which rows
    keep one and two of them. Of the ways to a group the one with fewest dense columns is followed.
    """
    bits = np.packbits(kept.t().cpu().numpy(), axis=1)
    ways: dict[Any, Any] = {(0, 0, 0): (0, None)}
    for i, may_be_dense in enumerate(full.tolist()):
        column, new = int.from_bytes(bits[i].tobytes()), dict[Any, Any]()
        for group, (count, dense) in ways.items():
            size, ones, twos = group
            options = []
            if not twos & column:
                joined = (size + 1, ones | column, twos | (ones & column))
                options.append(((0, 0, 0) if size == 3 else joined, (count, dense)))
            if may_be_dense:
                options.append((group, (count + 1, (i, dense))))
            for key, way in options:
                if key not in new or way[0] < new[key][0]:
                    new[key] = way
        ranked = sorted(new.items(), key=lambda item: (item[1][0] + item[0][0], item[0][0]))
        ways = dict(ranked[:WIDTH])
    if (0, 0, 0) not in ways:
        return torch.ones(len(bits), dtype=torch.bool)
    found, (_, dense) = torch.zeros(len(bits), dtype=torch.bool), ways[0, 0, 0]
    while dense is not None:
        i, dense = dense
        found[i] = True
    return found
