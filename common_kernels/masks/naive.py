"""Hard N:M masks in plain PyTorch: the specification."""

import functools
import itertools

import torch


def magnitude_bits(x: torch.Tensor) -> torch.Tensor:
    """|x| as integers that rank as |x| does, NaN above Inf above every finite number."""
    if x.dtype == torch.float32:
        return x.view(torch.int32) & 0x7FFFFFFF
    return x.view(torch.int16) & 0x7FFF


def nm_mask(x: torch.Tensor, n: int, m: int, dim: int) -> torch.Tensor:
    """An entry is kept if it wins at least m-n of its m-1 duels; the lower index wins a draw."""
    mask = torch.empty_like(x, dtype=torch.bool)
    a = magnitude_bits(x).movedim(dim, -1).unflatten(-1, (-1, m))
    wins = torch.zeros_like(a, dtype=torch.int8)
    for d in range(1, m):
        beats = a[..., :-d] >= a[..., d:]
        wins[..., :-d] += beats
        wins[..., d:] += ~beats
    mask.movedim(dim, -1).copy_((wins >= m - n).flatten(-2))
    return mask


@functools.cache
def patterns(device: str = "cpu") -> torch.Tensor:
    """The 90 4x4 patterns with two ones in every row and column, `[90, 16]` bool, descending lexicographic order."""
    rows = sorted({p for p in itertools.permutations((1, 1, 0, 0))}, reverse=True)
    tiles = [t for t in itertools.product(rows, repeat=4) if all(sum(c) == 2 for c in zip(*t, strict=True))]
    return torch.tensor(tiles, dtype=torch.bool, device=device).flatten(1)


def transposable_mask24(w: torch.Tensor, algorithm: str) -> torch.Tensor:
    mask = torch.empty_like(w, dtype=torch.bool)
    tiles = w.unflatten(-2, (-1, 4)).unflatten(-1, (-1, 4)).transpose(-2, -3)  # [..., R, C, 4, 4]
    a = tiles.abs().float().flatten(-2)
    table = patterns(str(w.device))
    if algorithm == "exact":
        rows = torch.stack([sum_kept(a[..., 4 * r : 4 * r + 4], table[:, 4 * r : 4 * r + 4]) for r in range(4)])
        best = ((rows[0] + rows[1]) + (rows[2] + rows[3])).argmax(-1)
        out = table[best]
    else:
        out = greedy(a) if algorithm == "greedy" else ~edge_cover(a)
    mask.unflatten(-2, (-1, 4)).unflatten(-1, (-1, 4)).transpose(-2, -3).copy_(out.unflatten(-1, (4, 4)))
    return mask


def greedy(a: torch.Tensor) -> torch.Tensor:
    """From the largest magnitude down, keep an entry if its row and its column still hold fewer than two. a: [..., 16]"""
    kept = torch.zeros_like(a, dtype=torch.bool)
    for i in a.argsort(dim=-1, descending=True, stable=True).split(1, -1):
        tile = kept.unflatten(-1, (4, 4))
        free = (tile.sum(-1).gather(-1, i // 4) < 2) & (tile.sum(-2).gather(-1, i % 4) < 2)
        kept.scatter_(-1, i, free)
    return kept


def edge_cover(a: torch.Tensor) -> torch.Tensor:
    """From the smallest magnitude up, prune an entry if its row or its column still lacks one of its two. a: [..., 16]"""
    pruned = torch.zeros_like(a, dtype=torch.bool)
    for i in a.argsort(dim=-1, stable=True).split(1, -1):
        tile = pruned.unflatten(-1, (4, 4))
        short = (tile.sum(-1).gather(-1, i // 4) < 2) | (tile.sum(-2).gather(-1, i % 4) < 2)
        pruned.scatter_(-1, i, short)
    return pruned


def sum_kept(a, pattern):
    i, j = pattern.nonzero()[:, 1].view(-1, 2).unbind(1)
    return a[..., i] + a[..., j]


def check24(x: torch.Tensor, dim: int) -> torch.Tensor:
    groups = (x != 0).movedim(dim, -1).unflatten(-1, (-1, 4))
    return (groups.sum(-1) > 2).sum()
