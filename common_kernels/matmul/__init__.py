"""Products of a compressed 2:4 matrix A [rows, columns] with a dense one.

Backends:

    dense        the matrix is expanded and multiplied: any device; what all others must equal
    cutlass      torch's CUTLASS kernels: compute capability 8.x, 16-bit types
    cusparselt   cuSPARSELt: compute capability 9.0, 16-bit and FP8 types; plans and the choice of
                 an algorithm are kept (table.py)
    cuda         our own for compute capability 9.0, bf16 and e4m3, compiled when it is first asked
                 for by name or by a layout of its own (cuda.py)

cuSPARSELt takes layout `cusparselt_sm90`, as `common_kernels.pack.operands` writes it. On a CPU
under Triton's interpreter its products are emulated.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from common_kernels import backend as backends
from common_kernels import checks
from common_kernels.library import custom_op
from common_kernels.matmul import cuda_build, cusparselt
from common_kernels.matmul.cusparselt import Problem, aligned
from common_kernels.pack import BUFFERED, Packed24, convert24, unpack24
from common_kernels.pack.operands import fill_up

BACKENDS = ("dense", "cutlass", "cusparselt", "cuda")


def unavailable(backend: str, device: torch.device | str, dtype: torch.dtype) -> str | None:
    """Why `backend` cannot multiply matrices of `dtype` on `device`; None if it can.

    Raises ValueError on an unknown name.
    """
    if backend not in BACKENDS:
        raise ValueError(f"unknown matmul backend {backend!r}: choose one of {', '.join(BACKENDS)}")
    device = torch.device(device)
    if backend == "dense":
        return None
    sixteen = dtype in (torch.bfloat16, torch.float16)
    if backend == "cutlass":
        if not sixteen:
            return f"torch's CUTLASS products take bf16 and fp16 here, not {dtype}"
        return _wrong_capability(device, 8, "torch's CUTLASS products")
    if backend == "cuda":
        if dtype not in (torch.bfloat16, torch.float8_e4m3fn):
            return f"our own products take bf16 and e4m3, not {dtype}"
        return _wrong_capability(device, 9, "our own products") or cuda_build.missing()
    if dtype not in cusparselt.TYPES:
        return f"cuSPARSELt takes bf16, fp16 and FP8 here, not {dtype}"
    if device.type == "cpu" and backends.interpreted():
        return None
    reason = _wrong_capability(device, 9, "cuSPARSELt (the order of its metadata is known for 9.0)")
    if reason is None:
        try:
            cusparselt.library()
        except cusparselt.CuSparseLtError as error:
            reason = str(error)
    return reason


def _wrong_capability(device: torch.device, major: int, what: str) -> str | None:
    if device.type != "cuda":
        return f"{what} needs a GPU of compute capability {major}.x, not a {device.type}"
    found = torch.cuda.get_device_capability(device)
    if found[0] != major:
        return f"{what} needs compute capability {major}.x, this GPU has {found}"
    return None


def matmul24(
    packed: Packed24, x: Tensor, bias: Tensor | None = None, *, backend: str | None = None
) -> Tensor:
    """x [..., columns] A^T + bias [rows] -> [..., rows] for a packed A [rows, columns].

    x, of A's dtype, is on A's device. The default backend is the sparse one that can serve the
    device, dtype and layout as it is, else `dense`; `chosen` names it. Any layout will do where a
    backend is named, but it is converted at every call: convert it once with convert24. No gradient
    is defined.

    Raises RuntimeError if the backend cannot serve, with the reason, ValueError on other shapes.
    """
    _check_fit(packed, x, x.shape[-1])
    if bias is not None and bias.shape != (packed.shape[0],):
        raise ValueError(f"bias must have shape ({packed.shape[0]},), not {tuple(bias.shape)}")
    checks.one_device(matrix=packed.parts[0], x=x, bias=bias)
    name = chosen(packed, backend)
    x2d = x.detach().reshape(-1, x.shape[-1])
    if name == "cusparselt":
        y = linear24(convert24(packed, BUFFERED), x2d, bias, _out_dtype(x.dtype))
    elif name == "cutlass":
        y = _cutlass(convert24(packed, "cutlass_sm80"), x2d, bias)
    elif name == "cuda":
        from common_kernels.matmul import cuda

        own = packed if packed.layout in cuda.LAYOUTS else convert24(packed, cuda.LAYOUTS[0])
        y = cuda.linear(own, x2d, bias)
    else:
        y = F.linear(*(t.float() if t.element_size() == 1 else t for t in (x2d, unpack24(packed))))
        y = (y if bias is None else y + bias).to(_out_dtype(x.dtype))
    return y.reshape(*x.shape[:-1], packed.shape[0])


def chosen(packed: Packed24, backend: str | None = None) -> str:
    """The backend that matmul24 takes: the one named, if it can serve, else what suits."""
    device, dtype = packed.parts[0].device, packed.dtype
    if backend is None:
        native = {"cutlass_sm80": "cutlass", BUFFERED: "cusparselt", "cutlass_sm90": "cuda"}
        native["cutlass_sm90_k128"] = "cuda"
        name = native.get(packed.layout, "dense")
        return "dense" if unavailable(name, device, dtype) else name
    reason = unavailable(backend, device, dtype)
    if reason:
        raise RuntimeError(f"matmul backend {backend!r} cannot serve {str(device)!r}: {reason}")
    return backend


def _out_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if dtype.itemsize == 1 else dtype


def _cutlass(packed: Packed24, x: Tensor, bias: Tensor | None) -> Tensor:
    """torch's operator multiplies from the left: its result is y^T."""
    tokens = x.shape[0]
    x = fill_up(x, -tokens % _multiple(x))
    if bias is None:
        y = torch.ops.aten._sparse_semi_structured_mm(packed.values, packed.meta, x.t())
    else:
        y = torch.ops.aten._sparse_semi_structured_addmm(bias, packed.values, packed.meta, x.t())
    return y.t()[:tokens]


# --- the products of training --------------------------------------------------------------------


def linear24(
    packed: Packed24, x: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """x [tokens, columns] A^T + bias [rows] -> [tokens, rows] by cuSPARSELt, A in its layout.

    x is row-major, of A's dtype; out_dtype is that, or bf16, fp16 or fp32 for FP8. Tokens are
    filled up with zero rows to what the library takes.
    """
    buffer, (rows, columns) = packed.buffer, packed.shape
    _check_fit(packed, x, x.shape[1])
    checks.one_device(matrix=buffer, x=x, bias=bias)
    tokens = x.shape[0]
    x = fill_up(x, -tokens % _multiple(x)).contiguous()
    y = _matmul24(buffer, rows, columns, x, bias, True, True, out_dtype or x.dtype)
    # A copy where rows were filled up: a view could not be changed in place behind a Function.
    return y if len(x) == tokens else y.narrow_copy(0, 0, tokens)


def mm24(
    packed: Packed24, x: Tensor, out_dtype: torch.dtype | None = None, *, transposed: bool = False
) -> Tensor:
    """A [rows, columns] x [columns, n] -> [rows, n] by cuSPARSELt, A in its layout.

    transposed: x is given as [n, columns], which is the only form that FP8 takes. Columns beyond
    those of x count as zeros of A: x is filled up with rows of zeros.
    """
    buffer, (rows, columns) = packed.buffer, packed.shape
    checks.one_device(matrix=buffer, x=x)
    if not transposed:
        if x.shape[0] > columns:
            raise ValueError(f"x has {x.shape[0]} rows, the sparse matrix only {columns} columns")
        x = fill_up(x, columns - x.shape[0])
    _check_fit(packed, x, x.shape[1] if transposed else columns)
    x = x.contiguous()
    return _matmul24(buffer, rows, columns, x, None, transposed, False, out_dtype or x.dtype)


def _check_fit(packed: Packed24, x: Tensor, summed: int) -> None:
    if x.dtype != packed.dtype or summed != packed.shape[1]:
        raise ValueError(
            f"x {tuple(x.shape)} of {x.dtype} does not fit a sparse {tuple(packed.shape)} of "
            f"{packed.dtype}"
        )


def _multiple(x: Tensor) -> int:
    return 16 // x.element_size()


@custom_op("sparse24::matmul24", mutates_args=())
def _matmul24(
    buffer: Tensor,
    rows: int,
    columns: int,
    dense: Tensor,
    bias: Tensor | None,
    dense_transposed: bool,
    result_transposed: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    problem = Problem(
        rows, columns, dense.shape[0 if dense_transposed else 1], dense.dtype, out_dtype,
        dense_transposed, result_transposed, bias is not None,
    )  # fmt: skip
    return _product(buffer, dense, bias, problem)


def _product(buffer: Tensor, dense: Tensor, bias: Tensor | None, problem: Problem) -> Tensor:
    if buffer.device.type == "cpu":
        with torch.autocast("cpu", enabled=False):
            return _emulate(buffer, dense, bias, problem)
    if not dense.numel():
        return torch.zeros(problem.result_shape, dtype=problem.out_dtype, device=buffer.device)
    with torch.cuda.device(buffer.device):
        out = torch.empty(problem.result_shape, dtype=problem.out_dtype, device=buffer.device)
        stream = torch.cuda.current_stream().cuda_stream
        plan = _plan(problem, buffer.device.index, stream)
        plan.run(aligned(buffer), aligned(dense), out, bias)
    return out


@_matmul24.register_fake
def _(buffer, rows, columns, dense, bias, dense_transposed, result_transposed, out_dtype):
    shape = (rows, dense.shape[0 if dense_transposed else 1])
    return buffer.new_empty(shape[::-1] if result_transposed else shape, dtype=out_dtype)


def _check_available(device: torch.device, dtype: torch.dtype) -> None:
    reason = unavailable("cusparselt", device, dtype)
    if reason:
        raise RuntimeError(f"matmul backend 'cusparselt' cannot serve: {reason}")


def is_faster(problem: Problem, device: torch.device) -> bool:
    """True if cuSPARSELt's product is faster than the dense one: measured, here or before."""
    from common_kernels.matmul import table

    index = torch.cuda.current_device() if device.index is None else device.index
    with torch.autocast(device.type, enabled=False), torch.cuda.device(index):
        entry = table.entry(problem, index, within=2.0)
    return entry.ms < entry.dense_ms


def measured(problem: Problem, device: torch.device) -> tuple[float, float] | None:
    """Milliseconds of cuSPARSELt's product (infinite: it has no right one) and of the dense one, as
    they were measured here or before; None if they were not, or not on a GPU."""
    if device.type != "cuda":
        return None
    from common_kernels.matmul import table

    index = torch.cuda.current_device() if device.index is None else device.index
    entry = table.known(problem, index)
    return None if entry is None else (entry.ms, entry.dense_ms)


@functools.cache  # never dropped: a captured graph uses the memory of its plans
def _plan(problem: Problem, device: int, stream: int) -> cusparselt.Plan:
    """For each stream its own: a plan has one place for a bias. (Two graphs that were captured on
    one stream share it: do not replay them at the same time.)"""
    from common_kernels.matmul import table

    _check_available(torch.device("cuda", device), problem.dtype)
    with torch.autocast("cuda", enabled=False):
        algorithm = table.entry(problem, device).algorithm
    if algorithm == table.NONE:
        raise RuntimeError(f"cuSPARSELt has no algorithm that is right for {problem}; run it dense")
    return cusparselt.Plan(problem, algorithm, device)


def _emulate(buffer: Tensor, dense: Tensor, bias: Tensor | None, problem: Problem) -> Tensor:
    """The product in fp32, rounded once."""
    _check_available(buffer.device, problem.dtype)
    a = unpack24(Packed24((buffer,), (problem.rows, problem.columns), problem.dtype)).float()
    b = dense.float().t() if problem.dense_transposed else dense.float()
    product = a @ b
    if bias is not None:
        product += bias.float()[:, None]
    return (
        (product.t() if problem.result_transposed else product).to(problem.out_dtype).contiguous()
    )
