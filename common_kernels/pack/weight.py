"""SLoPe's compressed weight: its tensors and the packed operands that are made from it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from common_kernels import checks
from common_kernels.pack import Packed24


@dataclass(frozen=True, eq=False, kw_only=True)
class Compressed24:
    """A weight W [rows, columns] with the masks A (2:4 along rows) and B (2:4 along columns).

    values: [rows, columns / 2], the entries that A keeps.
    row_mask: uint8 [rows, columns / 8], the bits of A (`common_kernels.compressed`).
    column_mask: uint8 [rows, columns / 16], one bit per value, set if B keeps it.
    packed, transposed: receive W * A and (W * A * B)^T, packed, of one 16-bit dtype, or are None.
    """

    values: Tensor
    row_mask: Tensor
    column_mask: Tensor
    packed: Packed24 | None = None
    transposed: Packed24 | None = None

    def __post_init__(self) -> None:
        checks.float_tensor(self.values, "values")  # they are not after `model.double()`
        packed, transposed = (out if out is None else out.buffer for out in self.operands)
        checks.one_device(
            values=self.values, row_mask=self.row_mask, column_mask=self.column_mask,
            packed=packed, transposed=transposed,
        )  # fmt: skip

    @property
    def operands(self) -> tuple[Packed24 | None, Packed24 | None]:
        return self.packed, self.transposed

    @property
    def dtype(self) -> torch.dtype:
        """The 16-bit type of the operands."""
        out = self.packed or self.transposed
        assert out is not None
        return out.dtype
