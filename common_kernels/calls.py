"""Calls of 2by4-pretrain's package `sparse` and of torchao's sparse training, for code that was
written for them; docs/own_loop.md has a table, also of the names that have no form here.

Of equal entries of four the one with the lower index is kept (2by4: the later one), samples follow
from `torch.manual_seed` (2by4: from Python's random numbers), and any device and strides will do.
"""

from typing import Any

import torch
from torch import Tensor

from common_kernels.decay import masked_decay_
from common_kernels.masks import nm_mask, transposable_mask24
from common_kernels.matmul import library_layout
from common_kernels.mvue import mvue24
from common_kernels.pack import BUFFERED, Packed24, pack24
from common_kernels.pack.interop import to_semi_structured
from common_kernels.soft_threshold import soft_threshold24


def to_sparse_semi_structured(
    x: Tensor,
    transposed: bool = False,
    MVUE24: bool = False,
    mask: Tensor | None = None,
    dtype: torch.dtype = torch.float16,
    *,
    layout: str = "neutral",
) -> Packed24:
    """x [rows, columns], cast to `dtype` without scaling and packed along its rows: under `mask`,
    as an unbiased sample (`MVUE24`), or else its two largest magnitudes of each four.

    transposed: without effect. In 2by4 it makes the tensor the right factor of a product; here
    `matmul24(packed, y)` is y x^T and `matmul24(packed, y.t()).t()` is x y for every packed x.

    Raises ValueError for a mask together with MVUE24, and for a mask that keeps more than two of
    four, of which 2by4 packs some two.
    """
    if MVUE24 and mask is not None:
        raise ValueError("MVUE24=True draws what is kept and takes no mask; leave one of them out")
    x = MVUE24_approx_triton(x) if MVUE24 else x
    kept = x != 0 if MVUE24 else nm_mask(x) if mask is None else mask.bool()
    return pack24(x.to(dtype), kept, layout)


def sparse24_triton(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., columns] under the mask of its two largest magnitudes of each four, and the mask in
    x's dtype."""
    mask = nm_mask(x)
    return torch.where(mask, x, 0), mask.to(x.dtype)


def soft_threshold24_triton(x: Tensor) -> tuple[Tensor, Tensor]:
    """`soft_threshold24(x)` of x [..., columns], and the mask of `sparse24_triton`."""
    return soft_threshold24(x), nm_mask(x).to(x.dtype)


def MVUE24_approx_triton(x: Tensor) -> Tensor:
    """An unbiased 2:4 sample of x [..., columns] by 2by4's design; that of `mvue24` varies less."""
    return mvue24(x, torch.randint(2**31, ()), design="sequential")


def transposable_sparse(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [rows, columns] under the best mask that is 2:4 along both dims, and the mask (bool)."""
    mask = transposable_mask24(x)
    return torch.where(mask, x, 0), mask


def masked_add_(grad: Tensor, p: Tensor, mask: Tensor, alpha: float = 0) -> None:
    """Add alpha * p to `grad`, in place, where `mask`, of any dtype, is 0; all have one shape."""
    masked_decay_(grad, p, mask.bool(), alpha)


def semi_structured_sparsify(
    x: Tensor, algo: str = "", backend: str = "cutlass", *, mask: Tensor | None = None
) -> Tensor:
    """x [rows, columns], bf16 or fp16, as torch's tensor class with its transpose, under `mask` or
    one that is 2:4 along both dims. The gradient passes straight through.

    algo: "" ranks by magnitude, as "largest_abs_values_greedy"; torchao's "" by signed value.
    backend: `cutlass`, which torch multiplies on compute capability 8.x alone, or `cusparselt`, for
    9.0 alone: elsewhere ValueError, because torch has no class for the order of metadata there.
    """
    layout = {"cutlass": "cutlass_sm80", "cusparselt": BUFFERED}.get(backend)
    if layout is None or algo not in ("", "largest_abs_values_greedy"):
        raise ValueError(
            f"algo={algo!r}, backend={backend!r}: give algo='largest_abs_values_greedy' and "
            "backend='cutlass' or 'cusparselt'"
        )
    if backend == "cusparselt" and library_layout(x.device) != BUFFERED:
        raise ValueError("cusparselt packs for compute capability 9.0; give backend='cutlass'")
    kept = transposable_mask24(x.detach(), "greedy") if mask is None else mask.bool()
    return _Sparsify.apply(x, kept, layout)


class _Sparsify(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, layout: str) -> Tensor:
        return to_semi_structured(pack24(x, mask, layout), pack24(x.t(), mask.t(), layout))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0], None, None
