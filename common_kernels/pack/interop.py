"""Conversion of packed matrices to and from torch's `SparseSemiStructuredTensor`."""

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
    """The same matrix as torch's tensor class, sharing memory, on any device.

    Layout `cutlass_sm80` gives torch's CUTLASS class and `cusparselt_sm90` its cuSPARSELt class;
    torch decides which products a device can run. torch multiplies by the transpose only if the
    tensor holds it: give it packed as `transposed`, which needs a mask that is 2:4 along both dims.

    Raises ValueError for another layout, for a dtype that torch's class does not take (its fp32 is
    1:2 sparse), and for parts that do not fit together.
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
    """torch's attributes `packed` and `meta` of the matrix."""
    if packed.layout == "cusparselt_sm90":
        return cslt_form(packed), None
    return packed.values, packed.meta


def cslt_form(packed: Packed24) -> torch.Tensor:
    """The buffer as `torch._cslt_compress` returns it: `[rows, ...]` of the values' dtype."""
    width = packed.values.shape[1] + packed.meta.shape[1] // packed.dtype.itemsize
    return packed.buffer.view(packed.dtype).view(packed.shape[0], width)


def from_cslt(compressed: torch.Tensor, columns: int) -> Packed24:
    """The packed matrix [rows, columns] of a result of `torch._cslt_compress`, sharing memory."""
    return Packed24(
        (compressed.view(-1).view(torch.uint8),), (len(compressed), columns), compressed.dtype
    )


def from_semi_structured(tensor: SparseSemiStructuredTensor) -> Packed24:
    """The packed matrix of torch's tensor, sharing memory. Pass `tensor.t()` for the transpose.

    Raises TypeError for another tensor. Raises ValueError if torch holds only the transpose, has
    padded the matrix or keeps fp32 (1:2 sparse), and for cuSPARSELt metadata that is not in the
    order of compute capability 9.0: on other GPUs, and if torch's tile packer wrote it.
    """
    if not isinstance(tensor, tuple(CLASSES.values())):
        raise TypeError(f"a SparseSemiStructuredTensor is expected, not {type(tensor).__name__}")
    rows, columns = tensor.shape
    values, meta = tensor.packed, tensor.meta
    if values is None:
        raise ValueError("the tensor holds only its transpose: convert tensor.t()")
    if isinstance(tensor, SparseSemiStructuredTensorCUSPARSELT):
        if meta is not None:
            raise ValueError(
                "torch's tile packer writes cuSPARSELt's metadata in the order of compute "
                "capability 8.0; pack the matrix with pack24"
            )
        if values.is_cuda and torch.cuda.get_device_capability(values.device) != (9, 0):
            raise ValueError(
                "the order of cuSPARSELt's metadata is known for compute capability 9.0 only; "
                "convert through tensor.to_dense()"
            )
        return from_cslt(values, columns)
    if values.shape != (rows, columns // 2) or meta is None:
        raise ValueError(
            f"torch stores this {(rows, columns)} matrix of {tensor.dtype} as "
            f"{tuple(values.shape)} values, padded; convert through tensor.to_dense()"
        )
    if meta.ndim == 3:  # the tile packer's view [rows, 2, columns / 32] of the same memory
        if meta.stride() != (2, 1, 2 * rows):
            raise ValueError(f"metadata of strides {meta.stride()} is not that of torch's packers")
        meta = meta.as_strided((rows, columns // 16), (columns // 16, 1))
    return Packed24((values, meta), (rows, columns), values.dtype, "cutlass_sm80")
