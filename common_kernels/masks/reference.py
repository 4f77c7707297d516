"""Hard masks by definition, group by group: what the tests hold every backend against."""

import itertools
import math
from collections.abc import Callable

import torch

# The 90 binary 4x4 tiles with two ones in each row and column, in descending order when read as
# binary numbers (FST, arXiv 2404.01847, section 5.1).
PAIRS = [[int(i in pair) for i in range(4)] for pair in itertools.combinations(range(4), 2)]
PATTERNS = [
    torch.tensor(tile).bool()
    for tile in itertools.product(PAIRS, repeat=4)
    if all(sum(column) == 2 for column in zip(*tile, strict=True))
]


def each_group(function: Callable, x: torch.Tensor, m: int, dim: int, dtype: torch.dtype):
    """Apply `function(group, number)` to each group of m consecutive entries of x along dim, and
    return the results as a tensor of x's shape.

    `group` and the result are lists of m numbers; `number` counts the groups in the row-major order
    of x with dim divided by m.
    """
    shape = list(x.shape)
    shape[dim] //= m
    numbers = torch.arange(x.numel() // m).view(shape).movedim(dim, -1).flatten().tolist()
    rows = x.movedim(dim, -1)
    groups = rows.reshape(-1, m).tolist()
    results = [function(*both) for both in zip(groups, numbers, strict=True)]
    return torch.tensor(results, dtype=dtype).view(rows.shape).movedim(-1, dim)


def largest_first(group: list[float]) -> list[int]:
    """Indices from the largest magnitude to the smallest: NaN before Inf, ties by lower index."""
    return sorted(
        range(len(group)), key=lambda i: (math.isnan(group[i]), abs(group[i])), reverse=True
    )


def nm_mask(x: torch.Tensor, n: int = 2, m: int = 4, dim: int = -1) -> torch.Tensor:
    """Keep the n largest magnitudes of each m consecutive entries along dim."""

    def keep(group: list[float], _: int) -> list[bool]:
        return [i in largest_first(group)[:n] for i in range(m)]

    return each_group(keep, x, m, dim, torch.bool)


def transposable_mask24(w: torch.Tensor, algorithm: str = "exact") -> torch.Tensor:
    """Apply `exact`, `greedy` or `two_approx` to the magnitudes of each 4x4 tile of w."""
    mask = torch.empty(w.shape, dtype=torch.bool)
    for i, j in itertools.product(range(0, w.shape[0], 4), range(0, w.shape[1], 4)):
        tile = w[i : i + 4, j : j + 4].float().abs()
        mask[i : i + 4, j : j + 4] = ALGORITHMS[algorithm](tile)
    return mask


def exact(tile: torch.Tensor) -> torch.Tensor:
    """The first of the patterns with the largest sum of kept magnitudes, in fp32. (The backends
    count NaN as Inf; in a tile with NaN they may keep any pattern that holds one.)
    """
    if tile.max() >= 2.0**125:
        tile = tile / 8  # a sum of finite numbers stays finite

    def kept(pattern: torch.Tensor) -> float:
        rows = torch.where(pattern, tile, 0.0).sum(1)
        return float((rows[0] + rows[1]) + (rows[2] + rows[3]))

    return max(PATTERNS, key=kept)


def greedy(tile: torch.Tensor) -> torch.Tensor:
    """From the largest magnitude down, keep an entry whose row and column hold fewer than two."""
    mask = torch.zeros(4, 4, dtype=torch.bool)
    for place in largest_first(tile.flatten().tolist()):
        row, column = divmod(place, 4)
        mask[row, column] = mask[row].sum() < 2 and mask[:, column].sum() < 2
    return mask


def two_approx(tile: torch.Tensor) -> torch.Tensor:
    """From the smallest magnitude up, prune an entry whose row or column has lost fewer than two
    (Hubara et al., arXiv 2102.08124, algorithm 1).
    """
    mask = torch.ones(4, 4, dtype=torch.bool)
    places = largest_first(tile.flatten().flip(0).tolist())  # the lower place first in a tie
    for place in (15 - place for place in reversed(places)):
        row, column = divmod(place, 4)
        mask[row, column] = (~mask[row]).sum() >= 2 and (~mask[:, column]).sum() >= 2
    return mask


ALGORITHMS = {"exact": exact, "greedy": greedy, "two_approx": two_approx}


def check_nm(x: torch.Tensor, n: int = 2, m: int = 4, dim: int = -1) -> int:
    """Number of groups of m along dim with more than n entries that are not zero."""
    groups = x.movedim(dim, -1).reshape(-1, m).tolist()
    return sum(sum(entry != 0 for entry in group) > n for group in groups)


def flip_rate(old: torch.Tensor, new: torch.Tensor) -> float:
    """Fraction of entries in which two masks differ (FST, arXiv 2404.01847, section 4.1)."""
    pairs = list(zip(old.flatten().tolist(), new.flatten().tolist(), strict=True))
    return sum(a != b for a, b in pairs) / max(len(pairs), 1)
