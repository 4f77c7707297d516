"""Input columns of a weight that stay dense, beside an N:M mask of the others.

PATCH (arXiv 2509.23410) and Spense (arXiv 2606.10445) keep parts of a 2:4 weight dense. Here these
are whole inputs, those with the largest norm over the outputs, chosen once from the dense weight.
The other inputs, in their order, form the groups of m, so that W = [N:M | dense] after a
permutation of its inputs.
"""

import torch
from torch import Tensor

from common_kernels import nm_mask


@torch.no_grad()
def split(weight: Tensor, share: float, m: int) -> tuple[Tensor, Tensor]:
    """The columns of a weight [out, in] that form groups, and those that stay dense, both int64 and
    in their order. Dense are about `share` of all, a multiple of m."""
    inputs = weight.shape[1]
    dense = round(share * inputs / m) * m
    norms = weight.detach().float().norm(dim=0)
    order = norms.argsort(stable=True)  # without a boolean index, which would wait for the device
    return order[: inputs - dense].sort().values, order[inputs - dense :].sort().values


def others(grouped: Tensor, inputs: int) -> Tensor:
    """The columns that are not `grouped`, int64 and in their order."""
    marked = torch.zeros(inputs, dtype=torch.int8, device=grouped.device).index_fill_(0, grouped, 1)
    return marked.argsort(stable=True)[: inputs - len(grouped)]


def partial_mask(scores: Tensor, grouped: Tensor, n: int, m: int) -> Tensor:
    """The mask (bool [out, in]) that keeps, of the `grouped` columns, the n largest scores of each
    m, and all other columns."""
    whole = torch.ones_like(scores, dtype=torch.bool)
    return whole.index_copy_(1, grouped, nm_mask(scores[:, grouped], n, m))
