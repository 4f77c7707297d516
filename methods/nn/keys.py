"""Seeds for the random choices of layers, which are equal on every rank and after a resume."""

from __future__ import annotations

import hashlib


def layer_seed(seed: int, name: str, step: int) -> int:
    """The 63-bit Philox seed of one layer in one optimizer step."""
    digest = hashlib.blake2b(f"{seed}/{name}/{step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
