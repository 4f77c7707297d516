"""Choice of an operator's backend, and of the current GPU; nothing else chooses either.

Backend `cpu` is plain PyTorch (`cpu.py` of each family) and runs on any device. Backend `triton`
runs on GPUs, and on any device under Triton's interpreter. The few operators without a Triton
kernel (the baselines `two_approx` and `sequential`, groups of more than 32) run as plain PyTorch
even then. Asking for a backend that cannot serve a device is an error.
"""

import functools
import importlib.util
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

BACKENDS = ("cpu", "triton")
ENVIRONMENT_VARIABLE = "SPARSE24_BACKEND"
HAS_TRITON = importlib.util.find_spec("triton") is not None
_NOTHING: AbstractContextManager[Any] = nullcontext()


def resolve(device: torch.device | str, backend: str | None = None) -> str:
    """The name of the backend that serves `device`: the argument if given, else the environment
    variable, else `triton` on a GPU and `cpu` elsewhere. On `meta` it is always `cpu`. Raises
    ValueError for an unknown name, RuntimeError with the reason for one that cannot serve."""
    kind = (device if isinstance(device, torch.device) else torch.device(device)).type
    name = backend or os.environ.get(ENVIRONMENT_VARIABLE)
    if not name:
        return "triton" if kind == "cuda" and HAS_TRITON else "cpu"
    if name not in BACKENDS:
        raise ValueError(f"unknown backend {name!r}: choose one of {', '.join(BACKENDS)}")
    if kind == "meta":
        return "cpu"
    reason = None
    if name == "triton" and not HAS_TRITON:
        reason = "triton is not installed"
    elif name == "triton" and kind == "cpu" and not interpreted():
        reason = "on a CPU Triton needs its interpreter, TRITON_INTERPRET=1 from the start"
    if reason:
        raise RuntimeError(
            f"backend {name!r} cannot serve device {str(device)!r}: {reason}; "
            f"unset {ENVIRONMENT_VARIABLE} or choose 'cpu'"
        )
    return name


def resolve_fp8(device: torch.device, backend: str | None = None) -> str:
    """`resolve` for operators that write FP8 codes: plain PyTorch on GPUs before compute capability
    8.9, for which Triton has no cast to e4m3."""
    name = resolve(device, backend)
    return "cpu" if device.type == "cuda" and not _casts_to_fp8(device) else name


def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a GPU, remembered, because torch takes as long as for a launch."""
    return _capability(torch.cuda.current_device() if device.index is None else device.index)


def _casts_to_fp8(device: torch.device) -> bool:
    return capability(device) >= (8, 9)


# torch.compiler.assume_constant_result without the import of torch._dynamo, which takes a second.
_casts_to_fp8._dynamo_marked_constant = True  # type: ignore[attr-defined]
# Not as a decorator of the function above: torch.compile warns of those.
_capability = functools.cache(torch.cuda.get_device_capability)


def current(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which kernels are launched on `device`. If it is the current one already, a
    shared context that does nothing: switching devices takes as long as a launch."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(device)


def lasting(device: torch.device | int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Uninitialised memory that launches on the current stream use as long as the process lives.

    Another thread allocates it: what this one allocates may belong to a CUDA graph of torch.compile
    (mode="reduce-overhead"), which reuses it, or be marked for good by inference_mode.
    """
    where = torch.device(device)
    stream = torch.cuda.current_stream(where) if where.type == "cuda" else None

    def allocate() -> torch.Tensor:
        with torch.cuda.stream(stream), torch.inference_mode(False):
            return torch.empty(size, dtype=dtype, device=where)

    if stream is not None and torch.cuda.is_current_stream_capturing():
        return allocate()  # that graph keeps its memory while there are references
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(allocate).result()


def interpreted() -> bool:
    """True if Triton's interpreter runs the kernels, which it does on any device."""
    return os.environ.get("TRITON_INTERPRET") == "1"
