"""Squared ReLU of which each four neighbours along the last dim keep the two largest (arXiv
2503.16672), forward and backward, and packed, also as FP8 codes, in the same pass."""

from typing import Any

import torch
from torch import Tensor

from common_kernels import backend as backends
from common_kernels import checks
from common_kernels.fp8.cpu import FORMATS
from common_kernels.library import operator_of
from common_kernels.pack import Packed24
from common_kernels.pack.cpu import buffer_bytes
from common_kernels.relu24 import cpu


def relu24(z: Tensor, prune: bool = True, *, backend: str | None = None) -> Tensor:
    """relu(z)^2, computed in fp32 and rounded once, with at most two non-zeros in each four along
    the last dim, the lower index winning a tie.

    Its gradient, 2 dH sqrt(H'), has the same zeros; it is made from the result, so that z need not
    be kept. NaN and Inf propagate. With `prune=False` nothing is pruned. Raises TypeError for a
    dtype other than fp32, bf16 and fp16, and ValueError for a last dim that is no multiple of 4.
    """
    checks.float_tensor(z)
    checks.group_dim(z, 4, -1)
    return _forward(z, prune, "", backends.resolve(z.device, backend))[0]


def relu24_packed(z: Tensor, layout: str, *, backend: str | None = None) -> tuple[Tensor, Packed24]:
    """relu24(z) for z [rows, columns], dense and packed in `layout`, in one pass. Both dims are
    multiples of 64 and of what the layout needs. It has no gradient."""
    h, buffer = _forward(z, True, layout, backends.resolve(z.device, backend))
    return h, Packed24(buffer, (z.shape[0], z.shape[1]), z.dtype, layout)


def relu24_backward(
    dh: Tensor, h: Tensor, layout: str = "", *, backend: str | None = None
) -> tuple[Tensor, Packed24 | None]:
    """dZ from dH and H' = relu24(z), and packed if there is a `layout` (sizes: `relu24_packed`)."""
    checks.same_shape(dh, h, "dh and h")
    name = backends.resolve(checks.one_device(dh=dh, h=h), backend)
    dz, buffer = _backward(dh, h, layout, name)
    packed = Packed24(buffer, (h.shape[0], h.shape[1]), dz.dtype, layout) if layout else None
    return dz, packed


def relu24_codes(
    x: Tensor,
    h: Tensor | None,
    fmt: str,
    layout: str,
    amax: Tensor | None = None,
    seen: Tensor | None = None,
    *,
    backend: str | None = None,
) -> tuple[Tensor, Packed24, Tensor, Tensor]:
    """H' from Z, or dZ from dH if H' is given as h, with its FP8 codes packed in `layout`, those of
    its transpose, and their scale, in one pass after a search for the largest magnitude.

    Sizes: as for `relu24_packed`. fmt, amax, seen: as for `quantize_fp8`; with amax no search.
    """
    name = backends.resolve_fp8(checks.one_device(x=x, h=h, amax=amax, seen=seen), backend)
    out, buffer, *rest = _codes(x, h, fmt, layout, amax, seen, name)
    packed = Packed24(buffer, (x.shape[0], x.shape[1]), FORMATS[fmt], layout)
    return out, packed, rest[0], rest[1]


def _empty(x: Tensor, layout: str, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    size = buffer_bytes(x.shape[0], x.shape[1], dtype or x.dtype, layout) if layout else 0
    like = torch.empty_like(x, memory_format=torch.contiguous_format)
    return like, x.new_empty(size, dtype=torch.uint8)


_forward = operator_of(cpu.relu24, lambda z, prune, layout: _empty(z, layout))
_backward = operator_of(cpu.relu24_backward, lambda dh, h, layout: _empty(dh, layout))
_codes = operator_of(
    cpu.relu24_codes,
    lambda x, h, fmt, layout, *_: (
        *_empty(x, layout, FORMATS[fmt]),
        x.new_empty(x.shape[::-1], dtype=FORMATS[fmt]),
        x.new_empty((), dtype=torch.float32),
    ),
    mutates_args=("seen",),
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.backend = inputs[-1]
    ctx.save_for_backward(output[0])


def _gradient(ctx: Any, dh: Tensor, _: Tensor | None) -> tuple[Tensor, None, None, None]:
    return _backward(dh, *ctx.saved_tensors, "", ctx.backend)[0], None, None, None


_forward.register_autograd(_gradient, setup_context=_setup)
