"""Prints the words of `tl.randint4x` for a few counters, then those that the sampling kernels draw;
run with TRITON_INTERPRET=1."""

import sys

import torch
import triton
import triton.language as tl

from common_kernels.mvue.triton import philox


@triton.jit
def words_kernel(out, key, COUNT: tl.constexpr, OWN: tl.constexpr):
    seed, counter = tl.load(key), tl.load(key + 1) + tl.arange(0, COUNT)
    w0, w1, w2, w3 = philox(seed, counter) if OWN else tl.randint4x(seed, counter)
    at = tl.arange(0, COUNT)
    tl.store(out + at, w0.to(tl.uint32, bitcast=True).to(tl.int64))
    tl.store(out + COUNT + at, w1.to(tl.uint32, bitcast=True).to(tl.int64))
    tl.store(out + 2 * COUNT + at, w2.to(tl.uint32, bitcast=True).to(tl.int64))
    tl.store(out + 3 * COUNT + at, w3.to(tl.uint32, bitcast=True).to(tl.int64))


key = torch.tensor([int(sys.argv[1]), int(sys.argv[2])])
out = torch.zeros(2, 4, 8, dtype=torch.int64)
for own in (False, True):
    words_kernel[(1,)](out[int(own)], key, COUNT=8, OWN=own)
print(out.tolist())
