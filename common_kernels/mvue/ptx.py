"""Sampling of two neighbouring groups of 16-bit entries in PTX. It gives the bits of
triton.sample_stored in two thirds of the instructions that Triton compiles it to.

It saves instructions in three ways: entries are selected and stored as 16-bit values by moving
bytes; conditions are floats, 1.0 or 0.0, because a GPU adds floats faster than it combines bits;
and only the comparisons that a packed group needs are made. Compute capability 8.0 lacks one of
the instructions and takes four in its place.
"""

# Operands of the inline assembly: the stored pairs of both groups, their nibbles, then entries 0 to
# 3 (the second group's in the upper half of each word), and a random word for each group.
CONSTRAINTS = "=&r,=&r,=&f,=&f,r,r,r,r,r,r"


def sample(kind: str, xorsign: bool = True) -> str:
    """The code for entries of a kind, "bf16" or "f16"; `xorsign`: from compute capability 8.6 on.

    For each group it returns the two stored entries, the first in the lower half, and as a float
    the nibble of their positions minus 4: i + 4 (j - 1), with i = 0, 1, 2 and j = 1, 2, 3.
    """
    one = {"bf16": "0x3f803f80", "f16": "0x3c003c00"}[kind]
    return f"""{{
.reg .b32 a0, a1, a2, a3, s01, s23, m01, o01, o2, o3, h, p, t, i, k, lone, pair, one, zero;
.reg .b16 low, high;
.reg .pred d01, d2;
mov.b32 one, {one};
mov.b32 zero, 0;
{group(kind, 0, xorsign)}{group(kind, 1, xorsign)}}}"""


def group(kind: str, number: int, xorsign: bool) -> str:
    """The code for one of the two groups."""
    stored, nibble, word = f"${number}", f"${2 + number}", f"${8 + number}"
    half = ("0x5410", "0x7632")[number]
    larger = f"max.NaN.xorsign.abs.{kind}x2 pair, pair, p;"
    if not xorsign:
        larger = f"""and.b32 i, pair, 0x80008000;
and.b32 pair, pair, 0x7fff7fff;
max.NaN.{kind}x2 pair, pair, p;
or.b32 pair, pair, i;"""
    entries = "".join(widened(kind, f"a{i}", f"${4 + i}", number) for i in range(4))
    return f"""{entries}
// H, as in cpu.exact: the others of the larger of 0 and 1 have the lesser sum, in floats, too.
abs.f32 a0, a0;
abs.f32 a1, a1;
abs.f32 a2, a2;
abs.f32 a3, a3;
add.f32 s01, a0, a1;
add.f32 s23, a2, a3;
min.f32 m01, a0, a1;
add.f32 o01, m01, s23;
add.f32 o2, a3, s01;
add.f32 o3, a2, s01;
mul.f32 h, s23, 0f3F000000; // 1/2: exact, as the entries have 16 bits
fma.rn.f32 h, s01, 0f3F000000, h;
min.NaN.f32 h, h, o01;
min.NaN.f32 t, o2, o3;
min.NaN.f32 h, h, t;

// p = u H, less than H: of floats that are not negative the bits rank as they do.
shr.u32 t, {word}, 8;
cvt.rn.f32.u32 p, t;
mul.f32 p, p, 0f33800000; // 2^-24
mul.f32 p, p, h;
add.u32 t, h, 0xffffffff;
min.u32 p, p, t;

// Which entry is dominant: 0 or 1, which then is the larger of them, or 2.
max.f32 t, a0, a1;
setp.gt.f32 d01, t, o01;
setp.gt.f32 d2, a2, o2;

// i = (a0 <= p) + (s01 <= p): the first draw.
set.le.f32.f32 i, a0, p;
set.le.f32.f32 t, s01, p;
add.f32 i, i, t;

// lone = not (a0 - H <= p or d01): the second draw is entry 0, as the first is then.
sub.f32 t, a0, h;
set.gtu.and.f32.f32 lone, t, p, !d01;

// k = j - 1 for the second draw j of triton.draw: whether it comes after 1, and after 2. A lone
// entry 0 has 2 beside it.
sub.f32 t, s01, h;
selp.f32 t, m01, t, d01;
set.le.f32.f32 k, t, p;
sub.f32 t, o3, h;
selp.f32 t, s01, t, d2;
add.f32 m01, m01, a2;
setp.gt.and.f32 d01, h, 0f00000000, d01; // with H = 0 it stays at 2, beside a lone 0 or 1
selp.f32 t, m01, t, d01;
set.le.f32.f32 t, t, p;
add.f32 k, k, t;
add.f32 k, k, lone;

// Both draws are entry 1, or 2, where i = k + 1: alone it has the next one beside it.
sub.sat.f32 t, i, k;
add.f32 k, k, t;
add.f32 lone, lone, t;
fma.rn.f32 {nibble}, k, 0f40800000, i; // 4

// Entry n is bytes 2 n and 2 n + 1 of the four: the bytes to take are 0x3210 + 0x22 (i + 256 k),
// which added to 2^23 are the low bits of a float.
fma.rn.f32 t, k, 0f43800000, i; // 256
fma.rn.f32 t, t, 0f42080000, 0f4B003210; // 0x22, 2^23 + 0x3210
prmt.b32 pair, $4, $5, {half};
prmt.b32 p, $6, $7, {half};
prmt.b32 pair, pair, p, t;

// max(|x|, H) with the sign of x: to round H first is the same, for x is rounded. Then -0 is made
// +0, and a lone entry's neighbour: its bytes are 0x4410, the first of the zero's.
cvt.rn.{kind}x2.f32 p, h, h;
{larger}
fma.rn.{kind}x2 pair, pair, one, zero;
fma.rn.f32 t, lone, 0f45900000, 0f4B003210; // 0x1200, 2^23 + 0x3210
prmt.b32 {stored}, pair, zero, t;
"""


def widened(kind: str, entry: str, halves: str, number: int) -> str:
    """The code that converts one of a word's two entries to fp32."""
    if kind == "bf16":  # the upper half of an fp32
        cut = ("shl.b32 {}, {}, 16;\n", "and.b32 {}, {}, 0xffff0000;\n")[number]
        return cut.format(entry, halves)
    half = ("low", "high")[number]
    return f"mov.b32 {{low, high}}, {halves};\ncvt.f32.f16 {entry}, {half};\n"
