"""Tests of what the Triton kernels share."""

import pytest
import torch

pytest.importorskip("triton", reason="no Triton for this platform")
import triton
import triton.language as tl

from common_kernels.launch import first_entries, launch
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
