"""Formats that store a mask: one bit for each entry.

torch's and xformers' swizzled bitmask goes with packed matrices as the pattern of a transposable
mask; `sparse-24-bitmask` is how compressed-tensors (up to 0.14) saves a 2:4 weight.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from common_kernels import compressed
from common_kernels.pack import Packed24, check_form, cpu, meta_bytes


def swizzle_mask(mask: torch.Tensor) -> torch.Tensor:
    """A bool mask [rows, columns] in the order of `torch._sparse_semi_structured_tile`.

    Result: uint8 `[4 ceil(rows / 32), 8 ceil(columns / 64), 8]`, the eight bytes of every 8x8 area.
    They hold its four 4x4 tiles, left before right and upper before lower, two bytes each: entry
    (r, c) of a tile is bit 4r + c, the lowest bit first. Beyond the mask all bits are zero.
    """
    if mask.dtype != torch.bool:
        raise TypeError(f"mask must be bool, not {mask.dtype}")
    if mask.ndim != 2:
        raise ValueError(f"mask must have two dims, not shape {tuple(mask.shape)}")
    rows, columns = mask.shape
    padded = F.pad(mask, (0, -columns % 64, 0, -rows % 32))
    # [area row, half, r, area column, half, c]: the six digits of an entry's place
    areas = padded.unflatten(1, (padded.shape[1] // 8, 2, 4)).unflatten(0, (-1, 2, 4))
    return compressed.pack_mask(areas.permute(0, 3, 1, 4, 2, 5).flatten(2))


def unswizzle_mask(bits: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The bool mask [rows, columns] of a swizzled one."""
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
    """The tensors of `sparse-24-bitmask`: for a weight `X.weight` save each as `X.NAME`.

    compressed: `[rows, columns / 2]`, the values (shared with `packed`).
    bitmask: uint8 `[rows, ceil(columns / 8)]`; column 8j + i is bit i of byte j. Two bits are set
        in every group, that of a stored zero included.
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
    """The matrix of these tensors, in layout `neutral`; `compressed` is shared.

    ValueError where the three do not belong together, and for bits that do not set two of a group.
    """
    missing = [name for name in ("compressed", "bitmask", "shape") if name not in tensors]
    if missing:
        raise ValueError(f"no {', '.join(missing)}: sparse-24-bitmask saves three tensors a weight")
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
