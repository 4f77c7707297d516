"""Prints the words of `tl.randint4x` for a few counters; run with TRITON_INTERPRET=1."""

import sys

import torch
import triton
import triton.language as tl


@triton.jit
def words_kernel(out, seed, first, COUNT: tl.constexpr):
    counter = first + tl.arange(0, COUNT)
    w0, w1, w2, w3 = tl.randint4x(seed, counter)
    at = tl.arange(0, COUNT)
    tl.store(out + at, w0.to(tl.uint32, bitcast=True).to(tl.int64))
    tl.store(out + COUNT + at, w1.to(tl.uint32, bitcast=True).to(tl.int64))
    tl.store(out + 2 * COUNT + at, w2.to(tl.uint32, bitcast=True).to(tl.int64))
    tl.store(out + 3 * COUNT + at, w3.to(tl.uint32, bitcast=True).to(tl.int64))


out = torch.zeros(4, 8, dtype=torch.int64)
words_kernel[(1,)](out, int(sys.argv[1]), torch.tensor(int(sys.argv[2])).item(), COUNT=8)
print(out.tolist())
