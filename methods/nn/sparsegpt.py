"""SparseGPT: N:M pruning that updates the kept weights, from second-order statistics of inputs.

Frantar and Alistarh, arXiv 2301.00774, sections 3.1 to 3.3. For each row w of a weight the layer's
output error is (w - w')^T H (w - w') with H = X^T X. Columns are visited once, from left to right.
The error of a removed entry is compensated in the columns on its right by the optimal brain surgeon
update, whose coefficients are rows of one Cholesky factor of the inverse of H.
"""

import torch
from torch import Tensor

from common_kernels import nm_mask

# Columns between two updates of all columns on the right; it changes only the speed.
BLOCK = 128


@torch.no_grad()
def prune(
    weight: Tensor,
    hessian: Tensor,
    damping: float = 0.01,
    n: int = 2,
    m: int = 4,
    grouped: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The N:M mask of a weight, and the pruned and updated weight.

    In each group of m the n entries with the largest w_j^2 / U_jj^2 are kept, where U is the
    upper Cholesky factor of the inverse Hessian and w the weight as updated so far.

    Args:
        weight: [out, in], with `in` a multiple of m.
        hessian: [in, in], sum of x x^T over the calibration tokens; its scale is irrelevant.
        damping: added to the diagonal, as a fraction of its mean; above 0 unless the Hessian is
            positive definite.
        grouped: the number of columns that are pruned, a multiple of m; the others, on their right,
            stay dense and are updated.

    Returns:
        The mask (bool [out, in]) and the updated weight in the weight's dtype, zero outside the
        mask. The sweep is in fp32 (fp64 for an fp64 weight), the factorisation in fp64.
    """
    w = weight.detach().to(torch.promote_types(weight.dtype, torch.float32), copy=True)
    h = hessian.to(torch.float64, copy=True)
    # An input feature that is always zero: its weights have no effect and are removed.
    dead = h.diagonal() == 0
    mean = h.diagonal().mean()
    h.diagonal()[dead] = torch.where(mean > 0, mean, 1.0)
    w[:, dead] = 0.0
    h.diagonal().add_(damping * h.diagonal().mean())
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(h))
    u = torch.linalg.cholesky(inverse, upper=True).to(w.dtype)
    mask = torch.ones_like(w, dtype=torch.bool)
    columns = w.shape[1] if grouped is None else grouped
    block = BLOCK // m * m
    for first in range(0, columns, block):
        last = min(first + block, columns)
        errors = torch.zeros_like(w[:, first:last])
        for j in range(first, last):
            if j % m == 0:
                group = slice(j, j + m)
                mask[:, group] = nm_mask((w[:, group] / u.diagonal()[group]).float(), n, m)
            error = torch.where(mask[:, j], 0.0, w[:, j] / u[j, j])
            w[:, j:last] -= torch.outer(error, u[j, j:last])
            errors[:, j - first] = error
        w[:, last:] -= errors @ u[first:last, last:]
    return mask, torch.where(mask, w, 0.0).to(weight.dtype)
