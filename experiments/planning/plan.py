"""Predicts the memory, steps, tokens and days of a training on a number of GPUs.

The memory of one GPU follows from the footprint of a training step
(experiments/planning/footprint.py) and from the way the GPUs share the training:

- `ddp`: each GPU holds everything, and a second copy of the gradients in the buckets that are sent.
- `fsdp2`: weights, gradients, optimizer moments and masks are divided among the GPUs. In addition
  each GPU holds all masks at one bit per entry, the gathered weights of at most two blocks and of
  the layers outside of blocks, the undivided gradients of one block and of these layers, and the
  operands of one block. Some versions of torch gather weights in fp32
  (experiments/training/sharding.py); then copies of the weights in autocast's dtype are kept for
  the backward pass, too.

Tests compare the memory with measurements on one and two H200s; for more GPUs it is extrapolated.
The days of several GPUs are a lower bound, because the time in which GPUs exchange data is ignored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from experiments.config.run import RunConfig
from experiments.data.mlm import MLMConfig
from experiments.data.parallel import PairsConfig
from experiments.images.dataset import ImageConfig
from experiments.planning import shapes
from experiments.planning.footprint import Footprint, footprint
from experiments.planning.speed import Speed, nearest
from experiments.support.errors import UserError
from experiments.training import averages, sharding
from experiments.training.distributed import World
from experiments.training.optimization import DTYPES, micro_batch_size
from methods.nn.fp8_gemms import FP8
from models.vit import ViTConfig

SHARDS = ("ddp", "fsdp2")
MIB, GIB = 2**20, 2**30
DAY = 86400
_MOST = 1024  # GPUs
# A model this many times smaller than the smallest measured one may be limited by kernel launches.
_SMALLER = 4


@dataclass(frozen=True, kw_only=True)
class Options:
    """Settings of a plan.

    gpus: number of GPUs that share the training.
    gpu_memory: GiB of one GPU that a training can use; an H200 has 139.8.
    json: file in which the plan is stored; null = none.
    """

    gpus: int = 1
    gpu_memory: float = 139.0
    json: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.gpus <= _MOST:
            raise ValueError(f"plan.gpus={self.gpus}; it must lie in [1, {_MOST}]")
        if not self.gpu_memory > 0:
            raise ValueError(f"plan.gpu_memory={self.gpu_memory}; it must be above 0")


@dataclass(frozen=True, eq=False)
class Planned:
    """A training to plan. hf, path: config and location of its transformers checkpoint, if any."""

    run: RunConfig
    options: Options
    hf: Any = None
    path: str | None = None

    def micro_batch(self, gpus: int) -> int:
        """The number of samples in a micro-batch on each of `gpus` GPUs.

        Raises:
            UserError: the batch cannot be divided among them.
        """
        run, quantizes = self.run, self.run.build_method().quantizes
        return micro_batch_size(run.train, run.impl.micro_batch, gpus, quantizes)

    @cache  # noqa: B019
    def footprint(self, samples: int) -> Footprint:
        """The footprint of a step whose micro-batches have `samples` samples."""
        run, method = self.run, self.run.build_method()
        tokens = shapes.tokens_per_sample(run, self.hf)
        try:
            return footprint(
                lambda: shapes.build(run, self.hf),
                method,
                shapes.loss_of(run, method, samples, tokens),
                dtype=DTYPES[run.train.dtype],
                optimizer=run.train.optimizer,
                compiled=run.impl.compile,
                packed=run.impl.matmul != "dense",
                repack=run.impl.repack_backward,
            )
        except ValueError as error:
            raise UserError(str(error)) from error

    def memory(self, gpus: int, shard: str) -> dict[str, int]:
        """Bytes on one GPU by purpose, and their `peak`.

        Raises:
            UserError: the training cannot be divided among the GPUs in this way.
        """
        if self.run.impl.offload and (gpus == 1 or shard != "fsdp2"):
            raise UserError(
                f"impl.offload=true with plan.gpus={gpus}: only weights that GPUs share are "
                "offloaded; set more GPUs, or impl.offload=false"
            )
        run, train = self.run, self.run.train
        world = World(0, gpus, torch.device("cuda"))
        impl = dataclasses.replace(run.impl, shard=shard)
        sharding.check_shared(run.build_method(), impl, train, world)
        samples = self.micro_batch(gpus)
        accumulation = train.batch_size // (samples * gpus)
        return per_gpu(
            self.footprint(samples), gpus, shard, accumulation > 1,
            checkpointing=run.impl.activation_checkpointing, averaged=averages.is_kept(train),
            offloads=self.run.impl.offload,
        )  # fmt: skip

    def needed(self) -> tuple[int, str] | None:
        """The smallest power of two of GPUs with enough memory, and how they share the training;
        None if 1024 GPUs do not suffice."""
        gpus = 1
        while gpus <= _MOST:
            for shard in SHARDS[: 1 if gpus == 1 else 2]:
                try:
                    peak = self.memory(gpus, shard)["peak"]
                except UserError:
                    continue  # the batch cannot be shared by so many
                if peak <= self.options.gpu_memory * GIB:
                    return gpus, shard
            gpus *= 2
        return None


def per_gpu(
    need: Footprint,
    gpus: int,
    shard: str,
    accumulates: bool,
    checkpointing: bool = False,
    averaged: bool = False,
    offloads: bool = False,
) -> dict[str, int]:
    """Bytes on one GPU by purpose, and their `peak`.

    accumulates: a step has several micro-batches, so gradients are held together with activations.
        Otherwise the activations of a layer are freed when its gradients are computed.
    offloads: what `fsdp2` divides among the GPUs is kept in the memory of the host.
    """
    shared = shard == "fsdp2" and gpus > 1
    share = gpus if shared else 1
    communication = need.trained if shard == "ddp" and gpus > 1 else 0
    if shared:
        width = need.width if sharding.gathers_rounded() else 4
        weights = (2 * need.block + need.root) * width
        gradients = (need.block + need.root) * (need.width + 4)
        communication = weights + gradients + (weights if need.frozen else 0)
    trained, frozen, moments, masks = (
        0 if shared and offloads else size // share
        for size in (need.trained, need.frozen, need.moments, need.masks)
    )
    held = {
        "weights": trained,
        "teacher": frozen,
        "optimizer": moments,
        "averages": trained if averaged else 0,
        "masks": masks + (need.bits if shared else 0),
        "packed operands": 0 if shared else need.packed,
        "dense operands": 0 if shared else need.operands,
        "operands in passing": need.passing if shared else 0,
        "communication": communication,
    }
    gradients = trained
    forward = {
        "weights under autocast": 0 if shared and sharding.gathers_rounded() else need.casts,
        "activations": need.checkpointed if checkpointing else need.activations,
        "loss": need.loss,
    }
    step = sum(forward.values())
    most = gradients + step if accumulates else max(gradients, step)
    return {**held, "gradients": gradients, **forward, "peak": sum(held.values()) + most}


def plan(planned: Planned) -> dict[str, Any]:
    """The whole plan as plain values, with sizes in MiB. `days` is None if the plan does not fit
    into the memory, or if its speed is not known.

    Raises:
        UserError: the GPUs cannot share the batch, or the method does not fit the model.
    """
    run, options = planned.run, planned.options
    samples = planned.micro_batch(options.gpus)
    need = planned.footprint(samples)
    shard = run.impl.shard
    memory = planned.memory(options.gpus, shard)
    total = int(run.train.samples_before[-1])
    tokens = total * shapes.tokens_per_sample(run, planned.hf)
    speed = _speed(run, need)
    units = total if isinstance(run.data, ImageConfig) else tokens
    fits = memory["peak"] <= options.gpu_memory * GIB
    days = None
    if speed is not None and fits:
        days = units / (speed.per_second * options.gpus * DAY)
    return {
        "model": planned.path or run.model_name,
        "method": run.method,
        "parameters": need.parameters,
        "gpus": options.gpus,
        "shard": shard if options.gpus > 1 else None,
        "micro_batch": samples,
        "micro_batches": run.train.batch_size // (samples * options.gpus),
        "dtype": run.train.dtype,
        "compiled": run.impl.compile,
        "checkpointing": run.impl.activation_checkpointing,
        "memory_mib": {name: round(size / MIB, 1) for name, size in memory.items()},
        "gpu_memory_mib": options.gpu_memory * GIB / MIB,
        "fits": fits,
        "needed": planned.needed(),
        "steps": run.train.steps,
        "samples": total,
        "tokens": tokens,
        "speed": None if speed is None else dataclasses.asdict(speed),
        "days": days,
    }


def _speed(run: RunConfig, need: Footprint) -> Speed | None:
    """The speed of one GPU; None with offloading, which was not measured."""
    if run.impl.offload:
        return None
    family, work, unlike = "causal", 1.0, ""
    if isinstance(run.data, ImageConfig):
        family = "images"
    if run.dino is not None and isinstance(run.model, ViTConfig):
        local = (run.dino.local_size // run.model.patch_size) ** 2 + 1
        crops = 2 + run.dino.local_crops * local / run.model.tokens
        work = crops + 2 / 3  # the teacher's forward passes take a third of a step of two crops
        unlike = f"this counts the crops of a sample as {work:.2g} images"
    elif isinstance(run.data, MLMConfig):
        unlike = "a causal model, since no masked one was measured"
    elif isinstance(run.data, PairsConfig):
        unlike = "a causal model, since no encoder-decoder was measured"
    fp8, name = FP8[getattr(run.method_options, "fp8", "off")], run.method
    if fp8 is not None:
        name += ", fp8" if fp8.on_units else ", fp8=paper simulated"
    taught = bool(need.frozen) and run.dino is None  # DINO's teacher is part of `work`
    return nearest(family, name, need.parameters, taught, work, unlike)


def lines(found: dict[str, Any]) -> Iterator[str]:
    """The plan as lines of text."""
    shared = f" with {found['shard']}, projected" if found["shard"] else ""
    yield (
        f"{found['model']}, {found['method']}: {found['parameters']:,} weights; {found['gpus']} "
        f"GPU{'s' if found['gpus'] > 1 else ''}{shared}"
    )
    yield (
        f"in each step {_several(found['micro_batches'], 'micro-batch', 'es')} of "
        f"{_several(found['micro_batch'], 'sample')} on {'each' if found['shard'] else 'the'} GPU, "
        f"{found['dtype']}, "
        f"{'compiled' if found['compiled'] else 'not compiled'}, "
        f"{'with' if found['checkpointing'] else 'no'} activation checkpointing"
    )
    for name, size in found["memory_mib"].items():
        if size:
            yield f"  {name:<24}{size:>12,.0f} MiB"
    room = f"{found['gpu_memory_mib'] / 1024:,.0f} GiB of a GPU"
    smaller = "; a smaller impl.micro_batch takes less" if found["micro_batch"] > 1 else ""
    yield f"fits into the {room}" if found["fits"] else f"does not fit into the {room}{smaller}"
    if found["needed"] is None:
        yield f"no number of GPUs up to {_MOST} has the memory: lower impl.micro_batch"
    else:
        gpus, shard = found["needed"]
        yield f"GPUs needed: {gpus}" + (f" with {shard}" if gpus > 1 else "")
    yield f"{found['steps']:,} steps, {found['samples']:,} samples, {found['tokens']:,} tokens"
    if found["speed"] is None:
        yield "days: none, as no training with impl.offload was measured"
        return
    if found["days"] is None:
        yield "days: none, as the plan does not fit"
        return
    speed = found["speed"]
    dense = ", this method was not measured" if speed["as_dense"] else ""
    small = speed["factor"] > _SMALLER
    least = "at least " if found["gpus"] > 1 or small or speed["taught"] else ""
    taught = ", x 3/4 for a teacher" if speed["taught"] else ""
    unlike = f"; {speed['unlike']}" if speed["unlike"] else ""
    yield (
        f"{least}{_duration(found['days'])} at {speed['per_second'] * found['gpus']:,.0f} "
        f"{speed['unit']}/s: one H200 on {speed['row']}{dense} ({speed['conditions']}), "
        f"x {speed['factor']:.3g} by the number of weights{taught}"
        f"{', x ' + str(found['gpus']) + ' GPUs' if found['gpus'] > 1 else ''}{unlike}"
        f"{'; none so small was measured, and it may wait for the CPU' if small else ''}"
    )


def _several(number: int, name: str, ending: str = "s") -> str:
    """A number with its noun, in the plural if it is above 1."""
    return f"{number:,} {name}{ending if number > 1 else ''}"


def _duration(days: float) -> str:
    """A time in days, or if it is below one in hours or minutes."""
    units = (("days", 1), ("hours", 24), ("minutes", 1440))
    name, unit = next((pair for pair in units if days * pair[1] >= 1), units[-1])
    return f"{days * unit:{',.0f' if days * unit >= 10 else '.2g'}} {name}"
