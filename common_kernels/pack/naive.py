"""Compressed 2:4 matrices in plain PyTorch: the specification of every format.

A 2:4 matrix [rows, columns] keeps two entries i0 < i1 of each group of four along its columns. Its
values are stored row-major, `[rows, columns / 2]`; the positions of a group are the nibble i0 |
i1 << 2. Formats differ in the order of the nibbles alone.
"""

import torch

PAIRS = ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3))


def choose(mask: torch.Tensor) -> torch.Tensor:
    """Positions (i0, i1) of the two entries stored for each group, `[..., 2]` int64.

    Of a group with fewer than two kept entries, one that is not kept is stored, as a zero.
    mask: bool `[..., 4]` with at most two True.
    """
    k0, k1, k2, k3 = mask.unbind(-1)
    first = torch.where(k0, 0, torch.where(k1, 1, 2))
    second = torch.where(k3 | (first == 2), 3, torch.where(k2 | (first == 1), 2, 1))
    return torch.stack([first, second], -1)


def compress(x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values `[rows, columns / 2]` and nibbles `[rows, columns / 4]` (uint8) of x where mask."""
    groups = mask.unflatten(-1, (-1, 4))
    positions = choose(groups)
    kept = x.masked_fill(~mask, 0).unflatten(-1, (-1, 4))
    nibbles = positions[..., 0] | positions[..., 1] << 2
    return kept.gather(-1, positions).flatten(-2), nibbles.to(torch.uint8)


def expand(values: torch.Tensor, nibbles: torch.Tensor) -> torch.Tensor:
    """The matrix `[rows, columns]`."""
    nibbles = nibbles.long()
    positions = torch.stack([nibbles & 3, nibbles >> 2], -1)
    dense = values.new_zeros(*nibbles.shape, 4)
    return dense.scatter_(-1, positions, values.unflatten(-1, (-1, 2))).flatten(-2)


def cusparselt_sm90_order(rows: int, columns: int, itemsize: int) -> torch.Tensor:
    """Address of the nibble of each group, `[rows, columns / 4]`, in cuSPARSELt's metadata for
    compute capability 9.0: blocks of 64 rows by 32 columns (64 for one-byte types), along the
    columns first.

    As read off an H200 with cuSPARSELt 0.8.0 (`python -m experiments.bench probe`); NVIDIA does not
    document it.
    """
    r, g = torch.arange(rows)[:, None], torch.arange(columns // 4)
    if itemsize == 2:
        inside = 4 * (g % 2) + 8 * (g // 2 % 2) + 2 * (g // 4 % 2) + 512 * (g // 8)
        inside = inside + 16 * (r % 8) + r // 8 % 2 + 128 * (r // 16 % 4)
        stripe = 512 * -(-columns // 32)
    else:
        inside = g % 2 + 8 * (g // 2 % 4) + 4 * (g // 8 % 2) + 1024 * (g // 16)
        inside = inside + 32 * (r % 8) + 2 * (r // 8 % 2) + 256 * (r // 16 % 4)
        stripe = 1024 * -(-columns // 64)
    return inside + stripe * (r // 64)


def cusparselt_sm90(values: torch.Tensor, nibbles: torch.Tensor) -> torch.Tensor:
    """The blob of `torch._cslt_compress`: values, then metadata; `[rows, ...]` of values' dtype.

    Rows must be a multiple of 64, columns of 32 (64 for one-byte types).
    """
    rows, itemsize = values.shape[0], values.element_size()
    order = cusparselt_sm90_order(rows, 4 * nibbles.shape[1], itemsize).to(values.device)
    meta = torch.zeros(nibbles.numel(), dtype=torch.uint8, device=values.device)
    meta[order.flatten()] = nibbles.flatten()
    meta = meta[::2] | meta[1::2] << 4
    return torch.cat([values.flatten().view(torch.uint8), meta]).view(values.dtype).view(rows, -1)
