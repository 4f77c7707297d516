"""Measures whole training steps of a model, dense and under a method."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from experiments.bench import jobs
from experiments.bench.jobs import Workload
from experiments.bench.step import Step
from experiments.bench.timing import Call, in_turns
from experiments.support.errors import UserError
from models import transformer
from models.gpt2 import SIZES
from reproduce.measure.base import Base, Report, Result
from reproduce.measure.setup import check_products, clock_and_power, matmul


@dataclass(frozen=True, kw_only=True)
class Settings(Base):
    """A training.

    model: a size of GPT-2, `transformer_SIZE` or `deit_base`.
    accumulate: micro-batches per step. steps: steps of a whole training.
    """

    method: str
    model: str
    batch: int = 1
    length: int = 1
    accumulate: int = 1
    steps: int = 0


def measure(config: Settings, report: Report) -> Result:
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


def workload(config: Settings) -> Workload:
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


def uncompiled(name: str, job: Workload, config: Settings) -> Step:
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
