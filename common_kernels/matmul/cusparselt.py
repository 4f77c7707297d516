"""cuSPARSELt through ctypes: sparse @ dense with plans that are built once.

torch's own operator (`_cslt_sparse_mm`) builds descriptors and plan in every call, which takes some
300 us of CPU time on an H200 host; a launch from here takes 20 us.
"""

import ctypes
import threading
from dataclasses import dataclass
from typing import Any

import torch

from common_kernels.backend import lasting
from common_kernels.pack.cpu import BUFFERED
from common_kernels.pack.cusparselt import OPAQUE, ROW_MAJOR, TYPES, call, describe, handle

_FLOAT32 = 0
_COLUMN_MAJOR = 1  # cusparseOrder_t
_PLAIN, _TRANSPOSED = 0, 1  # cusparseOperation_t
_COMPUTE_32F = 2  # cusparseComputeType
_BIAS_POINTER = 8  # cusparseLtMatmulDescAttribute_t
_CONFIG_ID, _CONFIG_MAX_ID = 0, 1  # cusparseLtMatmulAlgAttribute_t
_ONE, _ZERO = ctypes.c_float(1.0), ctypes.c_float(0.0)


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


def work_space(size: int, device: torch.device) -> torch.Tensor | None:
    """A workspace of `size` bytes for a launch; None if `size` is 0."""
    return torch.empty(size, dtype=torch.uint8, device=device) if size else None


class Plan:
    """One problem with one algorithm on one device, ready for launches from one stream.

    `algorithms` is the number of algorithms that the library has for the problem, `opaque` the
    library's own plan, `bias` where it reads the bias, `space` a workspace that C++ uses.
    """

    bias: torch.Tensor | None
    space: torch.Tensor | None

    def __init__(self, problem: Problem, algorithm: int, device: int) -> None:
        p, self.problem, self.handle = problem, problem, handle(device)
        self.device, self.bias, self.space = device, None, None
        self._launching = threading.Lock()
        self._descriptors = [ctypes.create_string_buffer(OPAQUE) for _ in range(7)]
        a, b, c, d, matmul, selection, self.opaque = self._descriptors
        dtype, out_dtype = TYPES[p.dtype], TYPES.get(p.out_dtype, _FLOAT32)
        sizes, lead = (p.rows, p.tokens), p.result_shape[1]
        order = _COLUMN_MAJOR if p.result_transposed else ROW_MAJOR
        describe("Structured", self.handle, a, p.rows, p.columns, p.columns, dtype, ROW_MAJOR, 0)
        describe("Dense", self.handle, b, *p.dense_shape, p.dense_shape[1], dtype, ROW_MAJOR)
        for descriptor in (c, d):
            describe("Dense", self.handle, descriptor, *sizes, lead, out_dtype, order)
        call(
            "cusparseLtMatmulDescriptorInit", self.handle, matmul, _PLAIN,
            _TRANSPOSED if p.dense_transposed else _PLAIN, a, b, c, d, _COMPUTE_32F,
        )  # fmt: skip
        if p.biased:
            # A plan keeps one address for the bias, so the bias is copied there before each launch.
            self.bias = lasting(device, p.rows, p.out_dtype)
            address = ctypes.c_void_p(self.bias.data_ptr())
            self._attribute("MatmulDescSet", matmul, _BIAS_POINTER, address)
        call("cusparseLtMatmulAlgSelectionInit", self.handle, selection, matmul, 0)
        count, chosen, size = ctypes.c_int(), ctypes.c_int(algorithm), ctypes.c_size_t()
        self._attribute("MatmulAlgGet", selection, _CONFIG_MAX_ID, count)
        self._attribute("MatmulAlgSet", selection, _CONFIG_ID, chosen)
        call("cusparseLtMatmulPlanInit", self.handle, self.opaque, matmul, selection)
        call("cusparseLtMatmulGetWorkspace", self.handle, self.opaque, ctypes.byref(size))
        self.algorithms, self.workspace = count.value, size.value

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
