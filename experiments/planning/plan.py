"""Predicts the memory, steps, tokens and days of a training on a number of GPUs.

`footprint` counts the memory of a training step on one GPU, and `per_gpu` divides it among GPUs.
With `ddp` every GPU holds everything, and a second copy of the gradients in the buckets that are
sent. With `fsdp2` every GPU holds its share of weights, gradients, optimizer moments and masks.
Besides, it holds all masks at one bit per entry, the gathered weights of at most two blocks and of
the layers outside of blocks, the gradients of one block and of these layers before they are
divided, and the operands of one block. Before torch 2.15 weights are gathered in fp32
(experiments/training/sharding.py), and their copies in autocast's dtype are kept for the backward
pass.

Tests compare the memory with measurements on one and on two H200s. For more GPUs it is
extrapolated. The days of several GPUs are a lower bound, because the time in which they exchange
data is ignored.
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
from experiments.planning.speed import CONDITIONS, Speed, nearest
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
        sharding.check_shardable(run.build_method(), impl, train, world)
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

    Args:
        accumulates: a step has several micro-batches, so that gradients are held together with
            activations. Otherwise a layer's activations are freed when its gradients are computed.
        averaged: an average of the weights is kept.
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
    """The plan as plain values, with sizes in MiB. `days` is None if the training does not fit into
    the memory, or if its speed is not known.

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
        "speed": speed and dataclasses.asdict(speed),
        "days": days,
    }


def _speed(run: RunConfig, need: Footprint) -> Speed | None:
    """The predicted speed of one GPU; None with offloading, which was not measured."""
    if run.impl.offload:
        return None
    family, work, unlike = "causal", 1.0, ""
    if isinstance(run.data, ImageConfig):
        family = "images"
    if run.dino is not None and isinstance(run.model, ViTConfig):
        local = (run.dino.local_size // run.model.patch_size) ** 2 + 1
        crops = 2 + run.dino.local_crops * local / run.model.tokens
        work = crops + 2 / 3  # the teacher's forward passes take a third of a step of two crops
        unlike = f" The crops of a sample count as {work:.2g} images."
    elif isinstance(run.data, MLMConfig):
        unlike = " That was a causal model; no masked one was measured."
    elif isinstance(run.data, PairsConfig):
        unlike = " That was a causal model; no encoder-decoder was measured."
    fp8, name = FP8[getattr(run.method_options, "fp8", "off")], run.method
    if fp8 is not None:
        name += ", fp8" if fp8.on_units else ", fp8=paper simulated"
    taught = bool(need.frozen) and run.dino is None  # DINO's teacher is part of `work`
    return nearest(family, name, need.parameters, taught, work, unlike)


def lines(found: dict[str, Any]) -> Iterator[str]:
    """The plan as sentences, and the memory as a table."""
    gpus, shard = found["gpus"], found["shard"]
    projected = f" with {shard}. What they need is projected, not measured" if shard else ""
    yield (
        f"{found['model']} with the method {found['method']} has {found['parameters']:,} weights, "
        f"here on {_several(gpus, 'GPU')}{projected}."
    )
    yield (
        f"A step has {_several(found['micro_batches'], 'micro-batch', 'es')} of "
        f"{_several(found['micro_batch'], 'sample')} on each GPU, in {found['dtype']}, "
        f"{'compiled' if found['compiled'] else 'not compiled'} and "
        f"{'with' if found['checkpointing'] else 'without'} activation checkpointing."
    )
    for name, size in found["memory_mib"].items():
        if size:
            yield f"  {name:<24}{size:>12,.0f} MiB"
    smaller = " A smaller impl.micro_batch takes less." if found["micro_batch"] > 1 else ""
    does = "fits" if found["fits"] else "does not fit"
    yield (
        f"This {does} into the {found['gpu_memory_mib'] / 1024:,.0f} GiB of a GPU."
        f"{'' if found['fits'] else smaller}"
    )
    if found["needed"] is None:
        yield f"No number of GPUs up to {_MOST} has the memory; lower impl.micro_batch."
    else:
        number, how = found["needed"]
        with_shard = f" with {how}" if number > 1 else ""
        yield f"The training needs {_several(number, 'GPU')}{with_shard}."
    yield (
        f"It has {found['steps']:,} steps, {found['samples']:,} samples and {found['tokens']:,} "
        "tokens."
    )
    if (speed := found["speed"]) is None:
        yield "Its days are not known, because no training with impl.offload was measured."
    elif found["days"] is None:
        yield "It has no number of days, because it does not fit."
    else:
        small = speed["factor"] > _SMALLER
        least = "at least " if gpus > 1 or small or speed["taught"] else ""
        dense = " The method itself was not measured." if speed["as_dense"] else ""
        factors = f"{speed['factor']:.3g} for the number of weights"
        factors += ", times 3/4 for a teacher" if speed["taught"] else ""
        factors += f", times {gpus} for the GPUs" if gpus > 1 else ""
        launches = " No model so small was measured; it may wait for the CPU." if small else ""
        yield (
            f"It takes {least}{_duration(found['days'])} at {speed['per_second'] * gpus:,.0f} "
            f"{speed['unit']}/s. This is the speed of one H200 on {speed['row']} ({CONDITIONS}), "
            f"times {factors}.{dense}{speed['unlike']}{launches}"
        )


def _several(number: int, name: str, ending: str = "s") -> str:
    """A number with its noun, in the plural if it is above 1."""
    return f"{number:,} {name}{ending if number > 1 else ''}"


def _duration(days: float) -> str:
    """A time in days, or if it is below one in hours or minutes."""
    units = (("days", 1), ("hours", 24), ("minutes", 1440))
    name, unit = next((pair for pair in units if days * pair[1] >= 1), units[-1])
    return f"{days * unit:{',.0f' if days * unit >= 10 else '.2g'}} {name}"
