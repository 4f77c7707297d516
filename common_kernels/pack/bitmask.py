"""`sparse-24-bitmask`, the format in which compressed-tensors (up to 0.14) saves a 2:4 weight: its
mask has one bit per entry."""

import torch

from common_kernels import compressed
from common_kernels.pack import Packed24, cpu, meta_bytes


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
