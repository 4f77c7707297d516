"""Formats that store a mask with one bit per entry.

The swizzled bitmask of torch and xformers accompanies packed matrices and holds a transposable
mask. `sparse-24-bitmask` is the format in which compressed-tensors (up to 0.14) saves a 2:4 weight.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from common_kernels import compressed
from common_kernels.pack import Packed24, check_form, cpu, meta_bytes


def swizzle_mask(mask: torch.Tensor) -> torch.Tensor:
    """Pack a bool mask [rows, columns] in the order of `torch._sparse_semi_structured_tile`.

    The result is uint8 `[4 ceil(rows / 32), 8 ceil(columns / 64), 8]`: eight bytes for each 8x8
    area, two for each of its four 4x4 tiles, left before right and upper before lower. Entry (r, c)
    of a tile is bit 4r + c, counted from the lowest. Bits beyond the mask are zero.
    """
    if mask.dtype != torch.bool:
        raise TypeError(f"mask must be bool, not {mask.dtype}")
    if mask.ndim != 2:
        raise ValueError(f"mask must have two dims, not shape {tuple(mask.shape)}")
    rows, columns = mask.shape
    padded = F.pad(mask, (0, -columns % 64, 0, -rows % 32))
    # An entry's place is [area row, half, r, area column, half, c].
    areas = padded.unflatten(1, (padded.shape[1] // 8, 2, 4)).unflatten(0, (-1, 2, 4))
    return compressed.pack_mask(areas.permute(0, 3, 1, 4, 2, 5).flatten(2))


def unswizzle_mask(bits: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The bool mask [rows, columns] from the bits of `swizzle_mask`."""
    shape = (4 * -(-rows // 32), 8 * -(-columns // 64), 8)
    if bits.dtype != torch.uint8 or bits.shape != shape:
        raise ValueError(
            f"the bits of a {(rows, columns)} mask are uint8 of shape {shape}, not {bits.dtype} of "
            f"{tuple(bits.shape)}"
        )
    areas = compressed.unpack_mask(bits, 64).unflatten(2, (2, 2, 4, 4))
    mask = areas.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(0, 2).flatten(1)
    return mask[:rows, :columns].contiguous()


def to_bitmask24(packed: Packed24) -> dict[str, torch.Tensor]:
    """The tensors of `sparse-24-bitmask` by name; for a weight `X.weight` save each as `X.NAME`.

    compressed: `[rows, columns / 2]`, the values (shared with `packed`).
    bitmask: uint8 `[rows, ceil(columns / 8)]`; column 8j + i is bit i of byte j. Two bits are set
        in every group; stored zeros count too.
    shape: int64 `[2, 1]`.
    """
    size = packed.dtype.itemsize
    nibbles = cpu.gather(meta_bytes(packed), *packed.shape, packed.layout, size)
    return {
        "compressed": packed.values,
        "bitmask": compressed.pack_mask(cpu.mask_of(nibbles)),
        "shape": torch.tensor(packed.shape).view(2, 1),
    }


def from_bitmask24(tensors: Mapping[str, torch.Tensor]) -> Packed24:
    """The matrix of the tensors of `to_bitmask24`, in layout `neutral`; the values are shared.

    Raises ValueError if the tensors do not fit together or the bits do not set two in each group.
    """
    missing = [name for name in ("compressed", "bitmask", "shape") if name not in tensors]
    if missing:
        raise ValueError(f"no {', '.join(missing)}: sparse-24-bitmask has three tensors per weight")
    values, shape = tensors["compressed"], tensors["shape"].flatten().tolist()
    if len(shape) != 2 or values.ndim != 2 or values.shape != (shape[0], shape[1] // 2):
        raise ValueError(
            f"compressed of shape {tuple(values.shape)} is not half of a weight of shape {shape}"
        )
    rows, columns = shape
    check_form((rows, columns), values.dtype, "neutral")
    mask = compressed.unpack_mask(tensors["bitmask"], columns)
    kept = cpu.as_groups(mask).sum(-1)
    if (kept != 2).any():
        row, group = (kept != 2).nonzero()[0].tolist()
        raise ValueError(
            f"the bitmask sets {int(kept[row, group])} of columns {4 * group}..{4 * group + 3} in "
            f"row {row}; sparse-24-bitmask sets 2 in every group"
        )
    meta = cpu.scatter(cpu.encode(mask), "neutral", values.element_size())
    meta = meta.view(rows, (columns + 7) // 8)
    return Packed24((values, meta), (rows, columns), values.dtype, "neutral")
