"""Packing of SLoPe's compressed weights: the column mask and both packed operands from one read of
the values, for all weights of a shape in one launch, or a single operand of one weight."""

from collections.abc import Sequence

import torch
from torch import Tensor

from common_kernels import backend as backends
from common_kernels.compressed import double_prune_bits, expand_nm, unpack_mask
from common_kernels.pack import Compressed24, cpu


@torch.no_grad()
def prune_and_pack24_(
    weights: Sequence[Compressed24], *, choose: bool = True, backend: str | None = None
) -> None:
    """Write in place the packed operands that each of `weights` has. With `choose` first write
    their column masks, as `double_prune_bits` chooses them. Weights of equal device, shape, dtypes
    and layouts share a launch. Nothing waits for the device, and the call can be captured in a CUDA
    graph."""
    by_device: dict[torch.device, list[Compressed24]] = {}
    for weight in weights:
        by_device.setdefault(weight.values.device, []).append(weight)
    for device, rest in by_device.items():
        name = backends.resolve(device, backend)
        if name == "triton":
            from common_kernels.pack import compressed_triton as triton

            rest = triton.prune_and_pack(rest, choose)
        for weight in rest:
            given = weight.values, weight.row_mask
            if choose:
                weight.column_mask.copy_(double_prune_bits(*given, backend=name))
            for out, mask in zip(weight.operands, (None, weight.column_mask), strict=True):
                if out is not None:
                    out.buffer.copy_(packed_one(*given, mask, out.dtype, out.layout, name))
    written = [out.buffer for weight in weights for out in weight.operands if out is not None]
    written += [weight.column_mask for weight in weights] if choose else []
    torch.autograd.graph.increment_version(written)


def packed_one(
    values: Tensor,
    row_mask: Tensor,
    column_mask: Tensor | None,
    dtype: torch.dtype,
    layout: str,
    backend: str,
) -> Tensor:
    """The packed bytes of (W * A * B)^T in `dtype`, or without a `column_mask` of W * A, as
    `prune_and_pack24_` writes them, for use inside another operator. The tensors are those of a
    `Compressed24`."""
    if backend == "triton" and layout != cpu.VENDOR:
        from common_kernels.pack import compressed_triton as triton

        if triton.in_blocks(values):
            turned = None if column_mask is None else column_mask.contiguous()
            given = values.contiguous(), row_mask.contiguous(), turned
            return triton.pack_one(*given, dtype, layout)
    if column_mask is None:
        mask = unpack_mask(row_mask, 2 * values.shape[1], backend=backend)
        return cpu.pack(expand_nm(values.to(dtype), row_mask, backend=backend), mask, layout)
    kept = unpack_mask(column_mask, values.shape[1], backend=backend)
    twice = torch.where(kept, values, 0.0).to(dtype)
    both = expand_nm(kept.to(dtype), row_mask, backend=backend) != 0
    twice = expand_nm(twice, row_mask, backend=backend)
    return cpu.pack(twice.t().contiguous(), both.t().contiguous(), layout)
