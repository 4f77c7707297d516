"""Products with few tokens: the fragments hold the matrix as mma.sp reads it, and the kernel
multiplies with them. A GPU runs the instruction; elsewhere it is executed here, lane by lane."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from common_kernels import few_tokens24, fragments24, nm_mask, pack24
from common_kernels.backend import HAS_TRITON
from common_kernels.decode import MOST, cpu, reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def given(rows, columns, tokens, dtype, values=None):
    """A packed matrix, some of its groups with fewer than two entries, and x."""
    draw = torch.Generator().manual_seed(rows + columns)
    w = torch.randn(rows, columns, generator=draw)
    mask = nm_mask(w) & (torch.rand(w.shape, generator=draw) < 0.9)
    w, x = (w if values is None else values(w)) * mask, torch.randn(tokens, columns, generator=draw)
    w, x = w.to(dtype), (x if values is None else values(x)).to(dtype)
    return w, fragments24(pack24(w.to(DEVICE), mask.to(DEVICE))), x


def test_fragments_multiply_by_the_definition_of_mma_sp():
    """Whole numbers, so that nothing is rounded."""
    for dtype, rows, columns in ((torch.bfloat16, 32, 128), (torch.float16, 16, 64)):
        w, packed, x = given(rows, columns, 3, dtype, lambda t: (8 * t).round().clamp(-30, 30))
        held = packed.values.cpu(), packed.meta.cpu()
        assert sum(t.nbytes for t in held) == w.nbytes * 9 // 16
        assert torch.equal(cpu.matrix(*held, rows, dtype), w)
        want = x.double() @ w.double().t()
        assert torch.equal(reference.few_tokens24(*held, x, rows), want)


@pytest.mark.gpu
def test_products_with_few_tokens():
    """One rounding to the dtype, and some of fp32 sums; tensor cores truncate two bits."""
    shapes = ((64, 64, 1), (48, 192, 3), (2048, 320, 8), (128, 4096, 9), (16, 1024, MOST))
    for rows, columns, tokens in (*shapes, (16, 64, 0)):
        for dtype in (torch.bfloat16, torch.float16):
            w, packed, x = given(rows, columns, tokens, dtype)
            for bias in (None, torch.linspace(-1, 1, rows).to(dtype)):
                on = x.to(DEVICE), None if bias is None else bias.to(DEVICE)
                got = few_tokens24(packed, *on).cpu().double()
                added = 0 if bias is None else bias.double()
                want = x.double() @ w.double().t() + added
                sizes = x.double().abs() @ w.double().abs().t()
                bound = torch.finfo(dtype).eps / 2 * want.abs() + columns * 2**-22 * sizes
                assert got.shape == (tokens, rows) and ((got - want).abs() <= bound).all()


def entries(registers, dtype):
    """The 16-bit entries of registers `[...]` of a dtype, as `[..., entries of a register]`."""
    words = torch.tensor(
        registers.tolist(), dtype={8: torch.int64, 4: torch.int32}[registers.itemsize]
    )
    return words[..., None].view(dtype).double().numpy()


def executed(dtype):
    """The two products of each warp by the definition of the instruction (PTX ISA)."""

    def warp_product(_, a, b, sums):
        given = [*a, *b, *sums]
        registers = [tensor.handle.data.reshape(-1, 8, 4) for tensor in given]  # warp, g, q
        a = np.stack([entries(r, dtype) for r in registers[:4]], -2)  # ..., product and p, entries
        words = np.stack([registers[4][..., q].astype(np.int64) for q in range(4)], -1)
        b = np.stack([entries(r, dtype) for r in registers[5:13]], -2)  # ..., product and i, pair
        sums = [r.copy() for r in registers[13:]]
        for warp, g, q in np.ndindex(registers[0].shape):
            for half, product, p, low in np.ndindex(2, 2, 2, 2):
                stored, row = 8 * p + 2 * q + low, words[warp, g, 2 * product + p]
                place = row >> 16 * half + 2 * (stored % 8) & 3
                column = 4 * (stored // 2) + place  # of the product's 32
                value = a[warp, g, q, 2 * product + p, 2 * half + low]
                of = column % 8 // 2, 4 * product + column // 8, column % 2
                for token in range(8):
                    x = b[warp, token, of[0], of[1], of[2]]
                    sums[2 * half + token % 2][warp, g, token // 2] += value * x
        handle = given[13].handle  # the four sums are one tensor before the first product
        made = (type(handle)(total.reshape(-1), handle.dtype) for total in sums)
        return tuple(type(given[13])(total, given[13].type) for total in made)

    return warp_product


@pytest.mark.skipif(not HAS_TRITON or DEVICE == "cuda", reason="needs Triton's interpreter")
def test_the_kernel_multiplies_as_the_instruction_is_defined(monkeypatch):
    from common_kernels.decode import triton

    for dtype, rows, columns, tokens in (
        (torch.bfloat16, 32, 576, 3), (torch.float16, 16, 64, 11), (torch.bfloat16, 64, 64, 16),
    ):  # fmt: skip
        monkeypatch.setattr(triton, "warp_product", executed(dtype))
        w, packed, x = given(rows, columns, tokens, dtype)
        x = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)  # begins at an odd entry
        bias = torch.linspace(-1, 1, 2 * rows).to(dtype)[::2]
        got = triton.few_tokens24(packed.values, packed.meta, x, bias, rows).double()
        want = x.double() @ w.double().t() + bias.double()
        assert ((got - want).abs() <= torch.finfo(dtype).eps * (1 + want.abs())).all()


COMPILED = """
import re, torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from common_kernels.decode import triton as decode
types = dict(values="*i64", meta="*i32", x="*i32", bias="*bf16", y="*bf16",
             tokens="i32", rows="i32", parts="i32")
aligned = {(i,): [["tt.divisibility", 16]] for i in range(7) if i != 5}
for architecture, two in ((80, 1), (86, 0), (89, 0), (90, 0), (90, 1), (100, 1), (120, 1)):
    constants = dict(PRODUCT=decode.PRODUCTS[torch.bfloat16], BIAS=True, TWO=bool(two),
                     TILES=1 + two, UNROLL=2 - two, WARPS=4)
    signature = types | dict.fromkeys(constants, "constexpr")
    source = ASTSource(decode.few_tokens_kernel, signature, constants, aligned)
    target = GPUTarget("cuda", architecture, 32)
    found = triton.compile(source, target=target, options=dict(num_warps=4, num_stages=1)).asm
    assert "mma.sp" in found["ptx"]
    (layout,) = set(re.findall("mma.sp.*-> tensor<128xf32, (#\\w+)>", found["ttgir"]))
    own = "<{sizePerThread = [1], threadsPerWarp = [32], warpsPerCTA = [4], order = [0]}>"
    assert f"{layout} = #ttg.blocked{own}" in found["ttgir"], architecture
"""


@pytest.mark.skipif(not HAS_TRITON, reason="no Triton for this platform")
def test_the_kernel_compiles_for_all_gpus_with_an_entry_for_each_thread():
    """If Triton dealt the entries out in another way, lanes would multiply with those of others."""
    own = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILED], env=own, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
