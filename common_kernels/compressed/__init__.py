"""N:M matrices stored as their kept values and a mask of one bit per entry.

An N:M mask keeps n of every m consecutive entries along the last dim. The compressed form of
`x [..., columns]` is `values [..., columns * n / m]`, the kept entries in column order, and
`bits [..., ceil(columns / 8)]` uint8, where bit i of byte j stands for column 8j + i and padding is
zero. One bit per entry serves every N:M, and for 2:4 takes no more memory than two-bit positions.

The bits come from a mask, never from the values: a kept entry may be zero and stays kept.
"""

import torch
from torch import Tensor

from common_kernels import backend as backends
from common_kernels import checks
from common_kernels.compressed import cpu
from common_kernels.library import kernels_of, launched_by_cpp, operator_of


def pack_mask(mask: Tensor, *, backend: str | None = None) -> Tensor:
    """Pack `mask [..., columns]` (bool) into `bits [..., ceil(columns / 8)]` (uint8)."""
    if mask.dtype != torch.bool:
        raise TypeError(f"mask must be bool, not {mask.dtype}")
    return _pack_mask(mask, backends.resolve(mask.device, backend))


_pack_mask = operator_of(
    cpu.pack_mask, lambda mask: mask.new_empty(cpu.bits_shape(mask.shape), dtype=torch.uint8)
)


def unpack_mask(bits: Tensor, columns: int, *, backend: str | None = None) -> Tensor:
    """Unpack `bits [..., ceil(columns / 8)]` (uint8) into `mask [..., columns]` (bool)."""
    _check_bits(bits, (*bits.shape[:-1], columns))
    return _unpack_mask(bits, columns, backends.resolve(bits.device, backend))


_unpack_mask = operator_of(
    cpu.unpack_mask,
    lambda bits, columns: bits.new_empty((*bits.shape[:-1], columns), dtype=torch.bool),
)


def compress_nm(
    x: Tensor,
    bits: Tensor,
    n: int = 2,
    m: int = 4,
    *,
    dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    """The kept entries of `x [..., columns]` in column order: `[..., columns * n / m]`.

    x is fp32, bf16, fp16 or bool, of any strides. The result is contiguous and holds the entries
    bit for bit, or cast to `dtype` if one is given. Raises ValueError if the columns are no
    multiple of m or if `bits` does not match x's shape. The caller must ensure that the bits keep n
    of every m: checking it would cost as much as the operation.
    """
    if x.dtype != torch.bool:
        checks.float_tensor(x)
    checks.group_dim(x, m, -1)
    _check_bits(bits, x.shape)
    checks.one_device(x=x, bits=bits)
    return compress_checked(x, bits, n, m, dtype=dtype or x.dtype, backend=backend)


def compress_checked(
    x: Tensor, bits: Tensor, n: int, m: int, *, dtype: torch.dtype, backend: str | None = None
) -> Tensor:
    """`compress_nm` without its checks: bits of another shape are read out of range."""
    name = backends.resolve(x.device, backend)
    widens = dtype == torch.float32 and x.dtype.itemsize == 2
    differentiable = x.requires_grad and torch.is_grad_enabled()
    if name == "triton" and m <= 32 and (widens or dtype == x.dtype) and not differentiable:
        return _by_one_kernel(x, bits, n, m, dtype)
    return _compress_nm(x, bits, n, m, dtype, name)


def _compressed_like(x: Tensor, bits: Tensor, n: int, m: int, dtype: torch.dtype) -> Tensor:
    return x.new_empty(cpu.compressed_shape(x, n, m), dtype=dtype)


_compress_nm = operator_of(cpu.compress_nm, _compressed_like)
_by_one_kernel = launched_by_cpp(
    "compress24(Tensor x, Tensor bits, int n, int m, ScalarType dtype) -> Tensor", _compressed_like
)(lambda *given: _compress_nm(*given, "triton"))


@kernels_of("compress24")
def _(n: int, m: int, x: Tensor, bits: Tensor, values: Tensor) -> None:
    _compress_nm(x, bits, n, m, values.dtype, "triton")


def expand_nm(
    values: Tensor, bits: Tensor, n: int = 2, m: int = 4, *, backend: str | None = None
) -> Tensor:
    """Expand `values [..., kept]` to a contiguous `[..., kept * m / n]`, with +0 at pruned entries.

    Raises ValueError if the shapes of values and bits do not match.
    """
    checks.float_tensor(values, "values")
    checks.group_dim(values, n, -1)
    _check_bits(bits, cpu.expanded_shape(values, n, m))
    name = backends.resolve(checks.one_device(values=values, bits=bits), backend)
    return _expand_nm(values, bits, n, m, name)


_expand_nm = operator_of(
    cpu.expand_nm, lambda values, bits, n, m: values.new_empty(cpu.expanded_shape(values, n, m))
)


def double_prune_bits(
    values: Tensor, bits: Tensor, n: int = 2, m: int = 4, *, backend: str | None = None
) -> Tensor:
    """SLoPe's second mask (arXiv 2405.16325) of the compressed `values [out, in * n / m]`. The
    result has one bit per value, packed as by `pack_mask`. It is set if the value is among the n
    largest magnitudes of its group of m along dim 0 of the expanded matrix. Pruned entries rank
    below all values, even zeros; the lower index wins a tie."""
    checks.float_tensor(values, "values")
    checks.group_dim(values, n, -1)
    checks.group_dim(values, m, 0)
    _check_bits(bits, cpu.expanded_shape(values, n, m))
    name = backends.resolve(checks.one_device(values=values, bits=bits), backend)
    return _double_prune_bits(values, bits, n, m, name)


_double_prune_bits = operator_of(
    cpu.double_prune_bits, lambda values, bits, n, m: bits.new_empty(cpu.bits_shape(values.shape))
)


def _check_bits(bits: Tensor, shape: tuple[int, ...]) -> None:
    """Raise unless `bits` are those of a mask of this shape."""
    if bits.dtype != torch.uint8:
        raise TypeError(f"bits must be uint8, not {bits.dtype}")
    expected = tuple(cpu.bits_shape(shape))
    if bits.shape != expected:
        raise ValueError(
            f"a mask of shape {tuple(shape)} has bits of shape {expected}, not {tuple(bits.shape)}"
        )
