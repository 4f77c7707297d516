"""Measures the parts of a training step of one linear under a method with masks."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from common_kernels.matmul import mm24
from common_kernels.pack.operands import sample_pack24
from experiments.bench import linear
from experiments.bench.timing import Call, in_turns
from methods.nn.gemms import groups_of, sample_tokens
from methods.nn.linear import MaskedLinear
from reproduce.measure.base import MethodLayer, Report, Result
from reproduce.measure.setup import BUFFERS, check_products, clock_and_power, matmul


@dataclass(frozen=True, kw_only=True)
class Settings(MethodLayer):
    """A linear width -> inner; accumulate: micro-batches per step."""

    accumulate: int = 1


def measure(config: Settings, _: Report) -> Result:
    """Times of the parts of a training step of one linear width -> inner under a method with masks.

    The parts are the three products, dense and as the method runs them, the sample of dY, and the
    decay, the packing and the mask search, which are done once in a step of `accumulate`
    micro-batches or once in a mask period. `step` and `dense_step` are the sums over a step.
    """
    shape = (config.tokens, config.width, config.ffn)
    check_products(config, (config.width, config.ffn))
    of = (shape, config.dtype, config.on, matmul(config), BUFFERS)
    dense, sparse = linear.build("dense", *of), linear.build(config.method, *of)
    method = sparse.converted.method
    (layer,) = method.sparse_layers.values()
    assert isinstance(layer, MaskedLinear)
    fprop, dgrad = layer.operands(config.dtype)
    weight = next(iter(dense.converted.layers.values())).weight.detach()
    xs, dys = [x.detach() for x in sparse.inputs], sparse.gradients
    sparse.hooks(0)  # with a gradient to add the decay to

    def sample(i: int) -> Tensor:
        if layer.products.wgrad:
            return sample_pack24(dys[i], layer.key, groups_of(dys[i])).buffer
        return sample_tokens(dys[i], layer.key, layer.mvue) if layer.mvue else dys[i]

    packed = sample_pack24(dys[0], layer.key, groups_of(dys[0])) if layer.products.wgrad else None
    sampled = sample(0)

    def wgrad(i: int) -> Tensor:
        return sampled.t() @ xs[i] if packed is None else mm24(packed, xs[i])

    calls: dict[str, Call] = {
        "dense_fprop": lambda i: F.linear(xs[i], weight),
        "dense_dgrad": lambda i: dys[i] @ weight,
        "dense_wgrad": lambda i: dys[i].t() @ xs[i],
        "fprop": lambda i: fprop.linear(xs[i], None),
        "dgrad": lambda i: dgrad.grad(dys[i]),
        "wgrad": wgrad,
        "sample": sample,
        "decay": lambda _: method.on_gradients(0),
        "pack": lambda _: layer.update_operands(),
        "search": lambda _: layer.refresh_mask(),
    }
    times = in_turns(calls, config.on, config.repeats, BUFFERS)
    ms = {name: time.ms for name, time in times.items()}
    products = sum(ms[name] for name in ("fprop", "dgrad", "wgrad", "sample"))
    once = ms["decay"] + ms["pack"] + ms["search"] / method.mask_period
    step = config.accumulate * products + once
    dense_step = config.accumulate * sum(ms[f"dense_{n}"] for n in ("fprop", "dgrad", "wgrad"))
    metrics = clock_and_power(times) | {f"{name}_ms": figure for name, figure in ms.items()}
    metrics |= {"step_ms": step, "dense_step_ms": dense_step, "speedup": dense_step / step}
    return metrics, sparse.converted.used
