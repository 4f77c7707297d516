"""The order of training samples in epochs, and the parts of a mixture.

The order is computed from the seed and a sample's number. There is no state and no permutation in
memory, and any number of ranks computes the same order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from experiments.support.errors import UserError

ROUNDS = 8  # rounds of the Feistel network
# In each block of this many samples, every part of a mixture has its exact share (rounded).
BLOCK = 2**16
# Constants of SplitMix64's finalizer (Steele, Lea and Flood, 2014; Stafford's variant).
_SHIFTS, _FACTORS = (30, 27, 31), (0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 1)


def keys(seed: int, stream: int) -> np.ndarray:
    """Random keys for `permuted`, [ROUNDS] uint64, different for each seed and stream."""
    return np.random.SeedSequence([seed, stream]).generate_state(ROUNDS, np.uint64)


def permuted(numbers: np.ndarray, size: int, keys: np.ndarray, epochs: np.ndarray) -> np.ndarray:
    """The position of each of these numbers in a random permutation of 0 to `size` - 1, which
    depends on `keys` and the epoch. All int64.

    The permutation is a Feistel network: a number is a cell of a nearly square table, and in turns
    its row and its column are shifted by a random function of the other. The table has less than
    one row of extra cells; a number that lands in one goes through the network again (Black and
    Rogaway, "Ciphers with arbitrary finite domains", 2002).
    """
    rows = math.isqrt(size - 1) + 1
    columns = -(-size // rows)

    def once(numbers: np.ndarray, epochs: np.ndarray) -> np.ndarray:
        row, column = np.divmod(numbers.astype(np.uint64), np.uint64(columns))
        of_epoch = _mix(epochs.astype(np.uint64) + keys[-1])
        for first, second in zip(keys[::2], keys[1::2], strict=True):
            row = (row + _mix(_mix(column + first) + of_epoch) % np.uint64(rows)) % np.uint64(rows)
            turn = _mix(_mix(row + second) + of_epoch) % np.uint64(columns)
            column = (column + turn) % np.uint64(columns)
        return (row * np.uint64(columns) + column).astype(np.int64)

    places = once(numbers, epochs)
    while (outside := places >= size).any():
        places[outside] = once(places[outside], epochs[outside])
    return places


def _mix(words: np.ndarray) -> np.ndarray:
    """A hash of each word, [...] uint64."""
    for shift, factor in zip(_SHIFTS, _FACTORS, strict=True):
        words = (words ^ (words >> np.uint64(shift))) * np.uint64(factor)
    return words


@dataclass(frozen=True)
class Part:
    """A range of consecutive tokens in a split, whose windows are shuffled separately. weight: its
    share of the samples."""

    name: str
    first: int
    tokens: int
    weight: float = 1.0

    def windows(self, block: int) -> int:
        """Number of windows of `block` tokens, each with its targets, that fit without overlap."""
        return (self.tokens - 1) // block


class Order:
    """Maps a sample's number to its training window.

    A part's windows come in a new shuffled order in each epoch. In each `BLOCK` samples of a
    mixture every part has its share, in random order.

    Args:
        before: samples before each step and in total, [steps + 1].

    Raises:
        UserError: a part would have no sample.
    """

    def __init__(self, seed: int, parts: Sequence[Part], before: np.ndarray) -> None:
        self.parts, self.before = tuple(parts), before
        self.ends = np.rint(np.cumsum([part.weight for part in parts]) * BLOCK).astype(np.int64)
        self.shares = np.diff(self.ends, prepend=0)
        for part, share in zip(parts, self.shares, strict=True):
            if not share:
                raise UserError(
                    f"data.weights: {part.name} has {part.weight}, less than one sample of "
                    f"{BLOCK:,}; leave it out, or give it more"
                )
        self.keys = [keys(seed, stream) for stream in range(len(parts) + 1)]
        self._of_block = lru_cache(maxsize=4)(self._assign)

    @property
    def steps(self) -> int:
        """Number of optimizer steps."""
        return len(self.before) - 1

    def starts(self, step: int, indices: np.ndarray, block: int) -> np.ndarray:
        """The first token of each of these samples' windows of `block` tokens, int64."""
        parts, numbers = self.numbers(int(self.before[step]) + indices)
        starts = np.empty_like(numbers)
        for index, part in enumerate(self.parts):
            own, count = parts == index, part.windows(block)
            if own.any():
                epochs, there = np.divmod(numbers[own], count)
                starts[own] = part.first + permuted(there, count, self.keys[index], epochs) * block
        return starts

    def numbers(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(the part that each sample comes from, its number among the samples of this part)."""
        if len(self.parts) == 1:
            return np.zeros_like(samples), samples
        parts, numbers = np.empty_like(samples), np.empty_like(samples)
        blocks, places = np.divmod(samples, BLOCK)
        for block in np.unique(blocks):
            own = blocks == block
            part, rank = self._of_block(int(block))
            parts[own] = part[places[own]]
            numbers[own] = block * self.shares[parts[own]] + rank[places[own]]
        return parts, numbers

    def epochs(self, block: int) -> dict[str, float]:
        """The number of times that the training goes through each part, by name, for windows of
        `block` tokens."""
        blocks, rest = divmod(int(self.before[-1]), BLOCK)
        parts, _ = self.numbers(np.arange(blocks * BLOCK, blocks * BLOCK + rest))
        counts = blocks * self.shares + np.bincount(parts, minlength=len(self.parts))
        return {
            part.name: int(count) / part.windows(block)
            for part, count in zip(self.parts, counts, strict=True)
        }

    def _assign(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """(the part of each sample of a block, the number of earlier samples of the block from the
        same part)."""
        places = permuted(np.arange(BLOCK), BLOCK, self.keys[-1], np.full(BLOCK, block))
        parts = np.searchsorted(self.ends, places, side="right")
        in_order = np.argsort(parts, kind="stable")
        ranks = np.empty_like(in_order)
        ranks[in_order] = np.arange(BLOCK) - (self.ends - self.shares)[parts[in_order]]
        return parts, ranks
