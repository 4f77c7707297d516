"""Products with few tokens: the fragments hold the matrix as mma.sp reads it, and the kernel
multiplies with them. A GPU runs the instruction; elsewhere it is executed here, lane by lane."""

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from common_kernels import dequantize24, few_tokens24, fragments24, nm_mask, pack24, quantize24
from common_kernels.backend import HAS_TRITON
from common_kernels.decode import MOST, cpu, reference
from common_kernels.pack.quantized import integers

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def given(rows, columns, tokens, dtype, values=None, bits=16):
    """A matrix and its fragments, some of its groups with fewer than two entries, and x."""
    draw = torch.Generator().manual_seed(rows + columns)
    w = torch.randn(rows, columns, generator=draw)
    mask = nm_mask(w) & (torch.rand(w.shape, generator=draw) < 0.9)
    w, x = (w if values is None else values(w)) * mask, torch.randn(tokens, columns, generator=draw)
    w, x = w.to(dtype), (x if values is None else values(x)).to(dtype)
    packed = pack24(w.to(DEVICE), mask.to(DEVICE))
    if bits < 16:
        packed = quantize24(packed, bits)
        w = dequantize24(packed, torch.float32).cpu()
    return w, fragments24(packed, dtype), x


def test_fragments_multiply_by_the_definition_of_mma_sp():
    """Whole numbers, so that nothing is rounded; scales are bf16 and integers at most 127."""
    for dtype, rows, columns, bits in (
        (torch.bfloat16, 32, 128, 16), (torch.float16, 16, 64, 16),
        (torch.bfloat16, 32, 192, 8), (torch.float16, 16, 320, 4),
    ):  # fmt: skip
        whole = lambda t: (8 * t).round().clamp(-30, 30)  # noqa: E731
        w, packed, x = given(rows, columns, 3, dtype, whole, bits)
        held = [None if t is None else t.cpu() for t in (packed.values, packed.meta, packed.scales)]
        assert packed.bits == bits
        assert sum(t.nbytes for t in held[:2]) == rows * columns * (bits + 2) // 16
        found = cpu.matrix(*held, rows, columns, dtype)
        assert torch.equal(found, w) and found.dtype == (dtype if bits == 16 else torch.float32)
        want = x.double() @ w.double().t()
        assert torch.equal(reference.few_tokens24(*held, x, rows), want)


def test_quantised_by_definition_and_again():
    for dtype, bits, columns in (
        (torch.bfloat16, 4, 320), (torch.float32, 8, 128), (torch.float16, 4, 20),
        (torch.bfloat16, 8, 1000), (torch.float16, 8, 128),
    ):  # fmt: skip
        w = torch.randn(8, columns, generator=torch.Generator().manual_seed(0)).to(dtype)
        w[0], w[1, :4] = 0, torch.tensor([0.0, 7, 2.5, 0.0])
        packed = pack24(w, nm_mask(w))
        found, top = quantize24(packed, bits), 2 ** (bits - 1) - 1
        values = found.values if bits == 8 else integers(found.values)
        given = packed.values.double()
        for row in range(8):
            for run in range(-(-columns // 128)):
                own = slice(64 * run, 64 * run + 64)
                largest = given[row, own].abs().max()
                scale = float(found.scales[row, run])
                assert scale == float((largest / top).to(torch.bfloat16))
                for value, integer in zip(given[row, own], values[row, own], strict=True):
                    nearest = round(float(value) / scale) if scale else 0
                    assert int(integer) == max(-top, min(top, nearest))
        dense = dequantize24(found, dtype)
        step = found.scales.double().repeat_interleave(128, 1)[:, :columns]
        # Half a step, the largest value by the rounding of its scale, and a rounding to dtype.
        error = (dense.double() - w.double() * nm_mask(w)).abs()
        assert (error <= step * (0.5 + top * 2**-8) * (1 + 2**-7)).all()
        again = quantize24(pack24(dense, nm_mask(w)), bits)
        assert torch.equal(again.values, found.values)
        assert torch.equal(again.scales, found.scales)
        assert found.shape == (8, columns) and found.bits == bits


@pytest.mark.gpu
def test_products_with_few_tokens():
    """One rounding to the dtype, and some of fp32 sums; tensor cores truncate two bits."""
    shapes = ((64, 64, 1), (48, 192, 3), (2048, 320, 8), (128, 4096, 9), (16, 1024, MOST))
    for rows, columns, tokens in (*shapes, (16, 64, 0)):
        for dtype, bits in itertools.product((torch.bfloat16, torch.float16), (16, 8, 4)):
            w, packed, x = given(rows, columns, tokens, dtype, bits=bits)
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

    def warp_product(_, values, places, b, sums):
        given = [places, *sums]
        lanes = lambda t: t.handle.data.reshape(-1, 8, 4)  # noqa: E731 - warp, g, q
        registers = [lanes(tensor) for tensor in given]
        a = np.stack([entries(lanes(v), dtype) for v in values], -2)
        a = a.reshape(*a.shape[:3], 4, 4)  # ..., product and p, entries
        words = np.stack([registers[0][..., q].astype(np.int64) for q in range(4)], -1)
        b = np.stack([entries(lanes(v), dtype) for v in b], -2)  # ..., product and i, pair
        sums = [r.copy() for r in registers[1:]]
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
        handle = given[1].handle  # the four sums are one tensor before the first product
        made = (type(handle)(total.reshape(-1), handle.dtype) for total in sums)
        return tuple(type(given[1])(total, given[1].type) for total in made)

    return warp_product


def unpacked(code, bits, word):
    """The instructions of the code for words of integers, one after the other."""
    count = 16 // bits
    registers = {f"${count}": word.handle.data.view(np.uint32)}
    for line in code.splitlines()[2:-1]:
        operation, name, *names = line.strip(";").replace(",", "").split()
        a, *more = (registers[n] if n in registers else np.uint32(int(n, 0)) for n in names)
        if operation == "mov.b32":
            made = np.full_like(registers[f"${count}"], a)
        elif operation == "shr.b32":
            made = a >> more[0]
        elif operation == "lop3.b32":
            made = {0x6A: a & more[0] ^ more[1], 0xEA: a & more[0] | more[1]}[int(more[2])]
        else:  # of pairs of floats, exact here
            dtype = {"fma.rn.bf16x2": torch.bfloat16, "fma.rn.f16x2": torch.float16}[operation]
            a, b, c = (torch.from_numpy(x.view(np.int32)).view(dtype).double() for x in (a, *more))
            made = (a * b + c).to(dtype).view(torch.int32).numpy().view(np.uint32)
        registers[name] = made
    kind, like = type(word.handle), word.handle.dtype
    found = (registers[f"${j}"].view(np.int32) for j in range(count))
    return tuple(type(word)(kind(r, like), word.type) for r in found)


@pytest.mark.skipif(not HAS_TRITON or DEVICE == "cuda", reason="needs Triton's interpreter")
def test_the_kernel_multiplies_as_the_instruction_is_defined(monkeypatch):
    from common_kernels.decode import triton

    for dtype, rows, columns, tokens, bits in (
        (torch.bfloat16, 32, 576, 3, 16), (torch.float16, 16, 64, 11, 16),
        (torch.bfloat16, 64, 64, 16, 16), (torch.bfloat16, 32, 576, 3, 4),
        (torch.float16, 16, 192, 11, 8), (torch.bfloat16, 64, 192, 16, 8),
        (torch.float16, 64, 128, 16, 4), (torch.bfloat16, 16, 576, 6, 4),
    ):  # fmt: skip
        monkeypatch.setattr(triton, "warp_product", executed(dtype))
        monkeypatch.setattr(triton, "unpacked", unpacked)
        w, packed, x = given(rows, columns, tokens, dtype, bits=bits)
        x = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)  # begins at an odd entry
        bias = torch.linspace(-1, 1, 2 * rows).to(dtype)[::2]
        held = packed.values, packed.meta, packed.scales
        got = triton.few_tokens24(*held, x, bias, rows).double()
        want = x.double() @ w.double().t() + bias.double()
        assert ((got - want).abs() <= torch.finfo(dtype).eps * (1 + want.abs())).all()


COMPILED = """
import re, torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from common_kernels.decode import triton as decode
types = dict(values="*i64", meta="*i32", scales="*i32", x="*i32", bias="*bf16", y="*bf16",
             tokens="i32", rows="i32", parts="i32")
aligned = {(i,): [["tt.divisibility", 16]] for i in range(8) if i != 6}
for architecture, two, bits in (
    (80, 1, 4), (86, 0, 16), (89, 0, 8), (90, 0, 16), (90, 1, 16), (90, 0, 4), (100, 1, 16),
    (120, 1, 4),
):
    dtype = torch.bfloat16
    constants = dict(PRODUCT=decode.PRODUCTS[dtype], BITS=bits,
                     UNPACKING=decode.UNPACKING.get((dtype, bits), ""), BIAS=True, TWO=bool(two),
                     ARRANGED=bits < 16, TILES=1 + two, DEPTH=1 + (bits < 16), UNROLL=2 - two,
                     WARPS=4)
    signature = types | dict.fromkeys(constants, "constexpr")
    signature["x"] = "*i64" if bits < 16 else "*i32"
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
