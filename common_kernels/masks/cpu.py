"""Hard masks in plain PyTorch."""

import functools
import itertools
from collections.abc import Callable

import torch

from common_kernels import chunks

# Tiles per piece of the exact search, which needs far more scratch space than the other masks.
TILES = 1 << 14
# The six 2:4 patterns of a row, in descending order of their bits.
PAIRS = tuple(itertools.combinations(range(4), 2))
# Pairs of row patterns that share one column, and runs of them: (first pattern, range of second
# patterns, range of classes).
TWINS = tuple((i, j) for i in range(6) for j in range(i + 1, 6) if i + j != 5)
TWIN_RUNS = (
    (0, slice(1, 5), slice(0, 4)),
    (1, slice(2, 4), slice(4, 6)),
    (1, slice(5, 6), slice(6, 7)),
    (2, slice(4, 6), slice(7, 9)),
    (3, slice(4, 6), slice(9, 11)),
    (4, slice(5, 6), slice(11, 12)),
)


# The bits of 2^125: the sum of eight magnitudes below it is finite in fp32.
LARGE = 0x7E000000


def magnitude_bits(x: torch.Tensor) -> torch.Tensor:
    """|x| as integers that rank as |x| does, with NaN above Inf above every finite number."""
    if x.dtype == torch.float32:
        return x.view(torch.int32) & 0x7FFFFFFF
    return x.view(torch.int16) & 0x7FFF


def nm_mask(x: torch.Tensor, n: int, m: int, dim: int) -> torch.Tensor:
    mask = torch.empty_like(x, dtype=torch.bool)
    if x.numel() == 0:
        return mask
    groups, kept = chunks.as_groups(x, dim, m), chunks.as_groups(mask, dim, m)
    if (n, m) == (2, 4) and groups.shape[-1] == 1:
        chunks.for_each(keep24, groups, kept)
    else:
        for piece, kept_piece in chunks.split(groups, kept):
            keep(magnitude_bits(piece), kept_piece, n)
    return mask


def keep(a: torch.Tensor, mask: torch.Tensor, n: int) -> None:
    """Write the n:m mask of `a`: an entry is kept if it wins at least m-n of its m-1 pairwise
    comparisons in its group; the lower index wins a tie.

    a and mask: `[rows, m, lanes]`.
    """
    m = a.shape[1]
    wins = torch.zeros_like(a, dtype=torch.int8)
    for d in range(1, m):
        beats = torch.ge(a[:, :-d], a[:, d:]).view(torch.int8)
        wins[:, :-d] += beats
        wins[:, d:] += 1 - beats
    torch.gt(wins, m - n - 1, out=mask)  # m - n may be 128, which int8 cannot hold


def keep24(x: torch.Tensor, mask: torch.Tensor) -> Callable[..., None]:
    """The same rule for 2:4 groups of neighbours in memory; the four bytes of a word count the wins
    of a group's entries.

    Entry i starts with i wins, as if it had won every comparison with a lower index. Each
    comparison (i, i+d) that the lower index wins moves one point from byte i+d to byte i. Bit 1 of
    a byte then means two or three wins. A whole piece is compared with itself shifted by d;
    comparisons across the border of a group are masked off.

    x and mask: `[groups, 4, 1]`, contiguous.
    """
    n, device = x.numel(), x.device
    wide = x.dtype == torch.float32
    integer = torch.int32 if wide else torch.int16
    magnitude = torch.tensor(0x7FFFFFFF if wide else 0x7FFF, dtype=integer, device=device)
    padded = torch.zeros(n + 3, dtype=integer, device=device)
    a, duels = padded[:n], torch.empty(n, dtype=integer, device=device)
    beats = torch.empty(n, dtype=torch.int8, device=device)
    words, wins = beats.view(torch.int32), torch.empty(n // 4, dtype=torch.int32, device=device)
    inside = torch.tensor([0x00010101, 0x00000101, 0x00000001], dtype=torch.int32, device=device)
    rounds = [(padded[d : d + n], inside[d - 1], 1 - (1 << 8 * d)) for d in (1, 2, 3)]
    two_or_three = torch.tensor(0x01010101, dtype=torch.int32, device=device)

    def work(x: torch.Tensor, mask: torch.Tensor) -> None:
        torch.bitwise_and(x.view(-1).view(integer), magnitude, out=a)
        wins.fill_(0x03020100)
        for shifted, lanes, move in rounds:
            torch.ge(a, shifted, out=duels)
            beats.copy_(duels)
            wins.add_(words.bitwise_and_(lanes), alpha=move)
        kept = mask.view(-1).view(torch.int32)
        torch.bitwise_and(wins.bitwise_right_shift_(1), two_or_three, out=kept)

    return work


def transposable_mask24(w: torch.Tensor, algorithm: str) -> torch.Tensor:
    mask = torch.empty_like(w, dtype=torch.bool)
    if w.numel() == 0:
        return mask
    kept = mask if mask.is_contiguous() else torch.empty(w.shape, dtype=torch.bool, device=w.device)
    tiles = w.reshape(-1, 4, w.shape[-1] // 4, 4)  # [tile rows, row, tile columns, column]
    rows = kept.view(torch.int32).view(-1, 4, w.shape[-1] // 4)  # each row's four bools as one word
    if algorithm == "exact":
        chunks.for_each(exact, tiles, rows, size=16 * TILES)
    else:
        {"greedy": greedy, "two_approx": two_approx}[algorithm](tiles, rows)
    return mask if kept is mask else mask.copy_(kept)


def exact(tiles: torch.Tensor, kept: torch.Tensor) -> Callable[..., None]:
    """Choose for each tile the pattern with the largest sum of kept magnitudes.

    Sums are in fp32, added as (row 0 + row 1) + (row 2 + row 3). Ties go to the first pattern. NaN
    counts as Inf, which keeps the sums comparable and the mask legal. A tile with an entry of 2^125
    or more is divided by 8 first, so that no sum of finite entries is Inf.

    The search joins the best upper half (two rows) with the best lower half that fits it. A row's
    pattern is an index into PAIRS; 5-i is the complement of i. Which lower halves fit an upper half
    (i, j) depends only on its column sums, so the 36 halves on each side fall into 19 classes:
    (i, i); (i, j) with (j, i) if i and j share one column; and all (i, 5-i). Lower halves are
    numbered by the complements of their rows, so that matching classes have the same number.

    tiles: `[tile rows, 4, tile columns, 4]`; kept: `[tile rows, 4, tile columns]` int32, each row's
    four bools as one word.
    """
    device, (rows, _, columns, _) = tiles.device, tiles.shape
    n = rows * columns
    words = half_words(device)
    i, j = torch.tensor(TWINS, dtype=torch.float32, device=device).t().unsqueeze(-1)
    numbers = torch.arange(6, dtype=torch.float32, device=device)[:, None]
    rank_first, rank_last = 6 - numbers, 1 + numbers
    # A pattern's place in the lexicographic order is 36 * upper half + lower half.
    place_same = 36 * 7 * numbers + 35 - 7 * numbers
    place_twin, swap = 36 * (6 * i + j) + 35 - (6 * i + j), j - i
    absolute = torch.tensor(0x7FFFFFFF, dtype=torch.int32, device=device)
    infinity = torch.tensor(0x7F800000, dtype=torch.int32, device=device)

    a = torch.empty(4, 4, n, device=device)  # [row, column, tile]
    bits, planes = a.view(torch.int32), a.view(4, 4, rows, columns)
    sums = torch.empty(2, 2, 6, n, device=device)  # [half, row, number, tile]
    first, second = sums[:, 0], sums[:, 1]
    best = torch.empty(2, 19, n, device=device)  # [half, class, tile]
    one, other = torch.empty(2, 2, 12, n, device=device)
    opposite, place = torch.empty(2, 6, n, device=device), torch.empty(19, n, device=device)
    additions = [
        addition
        for number, (left, right) in enumerate(PAIRS)
        for addition in (
            (a[:2, left], a[:2, right], sums[0, :, number]),
            (a[2:, left], a[2:, right], sums[1, :, 5 - number]),
        )
    ]
    additions.append((first, second, best[:, :6]))
    for number, partners, classes in TWIN_RUNS:
        additions.append((first[:, number, None], second[:, partners], one[:, classes]))
        additions.append((first[:, partners], second[:, number, None], other[:, classes]))
    additions += [(first[:, n], second[:, 5 - n], opposite[:, n]) for n in range(6)]
    best_twins, best_opposite, best_opposites = best[:, 6:18], best[:, 18], best[:, 18:]
    (upper, lower), (upper_opposite, lower_opposite) = other, opposite
    place[:6] = place_same
    place_of_twins, place_of_opposite = place[6:18], place[18]
    total, beaten, winner = best[0], best[1], torch.empty(n, device=device)

    def work(tiles: torch.Tensor, kept: torch.Tensor) -> None:
        planes.copy_(tiles.permute(1, 3, 0, 2))
        torch.minimum(bits.bitwise_and_(absolute), infinity, out=bits)
        if device.type != "cpu" or int(bits.max()) >= LARGE:
            a.mul_(torch.where(bits.amax((0, 1)) >= LARGE, 0.125, 1.0))
        for x, y, out in additions:
            torch.add(x, y, out=out)
        torch.maximum(one, other, out=best_twins)
        torch.amax(opposite, 1, out=best_opposite)
        # (i, j) comes before (j, i) in an upper half and, numbered by complements, after it in a
        # lower half.
        torch.gt(other[0], one[0], out=upper)
        torch.ge(other[1], one[1], out=lower)
        torch.addcmul(place_twin, upper, swap, value=180, out=place_of_twins)
        place_of_twins.addcmul_(lower, swap, value=-5)
        torch.eq(opposite, best_opposites, out=opposite)
        torch.amax(upper_opposite.mul_(rank_first), 0, out=place_of_opposite)
        torch.amax(lower_opposite.mul_(rank_last), 0, out=winner)
        place_of_opposite.mul_(-180).sub_(winner, alpha=5).add_(1295)
        torch.amax(total.add_(beaten), 0, out=winner)
        torch.lt(total, winner, out=beaten)
        torch.amin(torch.add(place, beaten, alpha=1296, out=beaten), 0, out=winner)
        chosen = words.index_select(0, winner.to(torch.int32))
        kept.copy_(chosen.view(rows, columns, 4).transpose(1, 2))

    return work


@functools.cache
def half_words(device: torch.device) -> torch.Tensor:
    """`[1296, 4]` int32: the bools of each row of the pattern at 36 * upper half + lower half."""
    bools = torch.zeros(6**4, 4, 4, dtype=torch.bool)
    for place, tile in enumerate(itertools.product(range(6), repeat=4)):
        for row, number in enumerate(tile):
            bools[place, row, list(PAIRS[number])] = True
    return bools.view(torch.int32).view(-1, 4).to(device)


def greedy(tiles: torch.Tensor, kept: torch.Tensor) -> None:
    """Go through a tile's entries from the largest magnitude down, and keep an entry if its row and
    its column hold fewer than two. Fewer than eight entries may be kept in the end.
    """
    kept.view(torch.bool).view(tiles.shape).copy_(scan(tiles, largest_first=True))


def two_approx(tiles: torch.Tensor, kept: torch.Tensor) -> None:
    """Go through a tile's entries from the smallest magnitude up, and prune an entry if its row or
    its column has lost fewer than two.

    This is the 2-approximation of Hubara et al. (arXiv 2102.08124). Fewer than eight entries may be
    kept in the end.
    """
    kept.view(torch.bool).view(tiles.shape).copy_(~scan(tiles, largest_first=False))


def scan(tiles: torch.Tensor, largest_first: bool) -> torch.Tensor:
    """The entries taken when a tile is visited in order of magnitude, lower index first in a tie.

    One word counts what a tile has taken so far: four bits for each row, then four for each column.
    A count of two, three or four overlaps with the bits of 6.
    """
    flat = magnitude_bits(tiles.contiguous()).transpose(1, 2).flatten(2)
    order = flat.argsort(dim=-1, descending=largest_first, stable=True)
    visits = order.permute(2, 0, 1).contiguous()  # [16, tile rows, tile columns]
    position = torch.arange(16, dtype=torch.int32, device=tiles.device)
    row, column = 1 << 4 * (position // 4), 1 << 16 + 4 * (position % 4)
    words = torch.stack([row + column, 6 * row, 6 * column])[:, visits].unbind(1)
    taken = torch.empty_like(visits, dtype=torch.bool)
    counts, full = torch.zeros_like(words[0][0]), torch.empty_like(taken[0])
    is_full = torch.logical_or if largest_first else torch.logical_and
    for (one, full_row, full_column), take in zip(words, taken, strict=True):
        is_full(counts & full_row, counts & full_column, out=full)
        torch.logical_not(full, out=take)
        counts += one * take
    placed = torch.empty_like(taken).scatter_(0, visits, taken)
    return placed.view(4, 4, *counts.shape).permute(2, 0, 3, 1)


def check_nm(x: torch.Tensor, n: int, m: int, dim: int) -> torch.Tensor:
    groups = (x != 0).unflatten(dim, (-1, m))
    return (groups.sum(dim + 1) > n).sum()


def flips(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    return (old != new).sum()
