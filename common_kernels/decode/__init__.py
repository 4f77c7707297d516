"""Products of a 2:4 matrix with few tokens, as in decoding.

With few tokens the time of a product is that of reading the weight, of which a packed 2:4 matrix
has 9/16 of the bytes. `fragments24` stores one in the order in which the sparse units of a GPU take
it (PTX: mma.sp.m16n8k32), so that it is read once, in whole lines, straight into registers.
"""

from dataclasses import dataclass

import torch

from common_kernels import backend as backends
from common_kernels import checks
from common_kernels.decode import cpu
from common_kernels.library import operator_of
from common_kernels.pack import Packed24, convert24

DTYPES = (torch.bfloat16, torch.float16)
MOST = 16  # tokens of a product on the sparse units (mma.sp)
ROWS, COLUMNS = cpu.ROWS, cpu.COLUMNS


@dataclass(frozen=True, eq=False)
class Fragments24:
    """A 2:4 matrix of `shape` [rows, columns] and `dtype`, in 9/16 of the bytes of a dense one.

    values: int64 `[rows * columns / 8]`, meta: int32 `[rows * columns / 32]`; `reference.py`
        defines their order.
    """

    values: torch.Tensor
    meta: torch.Tensor
    shape: tuple[int, int]
    dtype: torch.dtype


def fragments24(packed: Packed24) -> Fragments24:
    """The matrix in the order of the sparse units.

    Raises ValueError unless it is bf16 or fp16, its rows are a multiple of 16 and its columns of
    64.
    """
    if not has_fragments(packed):
        raise ValueError(
            f"a {packed.shape} matrix of {packed.dtype} has no fragments: it must be bf16 or fp16, "
            f"with rows in multiples of {ROWS} and columns in multiples of {COLUMNS}"
        )
    neutral = convert24(packed, "neutral")
    return Fragments24(*cpu.fragments(neutral.values, neutral.meta), packed.shape, packed.dtype)


def has_fragments(packed: Packed24) -> bool:
    """True if `fragments24` takes this dtype and shape."""
    rows, columns = packed.shape
    return packed.dtype in DTYPES and rows % ROWS == 0 and columns % COLUMNS == 0


def few_tokens24(
    weight: Fragments24,
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """x [tokens, columns] W^T + bias [rows], of shape [tokens, rows], for at most `MOST` tokens.

    x has W's dtype and device. Sums are kept in fp32 and rounded once. No gradient is defined.
    """
    rows, columns = weight.shape
    if x.ndim != 2 or x.shape[1] != columns or x.dtype != weight.dtype or len(x) > MOST:
        raise ValueError(
            f"x must be {weight.dtype} of shape [at most {MOST}, {columns}], not {x.dtype} of "
            f"{tuple(x.shape)}"
        )
    if bias is not None and bias.shape != (rows,):
        raise ValueError(f"bias must have shape ({rows},), not {tuple(bias.shape)}")
    device = checks.one_device(weight=weight.values, meta=weight.meta, x=x, bias=bias)
    name = backends.resolve(device, backend)
    if name == "triton" and not serves(device):
        if backend == "triton" and device.type == "cuda":
            raise RuntimeError(f"{device} has no sparse units for few_tokens24: use backend 'cpu'")
        name = "cpu"
    return _few_tokens24(weight.values, weight.meta, x, bias, rows, name)


def serves(device: torch.device) -> bool:
    """True if the sparse units of this device can be used: those of NVIDIA from compute capability
    8.0 on."""
    nvidia = device.type == "cuda" and torch.version.hip is None
    return nvidia and torch.cuda.get_device_capability(device) >= (8, 0)


_few_tokens24 = operator_of(
    cpu.few_tokens24, lambda values, meta, x, bias, rows: x.new_empty(x.shape[0], rows)
)
