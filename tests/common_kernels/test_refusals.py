"""Operators refuse wrong arguments before any work: a call a line."""

from dataclasses import replace

import pytest
import torch

import common_kernels as ck
from common_kernels.matmul import mm24
from common_kernels.matmul.pruned import compressed_mm24
from common_kernels.pack import Packed24
from common_kernels.pack.operands import pack24_, pack_both24_, sample_pack24

BF16, CPU = torch.bfloat16, torch.device("cpu")
X, WIDE, INTEGERS = torch.ones(4, 8), torch.ones(4, 8).double(), torch.ones(4, 8).long()
SIX, FIVE = torch.ones(4, 6), torch.ones(4, 5)
MASK = ck.nm_mask(X)
BITS = ck.pack_mask(MASK)
W, KEY = torch.randn(64, 128), torch.zeros(2, dtype=torch.int64)
VALUES, ROW_MASK = ck.compress_nm(W, ck.pack_mask(ck.nm_mask(W))), ck.pack_mask(ck.nm_mask(W))
OUT = Packed24.empty((64, 128), BF16, CPU)
SMALL, ACTUAL = ck.pack24(X, MASK), ck.pack24(W.bfloat16(), ck.nm_mask(W), "cusparselt_sm90")
FRAGMENTS = ck.fragments24(ACTUAL)

UNEVEN = {  # the message names the shape
    r"\(4, 6\)": [
        *(lambda f=f: f(SIX) for f in (
            ck.nm_mask, ck.soft_threshold24, ck.check24, ck.transposable_mask24, ck.relu24)),
        lambda: ck.compress_nm(SIX, BITS),
        lambda: ck.pack24(SIX, SIX.bool()),
    ],
    r"\(6, 4\)": [
        lambda: ck.nm_mask(torch.ones(6, 4), dim=0),
        lambda: ck.mvue24(torch.ones(6, 4), 1, dim=0),
        lambda: ck.double_prune_bits(torch.ones(6, 4), ck.pack_mask(torch.ones(6, 8).bool())),
    ],
    r"\(4, 5\)": [lambda: ck.geglu(FIVE), lambda: ck.swiglu(FIVE)],
}  # fmt: skip
VALUE = [
    lambda: ck.nm_mask(X, n=5),
    lambda: ck.flip_rate(MASK, MASK[:2]),
    lambda: ck.transposable_mask24(X, "best"),
    lambda: ck.soft_threshold24(X, 1.5),
    lambda: ck.fake_fp8(X, "e3m4"),
    lambda: ck.lowrank_addmm(torch.ones(2, 3), torch.ones(2, 4), torch.ones(3, 4)),
    lambda: ck.expand_nm(X, BITS),
    lambda: ck.pack24(X, MASK.t()),
    lambda: ck.pack24(X, MASK, "sm_90"),
    lambda: replace(SMALL, shape=(4, 16)),
    lambda: Packed24.empty((96, 64), BF16, CPU),
    lambda: pack24_(Packed24.empty((64, 96), BF16, CPU), W[:, :96], "magnitude"),
    lambda: pack_both24_(OUT, OUT, W),
    lambda: sample_pack24(torch.ones(64, 96), KEY),
    lambda: ck.matmul24(ACTUAL, W[:, :64].bfloat16()),
    lambda: mm24(ACTUAL, torch.ones(136, 96).bfloat16()),
    lambda: compressed_mm24(W.bfloat16(), VALUES, ROW_MASK, ROW_MASK[:, :8]),
    lambda: ck.fragments24(ck.pack24(torch.zeros(16, 60).half(), torch.zeros(16, 60).bool())),
    lambda: ck.few_tokens24(FRAGMENTS, torch.zeros(17, 128).bfloat16()),
]
TYPE = [
    *(
        lambda call=call: call(WIDE)
        for call in (
            ck.nm_mask, ck.soft_threshold24, ck.swiglu, lambda x: ck.mvue24(x, 1), ck.relu24,
        )
    ),
    lambda: ck.transposable_mask24(INTEGERS),
    lambda: ck.pack24(INTEGERS, MASK),
    lambda: ck.pack_mask(BITS),
    *(
        lambda bad=bad, name=name: ck.mvue24(X, **{"seed": 1, name: bad})
        for name in ("seed", "offset")
        for bad in (torch.tensor(1.0), torch.tensor([1, 2]))
    ),
]  # fmt: skip
INDEX = [lambda: ck.nm_mask(X, dim=2), lambda: ck.geglu(torch.tensor(1.0))]


@pytest.mark.parametrize(
    ("error", "said", "calls"),
    [
        *((ValueError, shape, calls) for shape, calls in UNEVEN.items()),
        (ValueError, None, VALUE), (TypeError, None, TYPE), (IndexError, None, INDEX),
    ],
)  # fmt: skip
def test_each_is_refused(error, said, calls):
    for call in calls:
        try:
            with pytest.raises(error, match=said):
                call()
        except BaseException as found:
            found.add_note(f"line {call.__code__.co_firstlineno}")
            raise
