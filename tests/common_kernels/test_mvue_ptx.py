"""The PTX that samples two groups at once, run instruction by instruction in NumPy, against cpu.py:
Triton's interpreter cannot run it."""

import numpy as np
import torch

from common_kernels.mvue import cpu, ptx
from common_kernels.pack.cpu import compress
from tests.each import each

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}


def bits(a):
    return np.asarray(a, np.float32).view(np.uint32)


def floats(operation):
    """An operation on fp32, as one on registers."""
    return lambda *a: bits(operation(*(x.view(np.float32) for x in a)))


def compared(relation):
    """A condition on fp32, and with another one, if it has a third operand."""
    return lambda a, b, *also: np.logical_and.reduce(
        [relation(a.view(np.float32), b.view(np.float32)), *also]
    )


def half(kind, a):
    """fp32 rounded to a 16-bit type, as its bits in a register."""
    rounded = torch.from_numpy(np.array(a, np.float32)).to(DTYPES[kind])
    return rounded.view(torch.int16).numpy().view(np.uint16).astype(np.uint32)


def single(kind, a):
    """fp32 of the bits in the lower half of a register."""
    lower = torch.from_numpy((a & 0xFFFF).astype(np.uint16).view(np.int16))
    return lower.view(DTYPES[kind]).float().numpy()


def halves(kind, operation):
    """An operation on two 16-bit floats at once."""

    def both(*a):
        low, high = (operation(*(single(kind, x >> shift) for x in a)) for shift in (0, 16))
        return half(kind, low) | half(kind, high) << 16

    return both


def larger_with_both_signs(a, b):
    return np.copysign(np.maximum(abs(a), abs(b)), np.copysign(1, a) * np.copysign(1, b))


def prmt(a, b, selector):
    eight = [(x >> 8 * i) & 0xFF for x in (a, b) for i in range(4)]
    assert not (selector & 0x8888).any()  # those would spread a sign
    taken = [np.choose((selector >> 4 * i) & 7, eight) for i in range(4)]
    return taken[0] | taken[1] << 8 | taken[2] << 16 | taken[3] << 24


def one_or_zero(condition):
    return lambda *a: bits(condition(*a))


at_most, above = compared(np.less_equal), compared(np.greater)
INSTRUCTIONS = {
    "mov.b32": lambda a: a,
    "shl.b32": lambda a, n: a << n,
    "shr.u32": lambda a, n: a >> n,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "add.u32": lambda a, b: a + b,
    "min.u32": np.minimum,
    "prmt.b32": prmt,
    "abs.f32": floats(np.abs),
    "add.f32": floats(np.add),
    "sub.f32": floats(np.subtract),
    "sub.sat.f32": floats(lambda a, b: np.clip(a - b, 0, 1)),
    "mul.f32": floats(np.multiply),
    "min.f32": floats(np.fmin),
    "max.f32": floats(np.fmax),
    "min.NaN.f32": floats(np.minimum),
    # Exact here before they are rounded, so in two steps too.
    "fma.rn.f32": floats(lambda a, b, c: a * b + c),
    "cvt.rn.f32.u32": bits,
    "cvt.f32.f16": lambda a: bits(single("f16", a)),
    "selp.f32": lambda a, b, condition: np.where(condition, a, b),
    "setp.gt.f32": above,
    "setp.gt.and.f32": above,
    "set.le.f32.f32": one_or_zero(at_most),
    # Greater, or a NaN.
    "set.gtu.and.f32.f32": one_or_zero(compared(lambda a, b: ~(a <= b))),
}
for _kind in DTYPES:
    INSTRUCTIONS |= {
        f"cvt.rn.{_kind}x2.f32": lambda a, b, k=_kind: (
            half(k, a.view(np.float32)) << 16 | half(k, b.view(np.float32))
        ),
        f"max.NaN.xorsign.abs.{_kind}x2": halves(_kind, larger_with_both_signs),
        f"max.NaN.{_kind}x2": halves(_kind, np.maximum),
        f"fma.rn.{_kind}x2": halves(_kind, lambda a, b, c: a * b + c),
    }  # fmt: skip


def run(code, registers):
    """The registers, by name, after the code of a block."""

    def read(operand):
        if operand.startswith("!"):
            return ~registers[operand[1:]]
        if operand.startswith("0f"):
            return np.full(1, int(operand[2:], 16), np.uint32)
        number = operand[0].isdigit()
        return np.full(1, int(operand, 0), np.uint32) if number else registers[operand]

    lines = (line.split("//")[0].strip() for line in code.split("\n"))
    for line in lines:
        if line in ("", "{", "}") or line.startswith(".reg"):
            continue
        name, _, operands = line.removesuffix(";").partition(" ")
        if operands.startswith("{"):
            low, high, both = operands.replace("{", "").replace("}", "").split(", ")
            registers[low], registers[high] = registers[both] & 0xFFFF, registers[both] >> 16
        else:
            target, *sources = operands.split(", ")
            registers[target] = INSTRUCTIONS[name](*map(read, sources))
    return registers


def sampled(kind, xorsign, x, words):
    """The stored entries `[n, 2]` and the nibbles `[n]` of groups `[n, 4]`, n even."""
    entries = x.contiguous().view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
    pairs = (entries[::2] | entries[1::2] << 16).T.copy()
    two = words.numpy().astype(np.uint32).reshape(-1, 2).T.copy()
    registers = {f"${4 + i}": pairs[i] for i in range(4)} | {"$8": two[0], "$9": two[1]}
    with np.errstate(all="ignore"):
        run(ptx.sample(kind, xorsign), registers)
    stored = np.stack([registers["$0"], registers["$1"]], 1)
    stored = torch.from_numpy(stored.view(np.int32).reshape(-1)).view(DTYPES[kind]).view(-1, 2)
    less_4 = np.stack([registers["$2"], registers["$3"]], 1).view(np.float32).reshape(-1)
    return stored, torch.from_numpy(less_4) + 4


def groups(kind, hard_groups, generator):
    """Hard ones, any bits, entries of many sizes, and one that is about the sum of the others."""
    dtype, n = DTYPES[kind], 1 << 14
    anything = torch.randint(-(1 << 15), 1 << 15, (n, 4), generator=generator).to(torch.int16)
    exponents = torch.randint(-12, 12, (n, 4), generator=generator)
    spread = torch.randn(n, 4, generator=generator) * 2.0**exponents
    nearly = torch.randn(n, 4, generator=generator).to(dtype).float()
    nearly[:, 0] = nearly[:, 1:].abs().sum(1)
    nearly = nearly.gather(1, torch.rand(n, 4, generator=generator).argsort(1))
    parts = [hard_groups(2048, dtype), anything.view(dtype), spread.to(dtype), nearly.to(dtype)]
    x = torch.cat(parts)
    words = torch.randint(0, 1 << 32, (len(x),), generator=generator)
    words[::8], words[1::8] = (1 << 32) - 1, 0
    return x, words


@each("kind", ["bf16", "f16"])
@each("xorsign", [True, False])
def test_the_ptx_samples_as_cpu_does(kind, xorsign, hard_groups, generator):
    """A NaN stays, and its group is legal."""
    x, words = groups(kind, hard_groups, generator)
    stored, nibbles = sampled(kind, xorsign, x, words)
    a = x.float()
    sample = cpu.exact(a.T.contiguous(), cpu.uniform(words)[None])
    sample = sample.T.contiguous()
    # Without a NaN, nor 0 times infinity.
    lost = a.isnan().any(1)
    known = torch.where(words < 256, a.abs().sum(1), a.nan_to_num(posinf=0, neginf=0).sum(1))
    known = known.isfinite() & ~lost
    want, positions = compress(sample.to(x.dtype)[known], (sample != 0)[known])
    assert known.sum() > 50_000
    assert torch.equal(nibbles[known].to(torch.uint8), positions.view(-1).to(torch.uint8))
    assert torch.equal(stored[known].view(torch.int16), want.view(-1, 2).view(torch.int16))
    assert lost.any() and stored[lost].isnan().any(1).all()
    first, second = nibbles.int() & 3, nibbles.int() >> 2
    assert ((first < second) & (second < 4)).all()
