"""Hard masks in plain PyTorch: the specification."""

import functools
import itertools

import torch

from common_kernels import chunks

# Tiles in a piece of the exact search, which needs far more scratch space than the other masks.
TILES = 8192
# The six 2:4 patterns of a row, in descending order of their bits.
PAIRS = tuple(itertools.combinations(range(4), 2))


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
        keep24(groups.view(-1), kept.view(-1))
    else:
        for piece, kept_piece in chunks.split(groups, kept):
            keep(magnitude_bits(piece), kept_piece, n)
    return mask


def keep(a: torch.Tensor, mask: torch.Tensor, n: int) -> None:
    """The rule: an entry is kept if it wins at least m-n of its m-1 duels; the lower index wins a
    draw.

    a and mask: `[rows, m, lanes]`.
    """
    m = a.shape[1]
    wins = torch.zeros_like(a, dtype=torch.int8)
    for d in range(1, m):
        beats = torch.ge(a[:, :-d], a[:, d:]).view(torch.int8)
        wins[:, :-d] += beats
        wins[:, d:] += 1 - beats
    torch.ge(wins, m - n, out=mask)


def keep24(x: torch.Tensor, mask: torch.Tensor) -> None:
    """The same rule for 2:4 groups of neighbours in memory, with the four wins of a group in the
    bytes of one word.

    Entry i starts with i wins, as if it had won every duel against a lower index; each duel (i,
    i+d) that the lower index wins moves one point from byte i+d to byte i. Bit 1 of a byte then
    says "two wins or three". The duels are comparisons of a whole piece with its shifted self;
    those that cross the border of a group are masked off.

    x and mask: `[4 * groups]`, contiguous.
    """
    wide = x.dtype == torch.float32
    integer, magnitude = (torch.int32, 0x7FFFFFFF) if wide else (torch.int16, 0x7FFF)
    size = min(len(x), chunks.SIZE) if x.device.type == "cpu" else len(x)
    a = torch.zeros(size + 3, dtype=integer, device=x.device)
    duels = torch.empty_like(a[:size])
    bytes_ = torch.empty(size, dtype=torch.int8, device=x.device)
    words = torch.empty(size // 4, dtype=torch.int32, device=x.device)
    pieces = x.view(integer).split(size), mask.view(torch.int32).split(size // 4)
    for bits, kept in zip(*pieces, strict=True):
        length, groups = len(bits), len(kept)
        torch.bitwise_and(bits, magnitude, out=a[:length])
        wins = words[:groups].fill_(0x03020100)
        for d, inside in ((1, 0x00010101), (2, 0x00000101), (3, 0x00000001)):
            torch.ge(a[:length], a[d : d + length], out=duels[:length])
            beats = bytes_[:length].copy_(duels[:length]).view(torch.int32)
            wins.add_(beats.bitwise_and_(inside), alpha=1 - (1 << 8 * d))
        torch.bitwise_and(wins.bitwise_right_shift_(1), 0x01010101, out=kept)


@functools.cache
def patterns() -> tuple[tuple[int, ...], ...]:
    """The 90 4x4 patterns with two ones in each row and column: for each row an index into PAIRS.

    Their lexicographic order is the descending order of the 16 bits of the flattened tile.
    """
    return tuple(
        tile
        for tile in itertools.product(range(6), repeat=4)
        if all(sum(column in PAIRS[row] for row in tile) == 2 for column in range(4))
    )


@functools.cache
def outer_order() -> tuple[list[int], list[int], list[int]]:
    """The 90 patterns as outer sums of upper and lower halves.

    A half is a pair of rows, 6 * first + second. The upper halves fall into classes by their column
    sums, and each member of a class goes with each lower half that fills the columns up to two:
    6 classes of one by one, 12 of two by two, one of six by six. Returns the upper halves and the
    lower halves, 36 each, class after class, and the 90 pattern numbers in the order of the sums.
    """
    partners: dict[tuple[int, ...], tuple[list[int], list[int]]] = {}
    for a, b, c, d in patterns():
        columns = tuple((i in PAIRS[a]) + (i in PAIRS[b]) for i in range(4))
        upper, lower = partners.setdefault(columns, ([], []))
        upper.append(6 * a + b)
        lower.append(6 * c + d)
    classes = [[sorted(set(half)) for half in pair] for pair in partners.values()]
    classes.sort(key=lambda pair: len(pair[0]))
    numbers = {(6 * a + b, 6 * c + d): k for k, (a, b, c, d) in enumerate(patterns())}
    uppers, lowers = zip(*classes, strict=True)
    order = [numbers[pair] for upper, lower in classes for pair in itertools.product(upper, lower)]
    return [*itertools.chain(*uppers)], [*itertools.chain(*lowers)], order


def transposable_mask24(w: torch.Tensor, algorithm: str) -> torch.Tensor:
    mask = torch.empty_like(w, dtype=torch.bool)
    if w.numel() == 0:
        return mask
    kept = mask if mask.is_contiguous() else torch.empty(w.shape, dtype=torch.bool, device=w.device)
    tiles = w.reshape(-1, 4, w.shape[-1] // 4, 4)  # [tile rows, row, tile columns, column]
    select = {"exact": exact, "greedy": greedy, "two_approx": two_approx}[algorithm]
    select(tiles, kept.view(torch.int32).view(-1, 4, w.shape[-1] // 4))
    return mask if kept is mask else mask.copy_(kept)


def exact(tiles: torch.Tensor, kept: torch.Tensor) -> None:
    """The pattern with the largest sum of kept magnitudes, in fp32, added up as (row 0 + row 1) +
    (row 2 + row 3).

    Ties go to the first pattern. NaN counts as Inf, which keeps the scores comparable and the mask
    legal.

    tiles: `[tile rows, 4, tile columns, 4]`; kept: `[tile rows, 4, tile columns]` int32, a word of
    four bools a row.
    """
    device, columns = tiles.device, tiles.shape[2]
    upper, lower, order = (torch.tensor(numbers, device=device) for numbers in outer_order())
    rank = (90 - order).float()[:, None]  # the first pattern ranks highest
    bools = [[[j in PAIRS[row] for j in range(4)] for row in tile] for tile in reversed(patterns())]
    words = torch.tensor(bools, device=device).view(torch.int32).view(90, 4)
    rows = -1
    for piece, kept_piece in chunks.split(tiles, kept, size=16 * TILES):
        if len(piece) != rows:  # the first piece, and a smaller last one
            rows = len(piece)
            n = rows * columns
            a, sums = torch.empty(4, 4, n, device=device), torch.empty(4, 6, n, device=device)
            halves, ordered = (torch.empty(2, 36, n, device=device) for _ in range(2))
            scores = torch.empty(90, n, device=device)
            planes, bits = a.view(4, 4, rows, columns), a.view(torch.int32)
            row_sums = [(a[:, i], a[:, j], sums[:, k]) for k, (i, j) in enumerate(PAIRS)]
            half_sums = sums[0::2, :, None], sums[1::2, None], halves.view(2, 6, 6, n)
            (above, below), (top, bottom) = halves, ordered
            outer_sums = (
                (top[:6], bottom[:6], scores[:6]),
                (
                    top[6:30].view(12, 2, 1, n),
                    bottom[6:30].view(12, 1, 2, n),
                    scores[6:54].view(12, 2, 2, n),
                ),
                (top[30:, None], bottom[None, 30:], scores[54:].view(6, 6, n)),
            )
            best = torch.empty(n, device=device)
        planes.copy_(piece.permute(1, 3, 0, 2))
        bits.bitwise_and_(0x7FFFFFFF).clamp_max_(0x7F800000)
        for x, y, out in (*row_sums, half_sums):
            torch.add(x, y, out=out)
        torch.index_select(above, 0, upper, out=top)
        torch.index_select(below, 0, lower, out=bottom)
        for x, y, out in outer_sums:
            torch.add(x, y, out=out)
        torch.eq(scores, torch.amax(scores, 0, out=best), out=scores)
        torch.amax(scores.mul_(rank), 0, out=best)
        chosen = words.index_select(0, best.to(torch.int32) - 1)
        kept_piece.copy_(chosen.view(rows, columns, 4).transpose(1, 2))


def greedy(tiles: torch.Tensor, kept: torch.Tensor) -> None:
    """From the largest magnitude down, keep an entry if its row and its column hold fewer than two.

    A tile may end with fewer than eight entries kept.
    """
    kept.view(torch.bool).view(tiles.shape).copy_(scan(tiles, largest_first=True))


def two_approx(tiles: torch.Tensor, kept: torch.Tensor) -> None:
    """From the smallest magnitude up, prune an entry if its row or its column has lost fewer than
    two.

    The 2-approximation of Hubara et al. (arXiv 2102.08124). A tile may end with fewer than eight
    entries kept.
    """
    kept.view(torch.bool).view(tiles.shape).copy_(~scan(tiles, largest_first=False))


def scan(tiles: torch.Tensor, largest_first: bool) -> torch.Tensor:
    """Entries taken when a tile is visited by magnitude; the lower index goes first in a draw."""
    flat = magnitude_bits(tiles.contiguous()).transpose(1, 2).flatten(2)
    taken = torch.zeros(*flat.shape[:2], 4, 4, dtype=torch.bool, device=tiles.device)
    for i in flat.argsort(dim=-1, descending=largest_first, stable=True).split(1, -1):
        in_row = taken.sum(-1).gather(-1, i // 4) < 2
        in_column = taken.sum(-2).gather(-1, i % 4) < 2
        take = in_row & in_column if largest_first else in_row | in_column
        taken.flatten(2).scatter_(-1, i, take)
    return taken.transpose(1, 2)
