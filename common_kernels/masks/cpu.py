"""Hard masks in plain PyTorch."""

import functools
import itertools

import torch

TILES = 1 << 14  # 4x4 tiles searched at once, each of which takes about 1 KB
# The six 2:4 patterns of a row, in descending order of their bits.
PAIRS = tuple(itertools.combinations(range(4), 2))


def magnitude_bits(x: torch.Tensor) -> torch.Tensor:
    """|x| as integers that rank as |x| does, with NaN above Inf above every finite number."""
    if x.dtype == torch.float32:
        return x.view(torch.int32) & 0x7FFFFFFF
    return x.view(torch.int16) & 0x7FFF


def nm_mask(x: torch.Tensor, n: int, m: int, dim: int) -> torch.Tensor:
    """Keep what wins at least m-n of m-1 comparisons in its group; the lower index wins a tie."""
    groups = magnitude_bits(x).unflatten(dim, (-1, m)).transpose(0, dim + 1).contiguous()
    wins = torch.zeros_like(groups, dtype=torch.int8)
    for d in range(1, m):
        beats = groups[:-d] >= groups[d:]
        wins[:-d] += beats
        wins[d:] += ~beats
    mask = torch.empty_like(x, dtype=torch.bool)
    kept = wins > m - n - 1  # m - n may be 128, which int8 cannot hold
    mask.unflatten(dim, (-1, m)).copy_(kept.transpose(0, dim + 1))
    return mask


def transposable_mask24(w: torch.Tensor, algorithm: str) -> torch.Tensor:
    mask = torch.empty_like(w, dtype=torch.bool)
    if w.numel():
        search = exact if algorithm == "exact" else functools.partial(scan, algorithm=algorithm)
        tiles = as_tiles(w)
        found = [search(part) for part in tiles.flatten(0, -3).split(TILES)]
        as_tiles(mask).copy_(torch.cat(found).view(tiles.shape))
    return mask


def as_tiles(w: torch.Tensor) -> torch.Tensor:
    """`[..., 4R, 4C]` as `[..., R, C, 4, 4]`."""
    return w.unflatten(-1, (-1, 4)).unflatten(-3, (-1, 4)).transpose(-3, -2)


def exact(tiles: torch.Tensor) -> torch.Tensor:
    """The pattern with the largest sum of kept magnitudes, for each tile [tiles, 4, 4].

    Sums are in fp32, added as (row 0 + row 1) + (row 2 + row 3). Ties go to the first pattern. NaN
    counts as Inf, which keeps the sums comparable and the mask legal. A tile with an entry of 2^125
    or more is divided by 8 first, so that no sum of finite entries is Inf.

    Which lower halves (two rows) fit an upper half depends only on the sums of its columns. The
    best half above and the best below are found for each of their 19 values, and then the best of
    the 19. (So where sums differ by less than their rounding, the larger half wins a tie.)
    """
    a = tiles.float().abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    a = a * torch.where(a.amax((1, 2), keepdim=True) >= 2.0**125, 0.125, 1.0)
    rows = torch.stack([a[..., i] + a[..., j] for i, j in PAIRS], -1)  # [tiles, row, pair]
    upper, lower = ((rows[:, r, :, None] + rows[:, r + 1, None]).flatten(1) for r in (0, 2))
    sums, places = [], []
    for above, below in fitting_halves(tiles.device):
        first, last = upper[:, above].argmax(1), lower[:, below].argmax(1)  # the first of equals
        first, last = above[first], below[last]
        sums.append(upper.gather(1, first[:, None]) + lower.gather(1, last[:, None]))
        places.append(36 * first + last)
    found, place = torch.cat(sums, 1), torch.stack(places, 1)
    place = place.masked_fill(found < found.amax(1, keepdim=True), 6**4).amin(1)
    return four_rows()[place.cpu()].to(tiles.device)


@functools.cache
def fitting_halves(device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The upper halves of a tile with equal sums of columns, and the lower halves that complete
    them, as numbers from 0 to 35; one pair for each of the 19 sums."""
    columns = four_rows()[:36, 2:].sum(1)
    fitting = []
    for total in columns.unique(dim=0):
        halves = ((columns == t).all(1).nonzero().squeeze(1) for t in (total, 2 - total))
        fitting.append(tuple(half.to(device) for half in halves))
    return fitting


@functools.cache
def four_rows() -> torch.Tensor:
    """All tiles of four rows of two kept entries, ordered by their PAIRS: bool [1296, 4, 4]."""
    rows = torch.zeros(6, 4, dtype=torch.bool).scatter_(1, torch.tensor(PAIRS), True)
    return rows[torch.cartesian_prod(*4 * [torch.arange(6)])]


def scan(tiles: torch.Tensor, algorithm: str) -> torch.Tensor:
    """Go through a tile's entries in the order of their magnitudes, ties by index.

    `greedy` begins with the largest, and keeps an entry if its row and its column hold fewer than
    two. `two_approx`, the 2-approximation of Hubara et al. (arXiv 2102.08124), begins with the
    smallest, and prunes an entry if its row or its column has lost fewer than two. Fewer than eight
    entries may be kept in the end.
    """
    largest_first = algorithm == "greedy"
    flat = magnitude_bits(tiles.contiguous()).flatten(-2)
    order = flat.argsort(dim=-1, descending=largest_first, stable=True)
    taken = torch.zeros_like(flat, dtype=torch.bool)
    for visit in order.unbind(-1):
        entry, so_far = visit[..., None], taken.unflatten(-1, (4, 4))
        in_row = so_far.sum(-1).gather(-1, entry // 4) < 2
        in_column = so_far.sum(-2).gather(-1, entry % 4) < 2
        take = in_row & in_column if largest_first else in_row | in_column
        taken.scatter_(-1, entry, take)
    return (taken if largest_first else ~taken).unflatten(-1, (4, 4))


def check_nm(x: torch.Tensor, n: int, m: int, dim: int) -> torch.Tensor:
    groups = (x != 0).unflatten(dim, (-1, m))
    return (groups.sum(dim + 1) > n).sum()


def flips(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    return (old != new).sum()
