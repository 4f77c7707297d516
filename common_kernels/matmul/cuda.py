"""Our own kernels for 2:4 products on compute capability 9.0, from CUTLASS' sparse collectives.

For large products cuSPARSELt is within a few per cent of them; if a side of the weight is 1,024 to
1,280, it is up to a quarter slower (docs/speed.md). With few tokens, as in decoding, they read the
weight nearly as fast as the memory gives it (docs/serving.md). A `Config` is one compiled kernel.
Measurement decides whether one of them, cuSPARSELt or the dense product is the fastest (table.py).
"""

import ctypes
import functools
import hashlib
import struct
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from common_kernels.matmul import cuda_build
from common_kernels.matmul.cusparselt import Problem, work_space

SOURCE = cuda_build.SOURCES / "product24_sm90.cu"
LAYOUTS = ("cutlass_sm90", "cutlass_sm90_k128")  # layouts of the packed matrix
TYPES = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
FEW = 128  # up to so many tokens, tiles have few of them
ORDERS = ((1, 1), (1, 4), (2, 1), (2, 4))  # (raster, swizzle): orders in which tiles are processed


class CudaProductError(RuntimeError):
    """A kernel refused a product; the message names both and the status."""


@dataclass(frozen=True)
class Config:
    """One compiled kernel.

    dtype: the dtype of both operands, bf16, float8_e4m3fn or float8_e5m2.
    tile: rows, tokens and columns that a thread block multiplies at a time.
    cluster: number of thread blocks along rows and tokens that share what they load.
    pingpong: two groups of warps work on alternate tiles instead of sharing one.
    stream_k: tiles are split along the columns too, so that no multiprocessor idles at the end.
    wgrad: if True, the result is [rows, tokens] (fp32 for FP8 operands), and a bf16 dense operand
        is [columns, tokens]. If False, the result is bf16 [tokens, rows], and the dense operand
        [tokens, columns].
    """

    dtype: torch.dtype
    tile: tuple[int, int, int]
    cluster: tuple[int, int] = (2, 1)
    pingpong: bool = False
    stream_k: bool = False
    wgrad: bool = False

    @property
    def name(self) -> str:
        """The kernel's name in files and records, such as `bf16_128x256x64_2x1_shared`."""
        kind = ("bf16", "e4m3", "e5m2")[TYPES.index(self.dtype)]
        words = [kind, "x".join(map(str, self.tile)), "x".join(map(str, self.cluster))]
        words.append("pingpong" if self.pingpong else "shared")
        words += ["stream_k"] * self.stream_k + ["wgrad"] * self.wgrad
        return "_".join(words)

    @property
    def few(self) -> bool:
        """True for a kernel for at most `FEW` tokens."""
        return self.tile[1] <= 64

    @property
    def layout(self) -> str:
        """The layout of the packed matrix, which follows from the tile's number of columns."""
        return LAYOUTS[self.dtype.itemsize == 2 and self.tile[2] >= 128]

    def macros(self) -> dict[str, int]:
        """The macros that the source is compiled with, by name."""
        sizes = zip("MNK", self.tile, strict=True)
        return {
            "FP8": TYPES.index(self.dtype),
            **{f"TILE_{axis}": size for axis, size in sizes},
            "CLUSTER_M": self.cluster[0],
            "CLUSTER_N": self.cluster[1],
            "PINGPONG": int(self.pingpong),
            "STREAM_K": int(self.stream_k),
            "WGRAD": int(self.wgrad),
        }


_BF16, _E4M3, _E5M2 = TYPES
# The configurations that were fastest for some shape, out of 67 (for few tokens, 10) measured on an
# H200; for e5m2 and for wgrad, the corresponding ones.
CONFIGS = (
    Config(_BF16, (64, 16, 256), (1, 1), pingpong=True),
    Config(_BF16, (64, 32, 256), (1, 1), pingpong=True),
    Config(_BF16, (64, 64, 256), (1, 1), pingpong=True),
    Config(_BF16, (128, 64, 128), (1, 1), stream_k=True),
    Config(_BF16, (256, 64, 128), (1, 1), stream_k=True),
    Config(_BF16, (128, 256, 64)),
    Config(_BF16, (128, 256, 64), stream_k=True),
    Config(_BF16, (128, 192, 128), pingpong=True),
    Config(_BF16, (128, 256, 64), wgrad=True),
    Config(_E4M3, (128, 256, 128)),
    Config(_E4M3, (128, 128, 256), pingpong=True),
    Config(_E5M2, (128, 256, 128)),
    Config(_E5M2, (128, 128, 256), pingpong=True),
    Config(_E5M2, (128, 128, 128), wgrad=True),
    Config(_E5M2, (128, 256, 128), wgrad=True),
)


def configs(problem: Problem) -> list[Config]:
    """The kernels that can serve a product; empty if none fits its dtype, sizes and layout."""
    wgrad, codes = not problem.result_transposed, problem.dtype.itemsize == 1
    if problem.dense_transposed == (wgrad and not codes):
        return []
    if problem.out_dtype != (torch.float32 if wgrad and codes else torch.bfloat16):
        return []
    if wgrad and problem.tokens % 8:  # rows of x and the result need 16-byte alignment
        return []
    kind = (problem.dtype, wgrad, problem.layout)
    found = [config for config in CONFIGS if (config.dtype, config.wgrad, config.layout) == kind]
    few = [config for config in found if config.few]
    return few if few and problem.tokens <= FEW else [c for c in found if not c.few]


def algorithms(problem: Problem) -> list[tuple[Config, int, int]]:
    """The (kernel, raster, swizzle) choices for a product, of which table.py stores the index."""
    return [(config, *order) for config in configs(problem) for order in ORDERS]


@functools.cache
def version() -> str:
    """A version string that changes with the kernels or with the order of `algorithms`."""
    numbered = hashlib.sha256(repr((CONFIGS, FEW, ORDERS)).encode()).hexdigest()[:8]
    return f"{cuda_build.folder(SOURCE).name}-{numbered}"


class _Sizes(ctypes.Structure):
    """The struct `Sizes` of the CUDA source."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("rows", "tokens", "columns", "raster", "swizzle")),
        ("multiprocessors", ctypes.c_int32),
    )


# The struct `Addresses` of the CUDA source: values, metadata, x, bias, scale_a, scale_b, result,
# workspace. Packing them into one string of bytes takes half as long as setting them one by one.
_ADDRESSES = struct.Struct("8P").pack


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


@functools.cache
def _library(config: Config) -> ctypes.CDLL:
    """The library of a kernel. All kernels of its dtype for few tokens, or for many, are compiled
    when one is first needed."""
    built = _built(config.dtype, config.few)
    if isinstance(built, str):
        raise cuda_build.BuildError(built)
    return _load(built[config.name])


@functools.cache  # failures too: else each product of a model would try again, for minutes
def _built(dtype: torch.dtype, few: bool) -> dict[str, Path] | str:
    """The libraries of such kernels of a dtype by name, or the reason why they cannot be built."""
    wanted = [config for config in CONFIGS if (config.dtype, config.few) == (dtype, few)]
    try:
        return cuda_build.build(SOURCE, {config.name: config.macros() for config in wanted})
    except cuda_build.BuildError as error:
        return str(error)


def _load(library: Path) -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(library))
    loaded.metadata_place.restype = ctypes.c_int64
    loaded.metadata_place.argtypes = (ctypes.c_int32,) * 4
    # The plan, the bytes of `_ADDRESSES`, the stream.
    loaded.launch.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return loaded


class Plan:
    """A product that can be launched repeatedly, on one device and any of its streams.

    C++ reads `launch`, the kernel's function; `prepared`, the address of all that its launches have
    in common, which lasts as long as the process; `values`, the bytes of the packed matrix before
    its metadata; `workspace`, its bytes; and `refused`, the message of a failure before its status.

    Raises:
        CudaProductError: no kernel has this number, or CUTLASS refuses the shape.
        cuda_build.BuildError: the kernel cannot be compiled here.
    """

    def __init__(self, problem: Problem, algorithm: int, device: int) -> None:
        choices = algorithms(problem)
        if algorithm >= len(choices):
            raise CudaProductError(f"our kernels have no algorithm {algorithm} for {problem}")
        self.problem, self.algorithms = problem, len(choices)
        self.config, raster, swizzle = choices[algorithm]
        self._library = _library(self.config)
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        p, prepared, workspace = problem, ctypes.c_void_p(), ctypes.c_int64()
        sizes = _Sizes(p.rows, p.tokens, p.columns, raster, swizzle, processors)
        self.refused = f"kernel {self.config.name} refused {p}: status "
        with torch.cuda.device(device):
            status = self._library.prepare(*map(ctypes.byref, (sizes, prepared, workspace)))
        if status:
            raise CudaProductError(f"{self.refused}{status}")
        self.launch, self.prepared = self._library.launch, prepared.value
        self.workspace = workspace.value
        self.values = p.rows * (p.columns // 2) * p.dtype.itemsize

    def run(
        self,
        buffer: Tensor,
        dense: Tensor,
        out: Tensor,
        bias: Tensor | None = None,
        scales: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Launch on the current stream. The caller vouches for shapes, dtypes and contiguity.

        Args:
            buffer: the values of the packed matrix [rows, columns], then its metadata.
            bias: bf16 [rows]. scales: fp32 numbers by which the sum is divided, on the device.
        """
        workspace = work_space(self.workspace, out.device)
        values, (scale, other) = buffer.data_ptr(), scales or (None, None)
        addresses = _ADDRESSES(
            values, values + self.values, dense.data_ptr(), _address(bias), _address(scale),
            _address(other), out.data_ptr(), _address(workspace),
        )  # fmt: skip
        stream = torch._C._cuda_getCurrentRawStream(out.device.index)
        status = self.launch(self.prepared, addresses, stream)
        if status:
            raise CudaProductError(f"{self.refused}{status}")
