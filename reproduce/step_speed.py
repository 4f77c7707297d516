"""Measures training steps: of whole models, of one block, and of a single layer by its parts.

For FST's Tables 11 and 12, S-STE's Table 12 and SLoPe's Table B.1, which is on Bi-Mask. `MEASURES`
as explained in speed_setup.py.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from common_kernels.matmul import mm24
from common_kernels.pack.operands import sample_pack24
from experiments.bench import jobs, linear
from experiments.bench.jobs import Workload
from experiments.bench.step import Step
from experiments.bench.timing import Call, in_turns
from experiments.support.errors import UserError
from methods.nn.gemms import groups_of, sample_tokens
from methods.nn.linear import MaskedLinear
from models import transformer
from models.gpt2 import SIZES
from reproduce.engine import Report
from reproduce.speed_setup import (
    BUFFERS,
    Metrics,
    bench,
    check_products,
    clock_and_power,
    gpt2,
    matmul,
)

if TYPE_CHECKING:
    from reproduce.bench import Config


# --- whole models --------------------------------------------------------------------------------


def of_train(config: Config, report: Report) -> tuple[Metrics, str]:
    """Speed of a whole optimizer step of `accumulate` micro-batches, dense and under the method,
    and the hours that a training of `steps` such steps takes.

    The time of a step is the sum of what is timed: a step of one micro-batch with all hooks and
    AdamW, the further micro-batches, and the step's share of the mask search. For `run_speedup` the
    last sixth of the steps is dense, as in FST's trainings.
    """
    job = workload(config)
    built: dict[str, Step] = {}
    for name in ("dense", config.method):
        for widths in job.linears if name != "dense" else ():
            check_products(config, widths, job.tokens)
        built[name] = uncompiled(name, job, config)
    calls: dict[str, Call] = {}
    for name, step in built.items():
        calls |= {name: step.ordinary, f"{name}, micro-batch": micro_batch(step)}
        if step.converted.searching:
            calls[f"{name}, masks chosen"] = step.searching
    times = in_turns(calls, config.on, config.repeats, graphs=False)
    metrics, found = clock_and_power(times), {}
    for name, step in built.items():
        ms, further = times[name].ms, times[f"{name}, micro-batch"].ms
        search = times[f"{name}, masks chosen"].ms - ms if step.converted.searching else 0.0
        share = max(0.0, search) / (step.converted.searching + 1)
        found[name] = ms + share + (config.accumulate - 1) * further
        key = "dense" if name == "dense" else "sparse"
        metrics |= {f"{key}_ms": found[name], f"{key}_micro_batch_ms": further}
        metrics[f"{key}_hours"] = config.steps * found[name] / 3.6e6
    dense, sparse = found["dense"], found[config.method]
    metrics |= {"speedup": dense / sparse, "run_speedup": dense / (sparse * 5 / 6 + dense / 6)}
    used = built[config.method].used
    for step in built.values():
        step.close()
    return metrics, used


def workload(config: Config) -> Workload:
    """The model that the config names, with its batch.

    Raises:
        UserError: there is no such model.
    """
    name, batch, length = config.model, config.batch, config.length
    if name in SIZES:
        return jobs.gpt2(name, batch, length)
    family, _, size = name.partition("_")
    if family == "transformer" and size in transformer.SIZES:
        return jobs.translation(size, batch, length)
    if name == "deit_base":
        return jobs.vit("deit_base_patch16_224", batch, 768, 196)
    sizes = ", ".join([*SIZES, *(f"transformer_{s}" for s in transformer.SIZES), "deit_base"])
    raise UserError(f"model={name}; choose of {sizes}")


def uncompiled(name: str, job: Workload, config: Config) -> Step:
    """A training step under the method `name`, warmed up; its blocks are not compiled."""
    step = Step(name, job, config.on, matmul(config))
    for _ in range(2):
        step.ordinary(0)
    return step


def micro_batch(step: Step) -> Call:
    """A call that runs the forward and backward pass of one micro-batch and adds its gradients to
    existing ones, as every micro-batch of a step but the first does."""
    gradients = [torch.zeros_like(p) for p in step.parameters]

    def call(_: int) -> None:
        for parameter, gradient in zip(step.parameters, gradients, strict=True):
            parameter.grad = gradient
        step.converted.method.open_micro_batch()
        step.loss().backward()
        step.optimizer.zero_grad()

    return call


# --- a block under Bi-Mask ------------------------------------------------------------------------


def of_slow_down(config: Config, _: Report) -> tuple[Metrics, str]:
    """Time of a training step of one GPT-2 block under Bi-Mask over that of a dense one, including
    the choice of masks and the step's share of the search for permutations."""
    dense = bench(config, "dense", gpt2(config), ("*",))
    sparse = bench(config, config.method, gpt2(config), ("*",))
    converted, period = sparse.converted, sparse.converted.method.config.permute_every

    def step(i: int, number: int = 1) -> None:
        converted.before(number)
        sparse.forward_backward(i)
        converted.after(number)

    calls: dict[str, Call] = {
        "dense": dense.forward_backward,
        "step": step,
        "step with a search": partial(step, number=0),
    }
    times = in_turns(calls, config.on, config.repeats, BUFFERS)
    found = {name: time.ms for name, time in times.items()}
    search = max(0.0, found["step with a search"] - found["step"])
    metrics = clock_and_power(times) | {
        "dense_ms": found["dense"],
        "step_ms": found["step"],
        "search_ms": search,
        "slow_down": (found["step"] + search / period) / found["dense"],
    }
    return metrics, converted.used


# --- the parts of a layer ------------------------------------------------------------------------


def of_parts(config: Config, _: Report) -> tuple[Metrics, str]:
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
        "pack": lambda _: layer.derive(),
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


MEASURES = {"train": of_train, "slow_down": of_slow_down, "parts": of_parts}
