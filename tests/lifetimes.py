"""Checks on a CPU what a CUDA graph relies on: the memory that it reads and its operators.

A graph holds addresses. Memory that a call read while it was captured, and that nobody holds when
the call is replayed, is another tensor's by then, or no memory of the process any more.
"""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Reads(TorchDispatchMode):
    """Within it is recorded which memory operators use that none of them has made."""

    def __init__(self):
        super().__init__()
        self._made, self._read = set(), {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for memory in _memory((args, kwargs)):
            if memory not in self._made:
                self._read.setdefault(memory, str(func))
        result = func(*args, **(kwargs or {}))
        self._made |= _memory(result) - self._read.keys()
        return result

    def lost(self):
        """The operators that first used memory which nobody holds any more."""
        return [name for memory, name in self._read.items() if memory.expired()]


def _memory(values):
    tensors = (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))
    return {StorageWeakRef(tensor.untyped_storage()) for tensor in tensors}


class Operators(TorchDispatchMode):
    """Records each operator with all of its arguments but the values of tensors."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        leaves = tree_leaves((args, kwargs))
        tensors = (isinstance(leaf, torch.Tensor) for leaf in leaves)
        given = [
            (tuple(leaf.shape), leaf.dtype) if is_tensor else str(leaf)
            for leaf, is_tensor in zip(leaves, tensors, strict=True)
        ]
        self.found.append((str(func), given))
        return func(*args, **(kwargs or {}))
