"""Packed matrices as torch's `SparseSemiStructuredTensor`, and back."""

from typing import Any

import torch
from torch.sparse import (
    SparseSemiStructuredTensor,
    SparseSemiStructuredTensorCUSPARSELT,
    SparseSemiStructuredTensorCUTLASS,
)

from common_kernels.pack import Packed24

CLASSES: dict[str, Any] = {
    "cutlass_sm80": SparseSemiStructuredTensorCUTLASS,
    "cusparselt_sm90": SparseSemiStructuredTensorCUSPARSELT,
}


def to_semi_structured(
    packed: Packed24, transposed: Packed24 | None = None
) -> SparseSemiStructuredTensor:
    """torch's tensor of the same matrix, on the same memory, on any device.

    Layout `cutlass_sm80` gives the CUTLASS class, `cusparselt_sm90` that of cuSPARSELt; which
    products a device can run is torch's affair. torch's classes multiply with a transpose only if
    they hold it: `transposed` is the packed transpose, of a mask that is 2:4 along both dims.

    ValueError for another layout, for a type that torch's class does not take (its fp32 is 1:2
    sparse), and for parts that do not belong together.
    """
    if packed.layout not in CLASSES:
        raise ValueError(
            f"torch has no tensor class for layout {packed.layout!r}: convert24 the matrix to "
            f"{' or '.join(map(repr, CLASSES))}"
        )
    cls = CLASSES[packed.layout]
    if packed.dtype not in cls._DTYPE_SHAPE_CONSTRAINTS:
        taken = ", ".join(map(str, cls._DTYPE_SHAPE_CONSTRAINTS))
        raise ValueError(f"{cls.__name__} takes {taken}, not {packed.dtype}")
    if transposed is not None:
        found = (transposed.shape, transposed.layout, transposed.dtype)
        expected = (packed.shape[::-1], packed.layout, packed.dtype)
        if found != expected:
            raise ValueError(f"transposed must be {expected}, not {found}")
    parts = (*_parts(packed), *(_parts(transposed) if transposed is not None else (None, None)))
    return cls(torch.Size(packed.shape), *parts, None)


def _parts(packed: Packed24) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`packed` and `meta` in torch's words."""
    if packed.layout == "cusparselt_sm90":
        return cslt_form(packed), None
    return packed.values, packed.meta


def cslt_form(packed: Packed24) -> torch.Tensor:
    """The buffer as `torch._cslt_compress` returns it: `[rows, ...]` of the values' dtype."""
    width = packed.values.shape[1] + packed.meta.shape[1] // packed.dtype.itemsize
    return packed.buffer.view(packed.dtype).view(packed.shape[0], width)


def from_cslt(compressed: torch.Tensor, columns: int) -> Packed24:
    """The matrix [rows, columns] in such a tensor, on the same memory."""
    return Packed24(
        (compressed.view(-1).view(torch.uint8),), (len(compressed), columns), compressed.dtype
    )


def from_semi_structured(tensor: SparseSemiStructuredTensor) -> Packed24:
    """The packed matrix behind torch's tensor, on the same memory; for that of its transpose call
    it with `tensor.t()`.

    TypeError for another tensor. ValueError where torch holds the transpose alone, padded the
    matrix, or keeps fp32 (1:2 sparse), and for cuSPARSELt's metadata in an order other than that of
    compute capability 9.0: on other GPUs, and wherever torch's tile packer wrote it.
    """
    if not isinstance(tensor, tuple(CLASSES.values())):
        raise TypeError(f"a SparseSemiStructuredTensor is expected, not {type(tensor).__name__}")
    rows, columns = tensor.shape
    values, meta = tensor.packed, tensor.meta
    if values is None:
        raise ValueError("the tensor holds its transpose alone: convert tensor.t()")
    if isinstance(tensor, SparseSemiStructuredTensorCUSPARSELT):
        if meta is not None:
            raise ValueError(
                "torch's tile packer writes cuSPARSELt's metadata in the order of compute "
                "capability 8.0; pack the matrix with pack24"
            )
        if values.is_cuda and torch.cuda.get_device_capability(values.device) != (9, 0):
            raise ValueError(
                "the order of cuSPARSELt's metadata is known for compute capability 9.0 alone; go "
                "through tensor.to_dense()"
            )
        return from_cslt(values, columns)
    if values.shape != (rows, columns // 2) or meta is None:
        raise ValueError(
            f"torch stores this {(rows, columns)} matrix of {tensor.dtype} as "
            f"{tuple(values.shape)} values, padded; go through tensor.to_dense()"
        )
    if meta.ndim == 3:  # the tile packer's view [rows, 2, columns / 32] of the same memory
        if meta.stride() != (2, 1, 2 * rows):
            raise ValueError(f"metadata of strides {meta.stride()} is not that of torch's packers")
        meta = meta.as_strided((rows, columns // 16), (columns // 16, 1))
    return Packed24((values, meta), (rows, columns), values.dtype, "cutlass_sm80")
