"""The linears of a model, ours or of transformers, and which of them are 2:4."""

from __future__ import annotations

from typing import Any

import torch
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


def is_24(module: nn.Module) -> bool:
    """True for a linear whose weight is 2:4 along its inputs, with or without a low-rank term."""
    return is_linear(module) and has_24(module)


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


def linears_24(model: nn.Module) -> dict[str, nn.Module]:
    """The 2:4 linears of a model by name. Raises ValueError if there is none."""
    found = {name: module for name, module in model.named_modules() if is_24(module)}
    if not found:
        held = (m for m in model.modules() if isinstance(m, nn.Linear) and has_24(m))
        others = sorted({type(m).__name__ for m in held})
        why = f": its 2:4 weights are in {', '.join(others)}" if others else ""
        raise ValueError(
            f"no plain linear of this model is 2:4{why} (after training with a method, call "
            "method.finalize(model) first; fst ends dense)"
        )
    return found


@torch.no_grad()
def quantize(model: nn.Module, bits: int) -> list[str]:
    """Round the weights of a model's 2:4 linears to integers of 8 or 4 bits times scales, in place,
    and return the names of the linears; before `pack`, which then reads the integers. Each weight
    goes to the nearest multiple of the scale of its 128 inputs (`quantize24`).

    Cast the model to the dtype in which it will run first: rounded to another one afterwards,
    weights compute the same but cannot be told to be integers, unless they go from bf16 to fp16.
    Raises ValueError if no linear is 2:4."""
    layers: dict[str, Any] = linears_24(model)
    for layer in layers.values():
        matrix = matrix_of(layer)
        dense = ck.dequantize24(ck.quantize24(ck.pack24(matrix, matrix != 0), bits), matrix.dtype)
        layer.weight.copy_(dense.t() if is_conv1d(layer) else dense)
    return [*layers]


def integers_of(packed: ck.Packed24) -> ck.Packed24 | ck.Quantized24:
    """The matrix as the integers of 4 or 8 bits that it was made of, for products with few tokens;
    the same matrix if it was not."""
    neutral = ck.convert24(packed, "neutral")
    rounded = neutral.values.bfloat16()
    if torch.equal(rounded.to(packed.dtype), neutral.values):  # they may have been cast from bf16
        own = ck.Packed24.of(rounded, neutral.meta, "neutral")
    else:
        own = neutral
    # Of a few rows first, which tell other matrices apart in no time.
    first = ck.Packed24.of(own.values[:16], own.meta[:16], "neutral")
    for bits in (4, 8):
        if _made_of(first, bits) and _made_of(own, bits):
            return ck.quantize24(own, bits)
    return neutral


def _made_of(packed: ck.Packed24, bits: int) -> bool:
    """True if a matrix is one of integers of so many bits times scales."""
    rounded = ck.dequantize24(ck.quantize24(packed, bits), packed.dtype)
    return torch.equal(rounded, ck.unpack24(packed))
