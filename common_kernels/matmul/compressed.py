"""SLoPe's fprop and dgrad products, with the weight packed in the same operator."""

from __future__ import annotations

from torch import Tensor

from common_kernels import backend as backends
from common_kernels import checks
from common_kernels.library import custom_op
from common_kernels.matmul import linear24
from common_kernels.pack import BUFFERED, Packed24
from common_kernels.pack.compressed import packed_one


def twice_pruned_mm24(
    x: Tensor,
    values: Tensor,
    row_mask: Tensor,
    column_mask: Tensor,
    *,
    layout: str = BUFFERED,
    backend: str | None = None,
) -> Tensor:
    """x [tokens, rows] (W * A * B), of shape [tokens, columns], in one operator: `linear24` with
    the operand that `prune_and_pack24_` would write, whose memory is freed when this returns.

    It is one operator because the packing does not depend on x: torch.compile would otherwise move
    it into the forward pass and keep the packed operands of all layers until the backward pass.

    Args:
        x: a 16-bit tensor.
        values, row_mask, column_mask: W [rows, columns] under the masks A and B, as in
            `Compressed24`.
        layout: the layout of the packed operand.
    """
    device = checks.one_device(x=x, values=values, row_mask=row_mask, column_mask=column_mask)
    name = backends.resolve(device, backend)
    return _twice_pruned_mm24(x, values, row_mask, column_mask, layout, name)


@custom_op("sparse24::twice_pruned_mm24", mutates_args=())
def _twice_pruned_mm24(
    x: Tensor, values: Tensor, row_mask: Tensor, column_mask: Tensor, layout: str, backend: str
) -> Tensor:
    shape = 2 * values.shape[1], values.shape[0]
    buffer = packed_one(values, row_mask, column_mask, x.dtype, layout, backend)
    return linear24(Packed24(buffer, shape, x.dtype, layout), x)


@_twice_pruned_mm24.register_fake
def _(x, values, row_mask, column_mask, layout, backend):
    return x.new_empty(x.shape[0], 2 * values.shape[1])


def once_pruned_linear24(
    x: Tensor,
    values: Tensor,
    row_mask: Tensor,
    bias: Tensor | None = None,
    *,
    layout: str = BUFFERED,
    backend: str | None = None,
) -> Tensor:
    """x [..., columns] (W * A)^T + bias, of shape [..., rows], in the same way."""
    device = checks.one_device(x=x, values=values, row_mask=row_mask, bias=bias)
    name = backends.resolve(device, backend)
    return _once_pruned_linear24(x, values, row_mask, bias, layout, name)


@custom_op("sparse24::once_pruned_linear24", mutates_args=())
def _once_pruned_linear24(
    x: Tensor, values: Tensor, row_mask: Tensor, bias: Tensor | None, layout: str, backend: str
) -> Tensor:
    shape = values.shape[0], 2 * values.shape[1]
    buffer = packed_one(values, row_mask, None, x.dtype, layout, backend)
    return linear24(Packed24(buffer, shape, x.dtype, layout), x, bias)


@_once_pruned_linear24.register_fake
def _(x, values, row_mask, bias, layout, backend):
    return x.new_empty((*x.shape[:-1], values.shape[0]))
