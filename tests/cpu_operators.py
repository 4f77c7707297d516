"""CPU kernels for torch's 2:4 operators, which torch has for GPUs only.

With them torch's `SparseSemiStructuredTensor`, and code written for it, runs without a GPU: slowly,
for tests. The formats are those of torch's own kernels, except that cuSPARSELt matrices always have
the order of compute capability 9.0. Matrices that our layouts cannot hold are refused; torch would
pad some of them.
"""

import torch

from common_kernels.pack import Packed24, pack24, unpack24
from common_kernels.pack.interop import parts


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


def _sparse_semi_structured_mm(mat1, mat1_meta, mat2, *, out_dtype=None):
    return product(cutlass_dense(mat1, mat1_meta), mat2, out_dtype)


def _sparse_semi_structured_addmm(input, mat1, mat1_meta, mat2, *, alpha=1, beta=1, out_dtype=None):
    """alpha * mat1 @ mat2 + beta * input. input: one number for each row of the result."""
    return product(cutlass_dense(mat1, mat1_meta), mat2, out_dtype, alpha, beta * wide(input))


def _cslt_compress(input):
    return parts(pack24(input, input != 0, "cusparselt_sm90"))[0].clone()


def _cslt_sparse_mm(
    compressed_A, dense_B, bias=None, alpha=None, out_dtype=None, transpose_result=False, *_, **__
):
    """alpha * A @ dense_B + bias. bias: one number for each row of the result; alpha: a tensor with
    one element."""
    dense = unpack24(from_cslt(compressed_A, dense_B.shape[0]))
    scale = 1.0 if alpha is None else alpha.item()
    added = None if bias is None else wide(bias)
    y = product(dense, dense_B, out_dtype, scale, added)
    return y.t().contiguous() if transpose_result else y


def cutlass_dense(values, meta):
    """The dense matrix of values and torch's CUTLASS metadata."""
    return unpack24(Packed24.of(values, meta, "cutlass_sm80"))


def product(a, b, out_dtype, alpha=1.0, bias=None):
    """alpha * a @ b + bias, accumulated in fp32 (int8 in int32). bias: one number for each row."""
    y = alpha * (wide(a) @ wide(b))
    if bias is not None:
        y = y + bias[:, None]
    return y.to(out_dtype or b.dtype)


def wide(x):
    return x.float() if x.dtype.is_floating_point else x.int()


def from_cslt(compressed, columns):
    """The packed matrix [rows, columns] of a result of `torch._cslt_compress`, sharing memory."""
    shape = len(compressed), columns
    return Packed24(compressed.view(-1).view(torch.uint8), shape, compressed.dtype)


OPERATORS = (_sparse_semi_structured_mm, _sparse_semi_structured_addmm)
OPERATORS += (_cslt_compress, _cslt_sparse_mm)
