"""Products of a compressed 2:4 matrix A [rows, columns] with a dense matrix.

Backends:

    dense        expands A and multiplies: any device; all other backends must agree with it
    cusparselt   cuSPARSELt: compute capability 8.0 and later, 16-bit types, from 8.9 on also FP8;
                 plans and the chosen algorithm are cached (table.py)
    cuda         our own kernels: compute capability 9.0, bf16 and FP8, compiled when first needed
                 (cuda.py)

cuSPARSELt takes layout `cusparselt_sm90` on compute capability 9.0, where our packers know its
order, and on any GPU `cusparselt`, which it packs itself. Our own kernels take `cutlass_sm90` and
`cutlass_sm90_k128`. All are in one buffer, as `common_kernels.pack.operands` writes them. On a CPU
under Triton's interpreter the products are emulated (emulation.py). The fastest correct algorithm,
kernel and layout of a product is found by measurement (choice.py, table.py).
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from common_kernels import backend as backends
from common_kernels import checks
from common_kernels.fp8.operands import rescale
from common_kernels.library import custom_op, kernels_of, launched_by_cpp
from common_kernels.matmul import cuda, cusparselt, native, table
from common_kernels.matmul.choice import Measured as Measured
from common_kernels.matmul.choice import check_available
from common_kernels.matmul.choice import fastest as fastest
from common_kernels.matmul.choice import is_faster as is_faster
from common_kernels.matmul.choice import library_layout as library_layout
from common_kernels.matmul.choice import library_layout_for as library_layout_for
from common_kernels.matmul.choice import measured as measured
from common_kernels.matmul.choice import own_layout as own_layout
from common_kernels.matmul.choice import unavailable as unavailable
from common_kernels.matmul.cusparselt import Problem as Problem
from common_kernels.matmul.emulation import emulate
from common_kernels.pack import BUFFERED, VENDOR, Packed24, convert24, of_library, unpack24
from common_kernels.pack.cusparselt import aligned
from common_kernels.pack.operands import fill_up, packed_sample, tokens_multiple, whole_blocks


def matmul24(
    packed: Packed24, x: Tensor, bias: Tensor | None = None, *, backend: str | None = None
) -> Tensor:
    """x [..., columns] A^T + bias [rows], of shape [..., rows], for a packed A [rows, columns].

    x has A's dtype and device. The default backend is a sparse one if it can serve the device,
    dtype and layout as they are, else `dense`; `chosen` names it. A backend given by name takes any
    layout, but converts it in every call: use `convert24` once instead. No gradient is defined.

    Raises RuntimeError with the reason if the backend cannot serve, ValueError for wrong shapes.
    """
    _check_fit(packed, x, x.shape[-1])
    if bias is not None and bias.shape != (packed.shape[0],):
        raise ValueError(f"bias must have shape ({packed.shape[0]},), not {tuple(bias.shape)}")
    checks.one_device(matrix=packed.buffer, x=x, bias=bias)
    name = chosen(packed, backend)
    x2d = x.detach() if x.requires_grad else x
    if x.ndim != 2:
        x2d = x2d.reshape(-1, x.shape[-1])
    out_dtype = torch.bfloat16 if x.element_size() == 1 else x.dtype
    if name == "dense":
        y = F.linear(*(t.float() if t.element_size() == 1 else t for t in (x2d, unpack24(packed))))
        y = (y if bias is None else y + bias).to(out_dtype)
    else:
        layout = packed.layout
        if name == "cuda" and layout not in cuda.LAYOUTS:
            layout = cuda.LAYOUTS[0]
        elif name == "cusparselt" and layout not in (VENDOR, library_layout(x.device)):
            of = *packed.shape, len(x2d), packed.dtype, packed.dtype, True, True
            layout = library_layout_for(Problem(*of), x.device)
        y = linear24(convert24(packed, layout), x2d, bias, out_dtype)
    return y if x.ndim == 2 else y.reshape(*x.shape[:-1], packed.shape[0])


def chosen(packed: Packed24, backend: str | None = None) -> str:
    """The backend that `matmul24` uses: `backend` if it is given, else the default for `packed`.

    Raises RuntimeError if the given backend cannot serve.
    """
    device, dtype = packed.buffer.device, packed.dtype
    if backend is None:
        own = packed.layout in cuda.LAYOUTS
        if not own and packed.layout not in (library_layout(device), VENDOR):
            return "dense"
        name = "cuda" if own else "cusparselt"
        return "dense" if unavailable(name, device, dtype) else name
    reason = unavailable(backend, device, dtype)
    if reason:
        raise RuntimeError(f"matmul backend {backend!r} cannot serve {str(device)!r}: {reason}")
    return backend


def linear24(
    packed: Any,
    x: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """x [..., columns] A^T + bias [rows], of shape [..., rows]. A's layout decides whether
    cuSPARSELt or our own kernels multiply.

    x has A's dtype. The tokens are padded with zero rows as the kernels need.

    Args:
        packed: a `Packed24`, or an object with its attributes that checks nothing.
        out_dtype: A's dtype (the default), or for FP8 bf16, with cuSPARSELt also fp16 or fp32.
        scales: fp32 [] each, the scales of the codes of x and A; the product is divided by both.
            Our own kernels divide before they round to bf16; after cuSPARSELt it is another pass.
    """
    rows, columns = packed.shape
    _check_fit(packed, x, x.shape[-1])
    missing = -(x.numel() // columns) % (16 // x.element_size())
    if missing and of_library(packed.layout):
        filled = fill_up(x.reshape(-1, columns), missing)
        y = linear24(packed, filled, bias, out_dtype, scales=scales)
        # A copy, because a view returned by an autograd Function cannot be changed in place.
        y = y.narrow_copy(0, 0, len(y) - missing)
        return torch.ops.aten._unsafe_view(y, [*x.shape[:-1], rows])
    given = packed.buffer, packed.layout, rows, columns, x
    if scales is None:  # each argument takes time, also one that is None
        rest = () if out_dtype in (None, x.dtype) else (None, None, True, True, out_dtype)
        return _multiply(*given, bias, *rest)
    scale, other = scales
    if of_library(packed.layout):
        return _of_codes(*given, bias, scale, other, 1, True, out_dtype or torch.bfloat16)
    bias = None if bias is None else bias.to(torch.bfloat16)
    y = _multiply(*given, bias, scale, other, True, True, torch.bfloat16)
    # In torch 2.11 torch.compile silently drops the backward pass of an autograd Function that
    # returns the result of a `to` that changes nothing.
    return y if out_dtype in (None, y.dtype) else y.to(out_dtype)


def mm24(
    packed: Packed24,
    x: Tensor,
    out_dtype: torch.dtype | None = None,
    *,
    transposed: bool = False,
    result_transposed: bool = False,
    scales: tuple[Tensor, Tensor] | None = None,
    factor: int = 1,
) -> Tensor:
    """A [rows, columns] x [columns, n], of shape [rows, n]. A's layout decides whether cuSPARSELt
    or our own kernels multiply.

    If x has fewer rows than A has columns, it is padded with zeros.

    Args:
        transposed: x is given as [n, columns]; FP8 needs this form.
        result_transposed: the result is [n, rows]; not with scales.
        scales: as for `linear24`; the product is kept in fp32 until it is divided by them and
            multiplied by `factor`.
    """
    buffer, (rows, columns) = packed.buffer, packed.shape
    scale, other = scales or (None, None)
    checks.one_device(matrix=buffer, x=x, scale=scale, other=other)
    missing = columns - x.shape[1 if transposed else 0]
    _check_fit(packed, x, columns if missing >= 0 else columns - missing)
    if transposed and missing:
        x = F.pad(x.view(torch.uint8), (0, missing * x.element_size())).view(x.dtype)
    elif missing:
        x = fill_up(x, missing)
    given, fp32 = (buffer, packed.layout, rows, columns, x.contiguous(), None), torch.float32
    if not columns:  # no tokens, which wgrad sums over
        shape = rows, x.shape[0 if transposed else 1]
        dtype = out_dtype or (fp32 if scales else x.dtype)
        return x.new_zeros(shape[::-1] if result_transposed else shape, dtype=dtype)
    if scale is None or other is None:
        rest = transposed, result_transposed, out_dtype or x.dtype
        return _multiply(*given, None, None, *rest)
    if of_library(packed.layout):
        return _of_codes(*given, scale, other, factor, False, out_dtype or fp32)
    y = _multiply(*given, scale / factor, other, transposed, False, fp32)
    return y if out_dtype in (None, fp32) else y.to(out_dtype)


def sample_mm24(
    dy: Tensor,
    x: Tensor,
    key: Tensor,
    stride: int = 1,
    *,
    layout: str = BUFFERED,
    backend: str | None = None,
) -> Tensor:
    """S(dY)^T X [out, in] in one operator: mm24(sample_pack24(dy, key, stride, layout=layout), x).

    dy [..., out] and x [..., in] have one dtype and equally many tokens. `mm24` and `sample_pack24`
    describe the rest.
    """
    name = backends.resolve(dy.device, backend)
    given = dy, x, key, stride, layout
    if name == "triton" and layout != VENDOR:
        return _by_one_sample(*given, tokens_multiple(layout, dy.dtype))
    return _of_whole_blocks(*given, backend=name)


@custom_op("sparse24::sample_mm24", mutates_args=())
def _sample_mm24(
    dy: Tensor, x: Tensor, key: Tensor, stride: int, layout: str, backend: str
) -> Tensor:
    checks.one_device(dy=dy, x=x, key=key)
    buffer = packed_sample(dy, key, stride, dy.dtype, layout, backend)
    tokens, rows = dy.shape
    return _multiply(buffer, layout, rows, tokens, x, None, None, None, False, False, x.dtype)


@_sample_mm24.register_fake
def _fake_sample_mm24(dy, x, key, *_):
    checks.one_device(dy=dy, x=x, key=key)
    return x.new_empty(dy.shape[-1], x.shape[-1])


def _check_fit(packed: Any, x: Tensor, summed: int) -> None:
    if x.dtype != packed.dtype or summed != packed.shape[1]:
        raise ValueError(
            f"x {tuple(x.shape)} of {x.dtype} does not fit a sparse {tuple(packed.shape)} of "
            f"{packed.dtype}"
        )


def _multiply(*given: Any) -> Tensor:
    """The product by the operator that C++ runs where it can, unless autograd must see it."""
    dense, bias = given[4:6]
    differentiable = torch.is_grad_enabled() and (
        dense.requires_grad or (bias is not None and bias.requires_grad)
    )
    return (_matmul24 if differentiable else _launched)(*given)


def _product(
    buffer: Tensor,
    layout: str,
    rows: int,
    columns: int,
    dense: Tensor,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    other: Tensor | None = None,
    dense_transposed: bool = True,
    result_transposed: bool = True,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The product, in `dense`'s dtype by default; our own kernels also divide it by the two scales.
    If both operands are transposed, the dense one may have several leading dims."""
    device, scales = buffer.device, None if scale is None or other is None else (scale, other)
    form = dense_transposed, result_transposed
    out = _empty(buffer, layout, rows, columns, dense, bias, scale, other, *form, out_dtype)
    tokens = dense.numel() // columns if dense_transposed else dense.shape[1]
    biased = bias is not None and scales is None
    fields = rows, columns, tokens, dense.dtype, out.dtype, *form, biased, layout
    problem = Problem(*fields)
    dense = dense.reshape(problem.dense_shape).contiguous()
    if device.type == "cpu":
        with torch.autocast("cpu", enabled=False):
            y = emulate(buffer, dense, bias, scales, problem)
        return torch.ops.aten._unsafe_view(y, out.shape)
    if not dense.numel():
        return out.zero_()
    with backends.current(device):
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        plan = _plan(fields, device.index, stream)
        given = aligned(buffer), aligned(dense), out
        if isinstance(plan, cuda.Plan):
            own = None if bias is None else aligned(bias.to(out.dtype).contiguous())
            plan.run(*given, own, scales)
        else:
            plan.run(*given, bias)
    return out


def _empty(
    buffer, layout, rows, columns, dense, bias=None, scale=None, other=None,
    dense_transposed=True, result_transposed=True, out_dtype=None,
):  # fmt: skip
    checks.one_device(matrix=buffer, x=dense, bias=bias)
    out_dtype = out_dtype or dense.dtype
    if dense_transposed and result_transposed:
        return buffer.new_empty((*dense.shape[:-1], rows), dtype=out_dtype)
    shape = (rows, dense.shape[0 if dense_transposed else 1])
    return buffer.new_empty(shape[::-1] if result_transposed else shape, dtype=out_dtype)


_matmul24 = custom_op("sparse24::matmul24", mutates_args=())(_product)
_matmul24.register_fake(_empty)
_launched = launched_by_cpp(
    "matmul24_launched(Tensor buffer, str layout, SymInt rows, SymInt columns, Tensor dense, "
    "Tensor? bias=None, Tensor? scale=None, Tensor? other=None, bool dense_transposed=True, "
    "bool result_transposed=True, ScalarType? out_dtype=None) -> Tensor",
    _empty,
)(_product)


@launched_by_cpp(
    "matmul24_of_codes(Tensor buffer, str layout, SymInt rows, SymInt columns, Tensor dense, "
    "Tensor? bias, Tensor scale, Tensor other, int factor, bool linear, ScalarType out_dtype) "
    "-> Tensor",
    lambda buffer, layout, rows, columns, dense, bias, scale, other, factor, *rest: _empty(
        buffer, layout, rows, columns, dense, bias, scale, other, True, *rest
    ),
)
def _of_codes(buffer, layout, rows, columns, dense, bias, scale, other, factor, linear, out_dtype):
    """The product by cuSPARSELt of codes, the dense ones given as [..., columns], times factor /
    (scale * other). linear: it is [..., rows], computed in bf16; else [rows, ...] in fp32."""
    dtype = torch.bfloat16 if linear else torch.float32
    given = buffer, layout, rows, columns, dense
    y = _product(*given, None, None, None, True, linear, dtype)
    return rescale(y, scale, other, factor, bias, out_dtype)


@launched_by_cpp(
    "sample_mm24_launched(Tensor dy, Tensor x, Tensor key, SymInt stride, str layout, "
    "int multiple) -> Tensor",
    _fake_sample_mm24,
)
def _by_one_sample(dy, x, key, stride, layout, multiple):
    return _of_whole_blocks(dy, x, key, stride, layout, backend="triton")


def _of_whole_blocks(dy, x, key, stride, layout, *, backend):
    dy, x = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
    filled = whole_blocks(dy, dy.dtype, layout)
    x = fill_up(x, len(filled) - len(dy)).contiguous()
    return _sample_mm24(filled, x, key, stride, layout, backend)


@kernels_of("sample24")
def _(layout, stride, dy, key):
    whole = whole_blocks(dy.reshape(-1, dy.shape[-1]), dy.dtype, layout)
    return packed_sample(whole, key, stride, dy.dtype, layout, "triton")


@launched_by_cpp(
    "plan24(int rows, int columns, int tokens, ScalarType dtype, ScalarType out_dtype, "
    "bool dense_transposed, bool result_transposed, bool biased, str layout, int device, "
    "int stream) -> int"
)
def _(*given):
    *fields, device, stream = given
    try:
        return native.launch(_plan(tuple(fields), device, stream))
    except Exception as error:  # would be lost on its way through C++
        return native.failed(error)


@launched_by_cpp("place24(int device, int stream) -> int")
def _(device, stream):
    try:
        return native.place(table.device_of(device))
    except Exception as error:  # would be lost on its way through C++
        return native.failed(error)


@functools.cache  # never dropped: a captured graph uses the memory of its plans
def _plan(fields: tuple[Any, ...], device: int, stream: int) -> cusparselt.Plan | cuda.Plan:
    """The plan of a product on one stream. Each stream has its own, because a plan has one buffer
    for a bias. (Do not replay two CUDA graphs of one stream concurrently: they share it.)"""
    problem = Problem(*fields)
    check_available(problem, torch.device("cuda", device))
    with torch.autocast("cuda", enabled=False):
        algorithm = table.entry(problem, device).algorithm
    if algorithm == table.NONE:
        raise RuntimeError(f"no kernel gives a correct result for {problem}; run it dense")
    return table.plan_of(problem, algorithm, device)
