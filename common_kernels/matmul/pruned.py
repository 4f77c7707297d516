"""Products with a weight that is pruned, and packed, in the same operator.

Nothing derived from the weight is kept between passes: for weights that are gathered anew in each
pass (FSDP2). It is one operator for the reason that matmul/compressed.py gives.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from common_kernels import backend as backends
from common_kernels import checks
from common_kernels.library import custom_op
from common_kernels.matmul import linear24
from common_kernels.pack import Packed24
from common_kernels.pack.operands import packed_weight, pruned_weight

WHOLE = "whole"  # a source that prunes nothing


def pruned_mm24(
    x: Tensor,
    w: Tensor,
    source: str,
    mask: Tensor | None = None,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype,
    layout: str = "",
    transposed: bool = False,
    backend: str | None = None,
) -> Tensor:
    """x A^T + bias [..., rows], or with `transposed` x A [..., columns], for A [rows, columns]: `w`
    pruned and rounded to `dtype`.

    Args:
        source, mask, scale: as for `pack24_`, or `whole` for a `w` that is only rounded. With
            `transposed` a packed A has a mask that is 2:4 along both dims.
        layout: that in which A is packed; empty for a dense product.
    """
    name = backends.resolve(checks.one_device(x=x, w=w, mask=mask, scale=scale, bias=bias), backend)
    return _pruned_mm24(x, w, source, mask, scale, bias, dtype, layout, transposed, name)


@custom_op("sparse24::pruned_mm24", mutates_args=())
def _pruned_mm24(
    x: Tensor,
    w: Tensor,
    source: str,
    mask: Tensor | None,
    scale: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
    layout: str,
    transposed: bool,
    backend: str,
) -> Tensor:
    if layout:
        buffer = packed_weight(w, source, mask, scale, dtype, layout, transposed, backend)
        rows, columns = w.shape
        shape = (columns, rows) if transposed else (rows, columns)
        return linear24(Packed24(buffer, shape, dtype, layout), x, bias)
    dense = w if source == WHOLE else pruned_weight(w, source, mask, scale, dtype, backend)
    dense = dense.to(dtype).to(x.dtype)
    if transposed:
        return x @ dense
    return F.linear(x, dense, None if bias is None else bias.to(x.dtype))


@_pruned_mm24.register_fake
def _(x, w, source, mask, scale, bias, dtype, layout, transposed, backend):
    return x.new_empty((*x.shape[:-1], w.shape[1 if transposed else 0]))
