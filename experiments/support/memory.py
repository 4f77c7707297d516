"""Reads how much memory a device has, raises one-line errors for what cannot fit, and frees it."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import torch
from torch import nn

from experiments.support.errors import UserError

_GIB = 2**30
_CONTAINER = Path("/sys/fs/cgroup/memory.max")


def total(device: torch.device) -> int:
    """Bytes of memory of the GPU, or of this machine or container."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(machine, int(_CONTAINER.read_text()))
    except (OSError, ValueError):  # no container, or one without a limit
        return machine


def require(what: str, needed: float, device: torch.device, remedy: str) -> None:
    """Raise a `UserError` if `what` (a plural noun) needs more bytes than the device has
    in total."""
    if needed > (there := total(device)):
        where = "the GPU" if device.type == "cuda" else "this machine"
        raise UserError(
            f"{what} need {needed / _GIB:,.1f} GiB of memory, {where} has {there / _GIB:,.1f} "
            f"GiB; {remedy}"
        )


def buffer_bytes(layer: nn.Module, kind: str) -> int:
    """Bytes of the buffers of a converted layer that are `masks`, `packed` or `operands`."""
    total = 0
    for name, buffer in layer.named_buffers():
        is_mask = buffer.dtype in (torch.bool, torch.uint8)
        found = "packed" if name.startswith("packed") else "masks" if is_mask else "operands"
        total += buffer.nbytes if found == kind else 0
    return total


def is_exhausted(error: BaseException) -> bool:
    """True if an error of Python, numpy or torch says that memory ran out."""
    known = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return known or "DefaultCPUAllocator: can't allocate memory" in str(error)


def free(device: torch.device) -> None:
    """Drop all compiled code, and free what is then unused, CUDA graphs among it."""
    if "torch._dynamo" in sys.modules:  # importing it takes seconds
        torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
