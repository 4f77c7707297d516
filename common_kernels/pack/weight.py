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
    packed, transposed: receive W * A and (W * A * B)^T, packed, of one 16-bit dtype; None to skip.
    """

    values: Tensor
    row_mask: Tensor
    column_mask: Tensor
    packed: Packed24 | None = None
    transposed: Packed24 | None = None

    def __post_init__(self) -> None:
        outs = [out for out in self.operands if out is not None]
        rows, columns = shape_of(self.values, self.row_mask, self.column_mask)
        if not outs or len({out.dtype for out in outs}) > 1 or outs[0].dtype.itemsize != 2:
            dtypes = " and ".join(str(out.dtype) for out in outs) or "no type"
            raise ValueError(f"operands of {dtypes}: give one or both, of one 16-bit type")
        for out, shape in (self.packed, (rows, columns)), (self.transposed, (columns, rows)):
            if out is not None and out.shape != shape:
                raise ValueError(f"an operand has shape {out.shape}, not {shape}")
        checks.one_device(
            values=self.values,
            row_mask=self.row_mask,
            column_mask=self.column_mask,
            packed=None if self.packed is None else self.packed.buffer,
            transposed=None if self.transposed is None else self.transposed.buffer,
        )

    @property
    def operands(self) -> tuple[Packed24 | None, Packed24 | None]:
        return self.packed, self.transposed

    @property
    def dtype(self) -> torch.dtype:
        """The 16-bit type of the operands."""
        out = self.packed or self.transposed
        assert out is not None
        return out.dtype


def shape_of(values: Tensor, row_mask: Tensor, column_mask: Tensor) -> tuple[int, int]:
    """(rows, columns) of the compressed weight. Raises ValueError if the tensors do not fit
    together, and TypeError for values of an unsupported dtype."""
    checks.float_tensor(values, "values")
    if values.ndim != 2:
        raise ValueError(f"values must have two dims, not shape {tuple(values.shape)}")
    rows, columns = values.shape[0], 2 * values.shape[1]
    for name, bits, width in (("row_mask", row_mask, 8), ("column_mask", column_mask, 16)):
        if bits.shape != (rows, columns // width) or bits.dtype != torch.uint8:
            raise ValueError(
                f"{name} must be uint8 [{rows}, {columns // width}], not {bits.dtype} "
                f"{list(bits.shape)}"
            )
    return rows, columns
