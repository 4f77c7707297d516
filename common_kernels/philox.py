"""Philox4x32-10 in int64 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011).

The words are those of Triton's `tl.randint4x(seed, counter)`: all backends draw the same bits.
"""

import torch

WORD = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox4x32(seed: int | torch.Tensor, counter: torch.Tensor) -> Words:
    """Four random 32-bit words for each counter.

    Args:
        seed: the 64-bit key, an int or a 0-dim int64 tensor.
        counter: int64 tensor of any shape; the 128-bit counter is (low word, high word, 0, 0).

    Returns:
        Four int64 tensors of counter's shape, each entry in [0, 2^32).
    """
    zeros = torch.zeros_like(counter)
    return rounds(seed, (counter & WORD, counter >> 32 & WORD, zeros, zeros))


def rounds(seed: int | torch.Tensor, counter: Words) -> Words:
    """The ten rounds of Philox. The counter is four int64 tensors with entries in [0, 2^32)."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & WORD, seed >> 32 & WORD
    for _ in range(ROUNDS):
        # The products wrap as unsigned 64-bit numbers do.
        left, right = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1 = (right >> 32 & WORD) ^ c1 ^ k0, right & WORD
        c2, c3 = (left >> 32 & WORD) ^ c3 ^ k1, left & WORD
        k0, k1 = k0 + WEYL[0] & WORD, k1 + WEYL[1] & WORD
    return c0, c1, c2, c3
