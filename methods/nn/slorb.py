"""SLoRB: a sparse weight boosted by a low-rank term (AST, arXiv 2407.20584, section 3.4).

    y = x W~^T + b + (x X^T) S^T        S [out, in / k],  X [in / k, in]

X starts as the indicator of blocks of k consecutive inputs, so that x X^T holds the block sums of
x. If X is trained it becomes dense; a fixed X is neither stored nor multiplied. Merging S X into W~
would lose the 2:4 pattern, so a trained layer ends as a `lowrank.BoostedLinear`.

A state dict has, besides `weight` and `bias`, `slorb_s`, and `slorb_x` if X was trained.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def boost(x: Tensor, s: Tensor, projection: Tensor | None) -> Tensor:
    """(x X^T) S^T for x [..., in]; without a projection X is the indicator."""
    if projection is not None:
        return F.linear(F.linear(x, projection), s)
    return F.linear(x.unflatten(-1, (s.shape[1], -1)).sum(-1), s)


@torch.no_grad()
def initialize(weight: Tensor, mask: Tensor, s: Tensor, projection: Tensor | None) -> None:
    """Initialise S and X in place for a dense weight [out, in] and its mask: S holds the sum of
    each block's pruned weights divided by k, so that W~ + S X has the block sums of W."""
    blocks = s.shape[1]
    k = weight.shape[1] // blocks
    if projection is not None:
        projection.copy_(torch.eye(blocks).repeat_interleave(k, dim=1))
    pruned = torch.where(mask, 0.0, weight.float()).unflatten(1, (blocks, k)).sum(-1)
    s.copy_(pruned / k)
