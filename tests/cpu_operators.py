"""CPU kernels for torch's 2:4 operators, which torch has for GPUs only.

With them torch's `SparseSemiStructuredTensor`, and code written for it, runs without a GPU: slowly,
for tests. The formats are those of torch's own kernels, except that cuSPARSELt matrices always have
the order of compute capability 9.0. (torch's `_sparse_semi_structured_tile` with use_cutlass=False
writes the order of 8.0 on every GPU.) Matrices that our layouts cannot hold are refused; torch
would pad some of them.
"""

from typing import Any

import torch
from torch import Tensor

from common_kernels.compressed import pack_mask, unpack_mask
from common_kernels.masks import transposable_mask24
from common_kernels.pack import Packed24, meta_bytes, pack24, unpack24
from common_kernels.pack.interop import cslt_form

ACTIVATIONS = {
    None: lambda y: y,
    "none": lambda y: y,
    "relu": torch.relu,
    "silu": torch.nn.functional.silu,
}


def register_cpu_operators() -> torch.library.Library:
    """Register CPU kernels for aten's 2:4 operators for as long as the returned object lives.

    The same functions serve as kernels for fake tensors, which torch.compile needs and most of
    these operators lack. Hold only one such object at a time.
    """
    library = torch.library.Library("aten", "IMPL")
    for operator in OPERATORS:
        name = operator.__name__
        library.impl(name, operator, "CPU")
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Meta"):
            library.impl(name, operator, "Meta")
    return library


def _sparse_semi_structured_tile(
    input: Tensor, algorithm: str = "", use_cutlass: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Prune `input` [rows, columns] to 2:4 along both dims, and return packed values and metadata,
    both of the transpose, and the bitmask.

    algorithm: `largest_values_greedy`, or the empty string, ranks by signed value as torch does;
    `largest_abs_values_greedy` ranks by magnitude.
    """
    if algorithm in ("", "largest_values_greedy"):
        mask = transposable_mask24(signed_rank(input), "greedy")
    elif algorithm == "largest_abs_values_greedy":
        mask = transposable_mask24(input, "greedy")
    else:
        raise NotImplementedError(f"algorithm {algorithm!r} has no CPU kernel")
    layout = "cutlass_sm80" if use_cutlass else "cusparselt_sm90"
    parts: list[Tensor] = []
    for x, kept in ((input, mask), (input.t(), mask.t())):
        packed = pack24(x, kept, layout)
        rows, columns = packed.shape
        if use_cutlass:
            meta = packed.meta.as_strided((rows, 2, columns // 32), (2, 1, 2 * rows))
            parts += packed.values, meta
        else:
            parts += packed.buffer.view(x.dtype), meta_bytes(packed).view(x.dtype)
    return parts[0], parts[1], parts[2], parts[3], swizzle_mask(mask)


def signed_rank(x: Tensor) -> Tensor:
    """Non-negative fp32 numbers that rank as the 16-bit floats of x do."""
    bits = x.view(torch.int16).int()
    return (torch.where(bits < 0, -(bits & 0x7FFF), bits) + 0x8000).float()


def _sparse_semi_structured_apply(input: Tensor, thread_masks: Tensor) -> tuple[Tensor, Tensor]:
    """The packed values of `input`, and of its transpose, under the bitmask of a tile."""
    mask = unswizzle_mask(thread_masks, *input.shape)
    packed, transposed = pack24(input, mask), pack24(input.t(), mask.t())
    return packed.values, transposed.values


def _sparse_semi_structured_apply_dense(input: Tensor, thread_masks: Tensor) -> Tensor:
    return input * unswizzle_mask(thread_masks, *input.shape)


def _to_sparse_semi_structured(dense: Tensor) -> tuple[Tensor, Tensor]:
    packed = pack24(dense, dense != 0, "cutlass_sm80")
    return packed.values, packed.meta


def _sparse_semi_structured_mm(
    mat1: Tensor, mat1_meta: Tensor, mat2: Tensor, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    return product(cutlass_dense(mat1, mat1_meta), mat2, out_dtype)


def _sparse_semi_structured_addmm(
    input: Tensor,
    mat1: Tensor,
    mat1_meta: Tensor,
    mat2: Tensor,
    *,
    alpha: float = 1,
    beta: float = 1,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """alpha * mat1 @ mat2 + beta * input. input: one number for each row of the result."""
    return product(cutlass_dense(mat1, mat1_meta), mat2, out_dtype, alpha, beta * wide(input))


def _sparse_semi_structured_linear(
    input: Tensor,
    weight: Tensor,
    meta: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """input [..., columns] times the transposed weight, plus bias, of shape [..., rows]."""
    dense = cutlass_dense(weight, meta)
    added = None if bias is None else wide(bias)
    y = product(dense, input.flatten(0, -2).t(), out_dtype, bias=added).t()
    return ACTIVATIONS[activation](y).reshape(*input.shape[:-1], dense.shape[0])


def _cslt_compress(input: Tensor) -> Tensor:
    return cslt_form(pack24(input, input != 0, "cusparselt_sm90")).clone()


def _cslt_sparse_mm(
    compressed_A: Tensor,
    dense_B: Tensor,
    bias: Tensor | None = None,
    alpha: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    transpose_result: bool = False,
    alg_id: int = 0,
    split_k: int = 1,
    split_k_mode: int = -1,
) -> Tensor:
    """alpha * A @ dense_B + bias. bias: one number for each row of the result; alpha: a tensor with
    one element."""
    dense = unpack24(from_cslt(compressed_A, dense_B.shape[0]))
    scale = 1.0 if alpha is None else alpha.item()
    added = None if bias is None else wide(bias)
    y = product(dense, dense_B, out_dtype, scale, added)
    return y.t().contiguous() if transpose_result else y


def cutlass_dense(values: Tensor, meta: Tensor) -> Tensor:
    """The dense matrix of values and torch's CUTLASS metadata, which has two dims, or three if the
    tile packer wrote it."""
    rows, columns = values.shape[0], 2 * values.shape[1]
    if meta.ndim == 3:
        meta = meta.as_strided((rows, columns // 16), (columns // 16, 1))
    return unpack24(Packed24.of(values, meta, "cutlass_sm80"))


def product(
    a: Tensor,
    b: Tensor,
    out_dtype: torch.dtype | None,
    alpha: float = 1.0,
    bias: Tensor | None = None,
) -> Tensor:
    """alpha * a @ b + bias, accumulated in fp32 (int8 in int32). bias: one number for each row."""
    y = alpha * (wide(a) @ wide(b))
    if bias is not None:
        y = y + bias[:, None]
    return y.to(out_dtype or b.dtype)


def wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype.is_floating_point else x.int()


def swizzle_mask(mask: torch.Tensor) -> torch.Tensor:
    """Pack a bool mask [rows, columns] in the order of `torch._sparse_semi_structured_tile`.

    The result is uint8 `[4 ceil(rows / 32), 8 ceil(columns / 64), 8]`: eight bytes for each 8x8
    area, two for each of its four 4x4 tiles, left before right and upper before lower. Entry (r, c)
    of a tile is bit 4r + c, counted from the lowest. Bits beyond the mask are zero.
    """
    rows, columns = mask.shape
    padded = torch.nn.functional.pad(mask, (0, -columns % 64, 0, -rows % 32))
    # An entry's place is [area row, half, r, area column, half, c].
    areas = padded.unflatten(1, (padded.shape[1] // 8, 2, 4)).unflatten(0, (-1, 2, 4))
    return pack_mask(areas.permute(0, 3, 1, 4, 2, 5).flatten(2))


def unswizzle_mask(bits: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The bool mask [rows, columns] from the bits of `swizzle_mask`."""
    areas = unpack_mask(bits, 64).unflatten(2, (2, 2, 4, 4))
    mask = areas.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(0, 2).flatten(1)
    return mask[:rows, :columns].contiguous()


def from_cslt(compressed: torch.Tensor, columns: int) -> Packed24:
    """The packed matrix [rows, columns] of a result of `torch._cslt_compress`, sharing memory."""
    shape = len(compressed), columns
    return Packed24(compressed.view(-1).view(torch.uint8), shape, compressed.dtype)


OPERATORS: tuple[Any, ...] = (
    _sparse_semi_structured_tile,
    _sparse_semi_structured_apply,
    _sparse_semi_structured_apply_dense,
    _to_sparse_semi_structured,
    _sparse_semi_structured_mm,
    _sparse_semi_structured_addmm,
    _sparse_semi_structured_linear,
    _cslt_compress,
    _cslt_sparse_mm,
)
