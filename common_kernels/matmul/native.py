"""The launch of sparse products in C++, with the sample of wgrad's, which takes the CPU a
fraction of the time that Python takes.

`csrc/native.cpp` is compiled when a GPU first needs it, by the C++ compiler alone (CXX, else c++).
Without a compiler, or with SPARSE24_NATIVE=0, Python launches the products.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from common_kernels.backend import HAS_TRITON, lasting
from common_kernels.library import KERNELS, LIBRARY, STARTS, launched_by_cpp
from common_kernels.matmul import cuda, cusparselt
from common_kernels.matmul.cuda_build import SOURCES, BuildError, cache, make
from common_kernels.pack.cusparselt import library

if TYPE_CHECKING:
    from common_kernels.launch import Launched

VARIABLE = "SPARSE24_NATIVE"
SOURCE = SOURCES / "native.cpp"
TORCH = Path(torch.__file__).parent
FLAGS = (
    "-std=c++17", "-O2", "-shared", "-fPIC", "-fvisibility=hidden",
    "-DTORCH_TARGET_VERSION=0x020b000000000000",  # torch 2.11
)  # fmt: skip


class Launch(ctypes.Structure):
    """The fields of a plan that C++ reads, or why there is none; native.cpp has the same."""

    _fields_ = (
        ("failure", ctypes.c_char_p),
        *((n, ctypes.c_void_p) for n in ("matmul", "error_string", "handle", "plan", "bias")),
        ("workspace", ctypes.c_int64),
        ("space", ctypes.c_void_p),
        ("own", ctypes.c_void_p),
        ("refused", ctypes.c_char_p),
        ("values", ctypes.c_int64),
    )


class Kernel(ctypes.Structure):
    """A kernel of Triton for C++, or why there is none; native.cpp has the same fields."""

    _fields_ = (
        ("failure", ctypes.c_char_p),
        *((name, ctypes.c_void_p) for name in ("launch", "function")),
        *((name, ctypes.c_int32) for name in ("blocks", "threads", "shared", "device")),
        ("bytes", ctypes.c_int64),
        ("ones", ctypes.c_int64),
    )


LIBRARY.define("launch24(int kernel, int[] arguments) -> ()")
SMALL = 4 << 20  # bytes of a workspace that a plan keeps; a larger one is allocated in each launch
_kept: dict[object, Any] = {}  # by plan; C++ has the addresses


def launch(plan: cusparselt.Plan | cuda.Plan) -> int:
    """The address of the `Launch` of a plan."""
    if isinstance(plan, cuda.Plan):
        found = _kept[plan] = Launch(
            plan=plan.prepared,
            workspace=plan.workspace,
            own=ctypes.cast(plan.launch, ctypes.c_void_p),
            refused=plan.refused.encode(),
            values=plan.values,
        )
        return ctypes.addressof(found)
    functions = library().cusparseLtMatmul, library().cusparseLtGetErrorString
    if 0 < plan.workspace <= SMALL:
        # As for the bias, the stream's next launch may use the same memory: it runs later.
        plan.space = lasting(plan.device, plan.workspace, torch.uint8)
    found = Launch(
        None,
        *(ctypes.cast(function, ctypes.c_void_p) for function in functions),
        *map(ctypes.addressof, (plan.handle, plan.opaque)),
        None if plan.bias is None else plan.bias.data_ptr(),
        plan.workspace,
        None if plan.space is None else plan.space.data_ptr(),
    )
    _kept[plan] = found
    return ctypes.addressof(found)


def place(device: torch.device) -> int:
    """The address of a `Launch` whose `space` has room for a number of four bytes."""
    kept = lasting(device, 1, torch.int32)
    found = Launch(space=kept.data_ptr())
    _kept[object()] = found, kept
    return ctypes.addressof(found)


def kernels(launched: Sequence[Launched], device: int, size: int = 0) -> int:
    """The address of the first of the `Kernel`s, side by side, that C++ launches for those that
    Triton has launched; `size` is that of the buffer that they fill, if C++ allocates it."""
    start = ctypes.cast(driver().cuLaunchKernel, ctypes.c_void_p)
    made = []
    for of, blocks in launched:
        meta, kinds = of.metadata, of.src.signature
        own = [p.name for p in of.src.fn.params if not p.is_constexpr]
        # Triton compiles an argument in that is 1.
        ones = sum(1 << i for i, name in enumerate(own) if kinds[name] == "constexpr")
        sizes = blocks, 32 * meta.num_warps, meta.shared, device, size
        made.append(Kernel(None, start, of.function, *sizes, ones))
    found = (Kernel * len(made))(*made)
    _kept[object()] = found
    return ctypes.addressof(found)


@launched_by_cpp("kernels24(str name, int[] numbers, Tensor[] tensors) -> int")
def _(name: str, numbers: list[int], tensors: list[torch.Tensor]) -> int:
    from common_kernels import launch

    try:
        with launch.noted() as launched:
            name, *words = name.split()
            buffer = KERNELS[name](*words, *numbers, *tensors)
        size = 0 if buffer is None else len(buffer)
        return kernels(launched, tensors[0].get_device(), size)
    except Exception as error:  # would be lost on its way through C++
        return failed(error)


@functools.cache
def driver() -> ctypes.CDLL:
    """The driver's library."""
    return ctypes.CDLL("libcuda.so.1")


def failed(error: Exception) -> int:
    """The address of a `Launch` or `Kernel` that makes C++ raise RuntimeError with this message."""
    found = _kept[object()] = Launch(str(error).encode())  # another thread may be reading one
    return ctypes.addressof(found)


@functools.cache
def start() -> None:
    """Let C++ run the operator on GPUs from now on, if it can; else say once why not."""
    if os.environ.get(VARIABLE) == "0":
        return
    try:
        register = load()
        shim = ctypes.CDLL(str(TORCH / "lib" / "libtorch_cuda.so"))
        stream = shim.aoti_torch_get_current_cuda_stream
        register(b"CUDA", stream, driver().cuMemsetD32Async)
        if HAS_TRITON:  # let C++ launch Triton's kernels from now on
            from common_kernels import launch

            launch.start = torch.ops.sparse24.launch24.default
            launch.prepare = kernels
    except (OSError, RuntimeError) as error:  # RuntimeError: no compiler, no home directory
        warnings.warn(
            f"{error}: sparse products are launched from Python, which takes the CPU longer "
            f"({VARIABLE}=0 hides this warning)",
            stacklevel=2,
        )


STARTS.append(start)


def load() -> ctypes._CFuncPtr:  # type: ignore[name-defined]
    """The function `sparse24_start` of the library, which is compiled now if it is missing."""
    register = ctypes.CDLL(str(build())).sparse24_start
    register.restype = ctypes.c_void_p
    return register


def build() -> Path:
    """The compiled library. Raises BuildError if there is no compiler or it fails."""
    name = os.environ.get("CXX") or "c++"
    compiler = shutil.which(name)
    if compiler is None:
        raise BuildError(f"the C++ compiler {name!r} cannot be found")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    made_with = repr((FLAGS, version, platform.machine())).encode()
    known = hashlib.sha256(SOURCE.read_bytes() + made_with).hexdigest()
    path = cache() / f"native-{known[:16]}.so"

    def command(to: Path) -> list[str]:
        where = f"-I{TORCH / 'include'}", f"-L{TORCH / 'lib'}"
        return [compiler, *FLAGS, *where, str(SOURCE), "-ltorch_cpu", "-o", str(to)]

    make(cache(), {path: command}, "launches of sparse products")
    return path
