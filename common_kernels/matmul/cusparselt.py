"""cuSPARSELt through ctypes: sparse @ dense with plans that are built once.

torch's own operator (`_cslt_sparse_mm`) builds descriptors and plan in every call, which takes some
300 us of CPU time on an H200 host; a launch from here takes 20 us. The library is the one that
torch has loaded, else that of NVIDIA's wheel.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from common_kernels.pack.cpu import BUFFERED

# The cudaDataType of each dtype that the operands may have.
TYPES = {
    torch.float16: 2,
    torch.bfloat16: 14,
    torch.float8_e4m3fn: 28,
    torch.float8_e5m2: 29,
}
_FLOAT32 = 0
_COLUMN_MAJOR, _ROW_MAJOR = 1, 2  # cusparseOrder_t
_PLAIN, _TRANSPOSED = 0, 1  # cusparseOperation_t
_COMPUTE_32F = 2  # cusparseComputeType
_BIAS_POINTER = 8  # cusparseLtMatmulDescAttribute_t
_CONFIG_ID, _CONFIG_MAX_ID = 0, 1  # cusparseLtMatmulAlgAttribute_t
_OPAQUE = 2048  # bytes reserved for a structure of the library; version 0.8 uses 512
_ALIGNMENT = 16  # bytes
_ONE, _ZERO = ctypes.c_float(1.0), ctypes.c_float(0.0)


class CuSparseLtError(RuntimeError):
    """A call of the library failed; the message names the call and the reason."""


@dataclass(frozen=True)
class Problem:
    """A product D [rows, tokens] = A [rows, columns] @ B [columns, tokens] with A compressed 2:4.

    dense_transposed: B is given as a row-major [tokens, columns].
    result_transposed: D is written as a row-major [tokens, rows].
    biased: bias [rows, 1] is added to D.
    layout: the layout of A, which decides whether cuSPARSELt or our own kernels multiply.
    """

    rows: int
    columns: int
    tokens: int
    dtype: torch.dtype
    out_dtype: torch.dtype
    dense_transposed: bool
    result_transposed: bool
    biased: bool = False
    layout: str = BUFFERED

    @property
    def dense_shape(self) -> tuple[int, int]:
        shape = (self.columns, self.tokens)
        return shape[::-1] if self.dense_transposed else shape

    @property
    def result_shape(self) -> tuple[int, int]:
        shape = (self.rows, self.tokens)
        return shape[::-1] if self.result_transposed else shape


def aligned(x: torch.Tensor) -> torch.Tensor:
    """x itself if its memory is aligned as GPU kernels need it, else a copy."""
    return x.clone() if x.data_ptr() % _ALIGNMENT else x


def work_space(size: int, device: torch.device) -> torch.Tensor | None:
    """A workspace of `size` bytes for a launch; None if `size` is 0."""
    return torch.empty(size, dtype=torch.uint8, device=device) if size else None


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded library. Raises CuSparseLtError if there is none."""
    name = "libcusparseLt.so.0"
    try:
        loaded = ctypes.CDLL(name)
    except OSError as error:
        # Up to version 0.9 in nvidia/cusparselt, since 0.10 in nvidia/cu13.
        found = [file for path in sys.path for file in Path(path).glob(f"nvidia/*/lib/{name}")]
        if not found:
            raise CuSparseLtError(f"cuSPARSELt cannot be loaded: {error}") from error
        loaded = ctypes.CDLL(str(found[0]))
    loaded.cusparseLtGetErrorString.restype = ctypes.c_char_p
    loaded.cusparseLtMatmul.argtypes = (*(ctypes.c_void_p,) * 10, ctypes.c_int32)
    return loaded


def call(name: str, *arguments: Any) -> None:
    status = getattr(library(), name)(*arguments)
    if status:
        reason = library().cusparseLtGetErrorString(status).decode()
        raise CuSparseLtError(f"{name}: {reason}")


@functools.cache
def handle(device: int) -> ctypes.Array:
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # the device's context must exist
        opaque = ctypes.create_string_buffer(16 * _OPAQUE)
        call("cusparseLtInit", opaque)
    return opaque


@functools.cache
def version() -> str:
    """The library's version, such as `0.8.0`."""
    numbers = []
    for part in range(3):
        value = ctypes.c_int()
        call("cusparseLtGetProperty", part, ctypes.byref(value))
        numbers.append(str(value.value))
    return ".".join(numbers)


class Plan:
    """One problem with one algorithm on one device, ready for launches from one stream.

    `algorithms` is the number of algorithms that the library has for the problem, `opaque` the
    library's own plan, `bias` where it reads the bias.
    """

    def __init__(self, problem: Problem, algorithm: int, device: int) -> None:
        p, self.problem, self.handle = problem, problem, handle(device)
        self.result_shape, self.out_dtype = p.result_shape, p.out_dtype
        self.bias: torch.Tensor | None = None
        self._launching = threading.Lock()
        self._descriptors = [ctypes.create_string_buffer(_OPAQUE) for _ in range(7)]
        a, b, c, d, matmul, selection, self.opaque = self._descriptors
        self._describe("Structured", a, p.rows, p.columns, p.columns, TYPES[p.dtype], _ROW_MAJOR, 0)
        self._describe("Dense", b, *p.dense_shape, p.dense_shape[1], TYPES[p.dtype], _ROW_MAJOR)
        order = _COLUMN_MAJOR if p.result_transposed else _ROW_MAJOR
        out_dtype = TYPES.get(p.out_dtype, _FLOAT32)
        for descriptor in (c, d):
            self._describe(
                "Dense", descriptor, p.rows, p.tokens, p.result_shape[1], out_dtype, order
            )
        call(
            "cusparseLtMatmulDescriptorInit", self.handle, matmul, _PLAIN,
            _TRANSPOSED if p.dense_transposed else _PLAIN, a, b, c, d, _COMPUTE_32F,
        )  # fmt: skip
        if p.biased:
            # A plan keeps one address for the bias, so the bias is copied there before each launch.
            with torch.inference_mode(False):  # else no launch outside of it could write there
                self.bias = torch.empty(p.rows, dtype=p.out_dtype, device=device)
            address = ctypes.c_void_p(self.bias.data_ptr())
            self._attribute("MatmulDescSet", matmul, _BIAS_POINTER, address)
        call("cusparseLtMatmulAlgSelectionInit", self.handle, selection, matmul, 0)
        count, chosen, size = ctypes.c_int(), ctypes.c_int(algorithm), ctypes.c_size_t()
        self._attribute("MatmulAlgGet", selection, _CONFIG_MAX_ID, count)
        self._attribute("MatmulAlgSet", selection, _CONFIG_ID, chosen)
        call("cusparseLtMatmulPlanInit", self.handle, self.opaque, matmul, selection)
        call("cusparseLtMatmulGetWorkspace", self.handle, self.opaque, ctypes.byref(size))
        self.algorithms, self.workspace = count.value, size.value

    def _describe(self, kind: str, descriptor: Any, rows: int, columns: int, lead: int, *rest: int):
        call(
            f"cusparseLt{kind}DescriptorInit", self.handle, descriptor, ctypes.c_int64(rows),
            ctypes.c_int64(columns), ctypes.c_int64(lead), _ALIGNMENT, *rest,
        )  # fmt: skip

    def _attribute(self, verb: str, descriptor: Any, attribute: int, value: Any) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        arguments = (descriptor, attribute, ctypes.byref(value), size)
        call(f"cusparseLt{verb}Attribute", self.handle, *arguments)

    def run(
        self,
        buffer: torch.Tensor,
        dense: torch.Tensor,
        out: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> None:
        """Launch on the current stream. The caller vouches for shapes, dtypes and contiguity."""
        workspace = work_space(self.workspace, out.device)
        stream = ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(out.device.index))
        result, space = out.data_ptr(), None if workspace is None else workspace.data_ptr()
        with self._launching:  # threads on one stream share the place for the bias
            if self.bias is not None and bias is not None:
                self.bias.copy_(bias)
            call(
                "cusparseLtMatmul", self.handle, self.opaque, ctypes.byref(_ONE),
                buffer.data_ptr(), dense.data_ptr(), ctypes.byref(_ZERO), result, result, space,
                ctypes.byref(stream), 1,
            )  # fmt: skip
