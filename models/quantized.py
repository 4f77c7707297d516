"""Integers of 8 or 4 bits as the weights of a finished 2:4 model."""

from typing import Any

import torch
from torch import nn

import common_kernels as ck
from models.columns import linears_and_divisions
from models.linears import is_conv1d, matrix_of


@torch.no_grad()
def quantize(model: nn.Module, bits: int) -> list[str]:
    """Round the weights of a model's 2:4 linears to integers of 8 or 4 bits times scales, in place,
    and return the names of the linears; before `pack`, which then reads the integers. Each weight
    goes to the nearest multiple of the scale of its 128 inputs (`quantize24`). Input columns that
    stayed dense beside 2:4 ones stay as they are.

    Cast the model to the dtype in which it will run first: rounded to another one afterwards,
    weights compute the same but cannot be told to be integers, unless they go from bf16 to fp16.
    Raises ValueError if no linear is 2:4."""
    layers, divisions = linears_and_divisions(model)
    for name, layer in layers.items():
        matrix = matrix_of(layer).clone()
        columns = divisions[name][0] if name in divisions else slice(None)
        own = matrix[:, columns]
        integers = ck.quantize24(ck.pack24(own, own != 0), bits)
        matrix[:, columns] = ck.dequantize24(integers, own.dtype)
        weight: Any = layer.weight
        weight.copy_(matrix.t() if is_conv1d(layer) else matrix)
    return [*layers]


def integers_of(packed: ck.Packed24) -> ck.Packed24 | ck.Quantized24:
    """The matrix as the integers of 4 or 8 bits that it was made of, for products with few tokens;
    the same matrix if it was not."""
    neutral = ck.convert24(packed, "neutral")
    own, rounded = neutral, neutral.values.bfloat16()
    if torch.equal(rounded.to(packed.dtype), neutral.values):  # they may have been cast from bf16
        own = ck.Packed24.of(rounded, neutral.meta, "neutral")
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
