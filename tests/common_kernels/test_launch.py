"""Tests of what the Triton kernels share."""

import pytest
import torch

pytest.importorskip("triton", reason="no Triton for this platform")
import triton
import triton.language as tl

from common_kernels.launch import first_entries, join_groups, launch, split_groups
from tests.each import each

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@triton.jit
def place_kernel(out, start, lanes, M: tl.constexpr, BLOCK: tl.constexpr):
    at = first_entries(tl.load(start), lanes, M, BLOCK)
    tl.store(out + tl.arange(0, BLOCK), at)


@each("lanes", [1, 2, 3, 127, 128, 129, 1000, (1 << 31) + 3])
@each("start", [0, 1280, 8 * 129, (1 << 31) - 64, (1 << 33) + 5])
def test_first_entries(start, lanes):
    """Groups that lie in many rows, that meet the end of one, and whose numbers need 64 bits."""
    for m in (2, 4):
        out = torch.empty(128, dtype=torch.int64, device=DEVICE)
        first = torch.tensor(start, device=DEVICE)
        launch(place_kernel, 1, DEVICE, out, first, lanes, M=m, BLOCK=128)
        group = start + torch.arange(128)
        assert torch.equal(out.cpu(), group // lanes * m * lanes + group % lanes)


@triton.jit
def apart_kernel(x, out, LEVELS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK << LEVELS)
    parts = split_groups(tl.load(x + at), LEVELS)
    for i in tl.static_range(1 << LEVELS):
        tl.store(out + i * BLOCK + tl.arange(0, BLOCK), parts[i])
    tl.store(x + at, join_groups(parts, LEVELS) + 1)


@each("levels", range(6))
def test_groups_of_neighbours_taken_apart_and_put_together(levels):
    size = 1 << levels
    x = torch.arange(16 * size, dtype=torch.int32, device=DEVICE)
    out = torch.empty(size, 16, dtype=torch.int32, device=DEVICE)
    launch(apart_kernel, 1, DEVICE, x, out, LEVELS=levels, BLOCK=16)
    assert torch.equal(out.cpu(), torch.arange(16 * size, dtype=torch.int32).view(16, size).t())
    assert torch.equal(x.cpu(), 1 + torch.arange(16 * size, dtype=torch.int32))
