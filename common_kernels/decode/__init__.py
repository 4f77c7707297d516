"""Products of a 2:4 matrix with few tokens, as in decoding.

With few tokens the time of a product is that of reading the weight, of which a packed 2:4 matrix
has 9/16 of the bytes. `fragments24` stores one in the order in which the sparse units of a GPU take
it (PTX: mma.sp.m16n8k32), so that it is read once, in whole lines, straight into registers. With
values of 8 or 4 bits it has 0.32 or 0.2 of the bytes.
"""

from dataclasses import dataclass

import torch

from common_kernels import backend as backends
from common_kernels import checks
from common_kernels.decode import cpu
from common_kernels.library import operator_of
from common_kernels.pack import Packed24, convert24
from common_kernels.pack.quantized import Quantized24
from common_kernels.pack.quantized import integers as integers_of

DTYPES = (torch.bfloat16, torch.float16)
MOST = 16  # tokens of a product on the sparse units (mma.sp)
ROWS, COLUMNS = cpu.ROWS, cpu.COLUMNS


@dataclass(frozen=True, eq=False)
class Fragments24:
    """A 2:4 matrix of `shape` [rows, columns] for products in `dtype`.

    values: int64 `[rows * columns * bits / 128]`, with values of 16, 8 or 4 bits.
    meta: int32 `[rows * columns / 32]`.
    scales: None, or int32 `[rows / 2 * groups of 128 columns]`, of integers: two bf16 in each.
        `reference.py` defines the order of all.
    """

    values: torch.Tensor
    meta: torch.Tensor
    shape: tuple[int, int]
    dtype: torch.dtype
    scales: torch.Tensor | None = None

    @property
    def bits(self) -> int:
        return cpu.bits_of(self.values, *self.shape)


def fragments24(matrix: Packed24 | Quantized24, dtype: torch.dtype = torch.bfloat16) -> Fragments24:
    """The matrix in the order of the sparse units; dtype: of the products with a quantised one.

    Raises ValueError unless it is bf16 or fp16, its rows are a multiple of 16 and its columns of
    64.
    """
    dtype = matrix.dtype if isinstance(matrix, Packed24) else dtype
    if not has_fragments(matrix.shape, dtype):
        raise ValueError(
            f"a {matrix.shape} matrix of {dtype} has no fragments: it must be bf16 or fp16, "
            f"with rows in multiples of {ROWS} and columns in multiples of {COLUMNS}"
        )
    if isinstance(matrix, Packed24):
        neutral = convert24(matrix, "neutral")
        parts = cpu.fragments(neutral.values.view(torch.int16), neutral.meta, 16)
        return Fragments24(*parts, matrix.shape, dtype)
    values = matrix.values if matrix.bits == 8 else integers_of(matrix.values)
    parts = cpu.fragments(values, matrix.positions, matrix.bits)
    # By tile, group and g: row g's in the lower half of a word, row g + 8's in the upper one.
    scales = matrix.scales.view(-1, 2, 8, matrix.scales.shape[1]).permute(0, 3, 2, 1)
    words = scales.contiguous().view(-1).view(torch.int32)
    return Fragments24(*parts, matrix.shape, dtype, words)


def has_fragments(shape: tuple[int, int], dtype: torch.dtype) -> bool:
    """True if `fragments24` takes this shape and dtype."""
    rows, columns = shape
    return dtype in DTYPES and rows % ROWS == 0 and columns % COLUMNS == 0


def few_tokens24(
    weight: Fragments24,
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """x [tokens, columns] W^T + bias [rows], of shape [tokens, rows], for at most `MOST` tokens.

    x has W's dtype and device. Sums are kept in fp32 and rounded once; integers are multiplied by
    their scales there, unrounded. No gradient is defined.
    """
    rows, columns = weight.shape
    if x.ndim != 2 or x.shape[1] != columns or x.dtype != weight.dtype or len(x) > MOST:
        raise ValueError(
            f"x must be {weight.dtype} of shape [at most {MOST}, {columns}], not {x.dtype} of "
            f"{tuple(x.shape)}"
        )
    if bias is not None and bias.shape != (rows,):
        raise ValueError(f"bias must have shape ({rows},), not {tuple(bias.shape)}")
    stored = {"weight": weight.values, "meta": weight.meta, "scales": weight.scales}
    device = checks.one_device(**stored, x=x, bias=bias)
    name = backends.resolve(device, backend)
    if name == "triton" and not serves(device):
        if backend == "triton" and device.type == "cuda":
            raise RuntimeError(f"{device} has no sparse units for few_tokens24: use backend 'cpu'")
        name = "cpu"
    return _few_tokens24(weight.values, weight.meta, weight.scales, x, bias, rows, name)


def serves(device: torch.device) -> bool:
    """True if this device's sparse units can be used: NVIDIA's from compute capability 8.0 on."""
    nvidia = device.type == "cuda" and torch.version.hip is None
    return nvidia and torch.cuda.get_device_capability(device) >= (8, 0)


_few_tokens24 = operator_of(
    cpu.few_tokens24, lambda values, meta, scales, x, bias, rows: x.new_empty(x.shape[0], rows)
)
