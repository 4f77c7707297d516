"""The linears of a model, ours or of transformers, and which of them are 2:4."""

from typing import Any

from torch import Tensor, nn

import common_kernels as ck


def is_conv1d(module: nn.Module) -> bool:
    """True for the linears of transformers' GPT-2, whose weights are [in, out]."""
    kinds = type(module).__mro__
    return any(k.__name__ == "Conv1D" and k.__module__.startswith("transformers.") for k in kinds)


def shape_of(module: Any) -> tuple[int, int]:
    """(outputs, inputs) of a linear."""
    shape = tuple(module.weight.shape)
    return shape[::-1] if is_conv1d(module) else shape


def matrix_of(module: Any) -> Tensor:
    """The weight of a linear as [out, in], contiguous."""
    weight = module.weight.detach()
    return weight.t().contiguous() if is_conv1d(module) else weight


def is_linear(module: nn.Module) -> bool:
    """True for a plain linear, with or without a low-rank term."""
    return type(module) is nn.Linear or is_conv1d(module) or hasattr(module, "low_rank")


def has_24(module: nn.Module) -> bool:
    """True if a module's weight is 2:4 along its inputs."""
    weight: Any = module.weight
    along = 0 if is_conv1d(module) else 1
    if weight.is_meta:  # accelerate keeps it on the CPU or on disk
        return False
    return weight.shape[along] % 4 == 0 and not int(ck.check24(weight, dim=along))
