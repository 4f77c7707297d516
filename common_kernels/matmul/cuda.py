"""2:4 products of our own on compute capability 9.0, from CUTLASS' sparse collectives.

cuSPARSELt is within a few per cent of them for large products and up to a quarter slower where a
side of the weight is 1,024 to 1,280 (docs/speed.md). `Config` is one compiled kernel; which serves
a product best, and whether cuSPARSELt or the dense product is faster, is measured (table.py).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from common_kernels.matmul import cuda_build
from common_kernels.matmul.cusparselt import Problem, aligned
from common_kernels.matmul.table import Trial, refuse_capture, replay_ms
from common_kernels.pack import Packed24, convert24

SOURCE = cuda_build.SOURCES / "product24_sm90.cu"
LAYOUTS = ("cutlass_sm90", "cutlass_sm90_k128")  # of the packed matrix
ORDERS = ((1, 1), (1, 4), (2, 1), (2, 4))  # raster and swizzle, in which the tiles are gone through


class CudaProductError(RuntimeError):
    """A kernel refused a product; the text says which, and with what status of CUTLASS."""


@dataclass(frozen=True)
class Config:
    """One compiled kernel.

    dtype: bf16 or float8_e4m3fn, of both operands; the result is bf16.
    tile: rows, tokens and columns that a thread block multiplies at a time.
    cluster: thread blocks along rows and tokens that share what they load.
    pingpong: two groups of warps take turns at tiles, instead of sharing one.
    stream_k: tiles are split along the columns too, so that no multiprocessor idles at the end.
    wgrad: the dense operand is [columns, tokens] and the result [rows, tokens], else both are
        transposed.
    """

    dtype: torch.dtype
    tile: tuple[int, int, int]
    cluster: tuple[int, int] = (2, 1)
    pingpong: bool = False
    stream_k: bool = False
    wgrad: bool = False

    @property
    def name(self) -> str:
        """A name for files and records, such as `bf16_128x256x64_2x1_shared`."""
        kind = "fp8" if self.dtype.itemsize == 1 else "bf16"
        words = [kind, "x".join(map(str, self.tile)), "x".join(map(str, self.cluster))]
        words.append("pingpong" if self.pingpong else "shared")
        words += ["stream_k"] * self.stream_k + ["wgrad"] * self.wgrad
        return "_".join(words)

    @property
    def layout(self) -> str:
        """The layout of the packed matrix, which follows from the columns taken at a time."""
        return LAYOUTS[self.dtype.itemsize == 2 and self.tile[2] >= 128]

    def macros(self) -> dict[str, int]:
        """The macros that the source is compiled with, by name."""
        sizes = zip("MNK", self.tile, strict=True)
        return {
            "FP8": int(self.dtype.itemsize == 1),
            **{f"TILE_{axis}": size for axis, size in sizes},
            "CLUSTER_M": self.cluster[0],
            "CLUSTER_N": self.cluster[1],
            "PINGPONG": int(self.pingpong),
            "STREAM_K": int(self.stream_k),
            "WGRAD": int(self.wgrad),
        }


_BF16, _FP8 = torch.bfloat16, torch.float8_e4m3fn
# Of 67 configurations measured on an H200, those that were the fastest for some shape.
CONFIGS = (
    Config(_BF16, (128, 256, 64)),
    Config(_BF16, (128, 256, 64), stream_k=True),
    Config(_BF16, (128, 192, 128), pingpong=True),
    Config(_BF16, (128, 256, 64), wgrad=True),
    Config(_FP8, (128, 256, 128)),
    Config(_FP8, (128, 128, 256), pingpong=True),
)


def configs(problem: Problem, layout: str) -> list[Config]:
    """The kernels that can serve a product with a matrix in this layout; none if its types or its
    sizes do not fit."""
    wgrad = not problem.dense_transposed
    if wgrad == problem.result_transposed or problem.out_dtype is not torch.bfloat16:
        return []
    if wgrad and problem.tokens % 8:  # rows of x and of the result begin at multiples of 16 bytes
        return []
    kind = (problem.dtype, wgrad, layout)
    return [config for config in CONFIGS if (config.dtype, config.wgrad, config.layout) == kind]


class _Arguments(ctypes.Structure):
    """`Arguments` of the source."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("rows", "tokens", "columns", "raster", "swizzle")),
        *((name, ctypes.c_int32) for name in ("multiprocessors", "clusters")),
        *((name, ctypes.c_void_p) for name in ("values", "metadata", "x", "bias")),
        *((name, ctypes.c_void_p) for name in ("scale_a", "scale_b", "result", "workspace")),
    )


@functools.cache
def _library(config: Config) -> ctypes.CDLL:
    """The compiled kernel; all that can be needed are compiled at the first call."""
    paths = cuda_build.build(SOURCE, {c.name: c.macros() for c in CONFIGS})
    loaded = ctypes.CDLL(str(paths[config.name]))
    loaded.workspace_bytes.restype = loaded.metadata_place.restype = ctypes.c_int64
    loaded.metadata_place.argtypes = (ctypes.c_int32,) * 4
    loaded.workspace_bytes.argtypes = (ctypes.POINTER(_Arguments),)
    loaded.launch.argtypes = (ctypes.POINTER(_Arguments), ctypes.c_void_p)
    return loaded


class Plan:
    """A product that can be launched again and again, on one device.

    Raises:
        CudaProductError: CUTLASS refuses the shape.
        cuda_build.BuildError: the kernel cannot be compiled here.
    """

    def __init__(
        self, problem: Problem, config: Config, device: int, raster: int = 0, swizzle: int = 1
    ) -> None:
        self.problem, self.config, self.device = problem, config, device
        self._library = _library(config)
        with torch.cuda.device(device):
            clusters = self._library.most_clusters()
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._arguments = _Arguments(
            problem.rows, problem.tokens, problem.columns, raster, swizzle, processors, clusters
        )
        self._workspace = self._library.workspace_bytes(ctypes.byref(self._arguments))

    def run(
        self,
        values: Tensor,
        metadata: Tensor,
        x: Tensor,
        out: Tensor,
        bias: Tensor | None = None,
        scales: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Launch on the current stream. The caller vouches for shapes, dtypes and contiguity.

        Args:
            values, metadata: the packed matrix [rows, columns].
            bias: bf16 [rows]. scales: fp32 numbers by which the sum is multiplied, on the device.
        """
        a = _Arguments.from_buffer_copy(self._arguments)  # another thread may launch this plan, too
        workspace = torch.empty(self._workspace, dtype=torch.uint8, device=out.device)
        a.values, a.metadata, a.x = values.data_ptr(), metadata.data_ptr(), x.data_ptr()
        a.result, a.workspace = out.data_ptr(), workspace.data_ptr()
        a.bias = None if bias is None else bias.data_ptr()
        a.scale_a, a.scale_b = (None, None) if scales is None else (s.data_ptr() for s in scales)
        stream = torch.cuda.current_stream(out.device).cuda_stream
        status = self._library.launch(ctypes.byref(a), stream)
        if status:
            raise CudaProductError(
                f"kernel {self.config.name} refused {self.problem}: status {status}"
            )


def linear(packed: Packed24, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [tokens, columns] A^T + bias [rows] -> bf16 [tokens, rows], by the fastest kernel.

    Args:
        packed: A [rows, columns], bf16 or e4m3, in one of LAYOUTS. x: of the same dtype.
    Raises:
        CudaProductError: no kernel serves the product, or none is right.
    """
    (rows, columns), tokens, result = packed.shape, len(x), torch.bfloat16
    out = torch.empty(tokens, rows, dtype=result, device=x.device)
    if tokens:
        kind = (packed.dtype, result, True, True, bias is not None)
        problem = Problem(rows, columns, tokens, *kind)
        bias = None if bias is None else aligned(bias.to(result).contiguous())
        with torch.cuda.device(x.device):
            plan = fastest(problem, packed.layout, torch.cuda.current_device())
            values, meta = aligned(packed.values), aligned(packed.meta)
            plan.run(values, meta, aligned(x.contiguous()), out, bias)
    return out


@functools.lru_cache(maxsize=1024)
def fastest(problem: Problem, layout: str, device: int) -> Plan:
    """The fastest plan that is right, by measuring all of them; kept for the process.

    Raises:
        CudaProductError: none serves the product, or none is right.
        RuntimeError: it must be measured while a CUDA graph is captured.
    """
    refuse_capture(problem)
    with torch.autocast("cuda", enabled=False):
        return _measured(problem, layout, device)


def _measured(problem: Problem, layout: str, device: int) -> Plan:
    trial = Trial(problem, device)
    a = convert24(trial.packed, layout)
    best, least = None, float("inf")
    for config in configs(problem, layout):
        for order in ORDERS:
            plan = Plan(problem, config, device, *order)
            run = functools.partial(_run, plan, a, trial)
            try:
                ms = _ms(run, trial) if trial.agrees(run) else float("inf")
            except CudaProductError:
                continue
            if ms < least:
                best, least = plan, ms
    if best is None:
        raise CudaProductError(f"no kernel of layout {layout!r} serves {problem}; run it dense")
    return best


def _ms(run: Callable[[Tensor], None], trial: Trial) -> float:
    return replay_ms(lambda i: run(trial.dense[i]))


def _run(plan: Plan, a: Packed24, trial: Trial, x: Tensor) -> None:
    plan.run(a.values, a.meta, x, trial.out, trial.bias)
