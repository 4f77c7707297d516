"""Conversion of packed matrices to torch's `SparseSemiStructuredTensor`."""

from typing import Any

import torch
from torch import sparse

from common_kernels.pack import Packed24

CLASSES: dict[str, Any] = {
    "cutlass_sm80": sparse.SparseSemiStructuredTensorCUTLASS,
    "cusparselt_sm90": sparse.SparseSemiStructuredTensorCUSPARSELT,
}


def to_semi_structured(
    packed: Packed24, transposed: Packed24 | None = None
) -> sparse.SparseSemiStructuredTensor:
    """The same matrix as torch's tensor class, sharing memory, on any device.

    Layout `cutlass_sm80` gives torch's CUTLASS class and `cusparselt_sm90` its cuSPARSELt class;
    torch decides which products a device can run. torch multiplies by the transpose only if the
    tensor holds it: give it packed as `transposed`, which needs a mask that is 2:4 along both dims.

    Raises ValueError for another layout or dtype than torch's class takes (its fp32 is 1:2 sparse).
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
    both = (*parts(packed), *(parts(transposed) if transposed is not None else (None, None)))
    return cls(torch.Size(packed.shape), *both, None)


def parts(packed: Packed24) -> tuple[torch.Tensor, torch.Tensor | None]:
    """torch's attributes `packed` and `meta` of the matrix; cuSPARSELt has both in one."""
    if packed.layout == "cusparselt_sm90":
        return packed.buffer.view(packed.dtype).view(packed.shape[0], -1), None
    return packed.values, packed.meta
