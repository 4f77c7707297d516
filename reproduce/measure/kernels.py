"""Measures the product and the packing of one weight, by kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common_kernels import matmul24
from experiments.bench.timing import Call, in_turns
from models.packed import PackedProduct
from reproduce.measure.base import Layer, Report, Result
from reproduce.measure.packed import microseconds, packing, to_packed
from reproduce.measure.setup import BUFFERS, clock_and_power


@dataclass(frozen=True, kw_only=True)
class Settings(Layer):
    """A weight width -> inner."""


def measure(config: Settings, _: Report) -> Result:
    """Times of one product x [tokens, width] W^T with W [inner, width], dense and 2:4, and of the
    calls of `packing` on W, in microseconds."""
    generator = torch.Generator(config.on).manual_seed(config.seed)

    def normal(*size: int) -> list[Tensor]:
        size = (BUFFERS, *size)
        return list(torch.randn(size, device=config.on, generator=generator).to(config.dtype))

    xs, ws = normal(config.tokens, config.width), normal(config.ffn, config.width)
    linears = []
    for w in ws:
        model = nn.Sequential(nn.Linear(config.width, config.ffn, bias=False, device="meta"))
        model[0].weight = nn.Parameter(w.clone())
        layout = to_packed(model, lambda _: True, (config.tokens,), config.on)
        linears.append(model[0])

    @torch.no_grad()
    def product(i: int) -> Tensor:
        layer = linears[i]
        if isinstance(layer, PackedProduct):  # its forward would pad the tokens to multiples
            return matmul24(layer.packed, xs[i])
        return layer(xs[i])

    calls: dict[str, Call] = {"dense": lambda i: F.linear(xs[i], ws[i]), "sparse": product}
    calls |= packing(ws)
    times = in_turns(calls, config.on, config.repeats, BUFFERS)
    return microseconds(times) | clock_and_power(times), layout
