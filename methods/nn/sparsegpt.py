"""SparseGPT: 2:4 pruning that repairs what it breaks, from second-order statistics of the inputs.

Frantar and Alistarh, arXiv 2301.00774, sections 3.1 to 3.3. For each row w of a weight the layer's
output error is (w - w')^T H (w - w') with H = X^T X. Columns are visited once, from left to right;
an entry that is removed there passes its error on to the columns on its right by the optimal brain
surgeon's update, whose coefficients are rows of one Cholesky factor of the inverse of H.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common_kernels import nm_mask

# Columns between two updates of everything on the right; it changes the speed alone.
BLOCK = 128


@torch.no_grad()
def prune24(weight: Tensor, hessian: Tensor, damping: float = 0.01) -> tuple[Tensor, Tensor]:
    """The 2:4 mask of a weight and the weight that it leaves.

    When the sweep reaches a group of four, the two entries with the largest w_j^2 / U_jj^2 stay, U
    being the upper Cholesky factor of the inverse Hessian and w the weight as updated so far.

    Args:
        weight: [out, in], in a multiple of 4.
        hessian: [in, in], sum of x x^T over the calibration tokens; its scale is irrelevant.
        damping: added to the diagonal, as a fraction of its mean; above 0 unless the Hessian is
            positive definite.

    Returns:
        mask (bool [out, in]) and the updated weight, zero outside it, in the weight's dtype. The
        sweep is done in fp32 (fp64 for a weight in fp64), the factorisation in fp64.
    """
    w = weight.detach().to(torch.promote_types(weight.dtype, torch.float32), copy=True)
    h = hessian.to(torch.float64, copy=True)
    # A feature that never fires: its weights are free, and go.
    dead = h.diagonal() == 0
    mean = h.diagonal().mean()
    h.diagonal()[dead] = torch.where(mean > 0, mean, 1.0)
    w[:, dead] = 0.0
    h.diagonal().add_(damping * h.diagonal().mean())
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(h))
    u = torch.linalg.cholesky(inverse, upper=True).to(w.dtype)
    mask = torch.ones_like(w, dtype=torch.bool)
    columns = w.shape[1]
    for first in range(0, columns, BLOCK):
        last = min(first + BLOCK, columns)
        errors = torch.zeros_like(w[:, first:last])
        for j in range(first, last):
            if j % 4 == 0:
                group = slice(j, j + 4)
                mask[:, group] = nm_mask((w[:, group] / u.diagonal()[group]).float())
            error = torch.where(mask[:, j], 0.0, w[:, j] / u[j, j])
            w[:, j:last] -= torch.outer(error, u[j, j:last])
            errors[:, j - first] = error
        w[:, last:] -= errors @ u[first:last, last:]
    return mask, torch.where(mask, w, 0.0).to(weight.dtype)
