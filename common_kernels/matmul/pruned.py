"""Products with a weight that is pruned, or packed, in the same operator.

It is one operator because the packing does not depend on x: torch.compile would otherwise move it
into the forward pass and keep the packed operands of all layers until the backward pass.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from common_kernels import backend as backends
from common_kernels import checks
from common_kernels.library import custom_op
from common_kernels.matmul import linear24
from common_kernels.pack import BUFFERED, Packed24
from common_kernels.pack.compressed import packed_one
from common_kernels.pack.operands import packed_weight, pruned_weight

WHOLE = "whole"  # a source that prunes nothing


@custom_op("sparse24::pruned_mm24", mutates_args=())
def pruned_mm24(
    x: Tensor,
    w: Tensor,
    source: str,
    mask: Tensor | None = None,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    layout: str = "",
    transposed: bool = False,
    backend: str | None = None,
) -> Tensor:
    """x A^T + bias [..., rows], or with `transposed` x A [..., columns], for A [rows, columns]: `w`
    pruned and rounded to `dtype` (default: x's). Nothing derived from it is kept: for weights that
    are gathered anew in each pass (FSDP2).

    Args:
        source, mask, scale: as for `pack24_`, or `whole` for a `w` that is only rounded. With
            `transposed` a packed A has a mask that is 2:4 along both dims.
        layout: that in which A is packed; empty for a dense product.
    """
    name = backends.resolve(checks.one_device(x=x, w=w, mask=mask, scale=scale, bias=bias), backend)
    dtype = dtype or x.dtype
    if layout:
        buffer = packed_weight(w, source, mask, scale, dtype, layout, transposed, name)
        rows, columns = w.shape
        shape = (columns, rows) if transposed else (rows, columns)
        return linear24(Packed24(buffer, shape, dtype, layout), x, bias)
    dense = w if source == WHOLE else pruned_weight(w, source, mask, scale, dtype, name)
    dense = dense.to(dtype).to(x.dtype)
    if transposed:
        return x @ dense
    return F.linear(x, dense, None if bias is None else bias.to(x.dtype))


@pruned_mm24.register_fake
def _(x, w, source, mask=None, scale=None, bias=None, dtype=None, layout="", transposed=False, *_):
    checks.one_device(x=x, w=w, mask=mask, scale=scale, bias=bias)
    return x.new_empty((*x.shape[:-1], w.shape[1 if transposed else 0]))


@custom_op("sparse24::compressed_mm24", mutates_args=())
def compressed_mm24(
    x: Tensor,
    values: Tensor,
    row_mask: Tensor,
    column_mask: Tensor | None = None,
    bias: Tensor | None = None,
    layout: str = BUFFERED,
    backend: str | None = None,
) -> Tensor:
    """SLoPe's fprop, x (W * A)^T + bias [..., rows], or with a column mask its dgrad, x (W * A * B)
    [..., columns]: `linear24` with the operand that `prune_and_pack24_` would write, whose memory
    is freed when this returns.

    Args:
        x: a 16-bit tensor.
        values, row_mask, column_mask: W [rows, columns] under A and B, as in `Compressed24`.
        layout: the layout of the packed operand.
    """
    masks = {"row_mask": row_mask, "column_mask": column_mask}
    name = backends.resolve(checks.one_device(x=x, values=values, **masks, bias=bias), backend)
    buffer = packed_one(values, row_mask, column_mask, x.dtype, layout, name)
    return linear24(Packed24(buffer, _shape(values, column_mask), x.dtype, layout), x, bias)


@compressed_mm24.register_fake
def _(x, values, row_mask, column_mask=None, bias=None, *_):
    masks = {"row_mask": row_mask, "column_mask": column_mask}
    checks.one_device(x=x, values=values, **masks, bias=bias)
    return x.new_empty((*x.shape[:-1], _shape(values, column_mask)[0]))


def _shape(values: Tensor, column_mask: Tensor | None) -> tuple[int, int]:
    """The shape of the operand."""
    rows, columns = len(values), 2 * values.shape[1]
    return (rows, columns) if column_mask is None else (columns, rows)
