"""cuSPARSELt through ctypes: loading it, and its own compressor.

The library is the one that torch has loaded, else that of NVIDIA's wheel.
"""

import ctypes
import functools
import sys
from pathlib import Path
from typing import Any

import torch

# The cudaDataType of each dtype that the operands may have.
TYPES = {torch.float16: 2, torch.bfloat16: 14, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}
ROW_MAJOR = 2  # cusparseOrder_t
OPAQUE = 2048  # bytes reserved for a structure of the library; version 0.8 uses 512
ALIGNMENT = 16  # bytes


class CuSparseLtError(RuntimeError):
    """A call of the library failed; the message names the call and the reason."""


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
        opaque = ctypes.create_string_buffer(16 * OPAQUE)
        call("cusparseLtInit", opaque)
    return opaque


@functools.cache
def version() -> str:
    """The library's version, such as `0.8.0`."""
    numbers = [ctypes.c_int() for _ in range(3)]
    for part, number in enumerate(numbers):
        call("cusparseLtGetProperty", part, ctypes.byref(number))
    return ".".join(str(number.value) for number in numbers)


def describe(
    kind: str, of: ctypes.Array, descriptor: Any, rows: int, columns: int, lead: int, *rest: int
) -> None:
    """Fill the descriptor of a `Structured` or `Dense` matrix; `of` is the device's handle."""
    call(
        f"cusparseLt{kind}DescriptorInit", of, descriptor, ctypes.c_int64(rows),
        ctypes.c_int64(columns), ctypes.c_int64(lead), ALIGNMENT, *rest,
    )  # fmt: skip


def aligned(x: torch.Tensor) -> torch.Tensor:
    """x itself if its memory is aligned as GPU kernels need it, else a copy."""
    return x.clone() if x.data_ptr() % ALIGNMENT else x


@functools.cache
def _form(rows: int, columns: int, dtype: torch.dtype, device: int) -> tuple[Any, int, int]:
    """The descriptor of a 2:4 matrix, the bytes of its buffer, and those of the workspace."""
    if dtype not in TYPES:
        raise ValueError(f"cuSPARSELt packs bf16, fp16 and FP8 here, not {dtype}")
    descriptor, sizes = ctypes.create_string_buffer(OPAQUE), [ctypes.c_size_t() for _ in range(2)]
    shape = rows, columns, columns
    describe("Structured", handle(device), descriptor, *shape, TYPES[dtype], ROW_MAJOR, 0)
    places = map(ctypes.byref, sizes)
    call("cusparseLtSpMMACompressedSize2", handle(device), descriptor, *places)
    return descriptor, sizes[0].value, sizes[1].value


def compress(pruned: torch.Tensor, buffer: torch.Tensor) -> None:
    """Write the matrix [rows, columns], which is 2:4 along its rows, into `buffer` as the library
    packs it for this device. Raises CuSparseLtError if it needs more bytes."""
    device, x = pruned.device, aligned(pruned.contiguous())
    if not x.numel():
        return
    with torch.cuda.device(device):
        descriptor, size, space = _form(*x.shape, x.dtype, device.index)
        if size > buffer.numel():
            raise CuSparseLtError(
                f"cuSPARSELt needs {size} bytes for {x.dtype} {tuple(x.shape)}, not {len(buffer)}"
            )
        workspace = torch.empty(space, dtype=torch.uint8, device=device)
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        pointers = x.data_ptr(), buffer.data_ptr(), workspace.data_ptr(), stream
        given = handle(device.index), descriptor, 1, 0, *map(ctypes.c_void_p, pointers)
        call("cusparseLtSpMMACompress2", *given)
