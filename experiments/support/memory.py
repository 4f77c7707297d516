"""Counts the memory of layers, recognises errors of lacking memory, and frees it."""

import gc
import sys

import torch
from torch import nn


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
