"""Memory, steps, tokens and days of a training, on so many GPUs.

What one GPU holds follows from the footprint of a step (experiments/planning/footprint.py) and
from how the GPUs share it. `ddp`: each holds all, and a second copy of the gradients in buckets.
`fsdp2`: weights, gradients, moments and masks are shared; each has whole masks as bits. Of at most
two blocks at a time, and of what is outside of blocks, it gathers the weights and has whole
gradients; operands it makes of one block at a time. Where torch gathers weights in fp32
(experiments/training/sharding.py), copies of dense ones in autocast's dtype stay for the backward
pass. For one GPU and for two this is compared with H200 runs (tests/experiments/planning); more
are projected. So are the days of several GPUs of one host:
between those of GPUs that work beside what they exchange and those of GPUs that wait for it.
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
from experiments.planning.speed import TAUGHT, Speed, nearest
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
_SMALLER = 4  # times than the smallest model that was measured: below, launches count
# Bytes a second that each of two H200s of one host sent by NCCL under DDP and FSDP2, at the least
# (experiments/bench_results/h200_two_gpus.jsonl); on how many GPUs a host has.
LINK, HOST = 160e9, 8
# How many times as long as a dense step one of a sparse method took there under FSDP2, without a
# teacher.
SLOWER = 1.1, 2.7


@dataclass(frozen=True, kw_only=True)
class Options:
    """gpus: that share a training. gpu_memory: GiB of one GPU that a training can use; an H200 has
    139.8. json: a file for the plan; null = none."""

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
    """A run that is planned. hf, path: the transformers config of its checkpoint and where that
    lies, if it has one."""

    run: RunConfig
    options: Options
    hf: Any = None
    path: str | None = None

    def micro_batch(self, gpus: int) -> int:
        """Samples of a micro-batch on each of so many GPUs; a UserError if they cannot share."""
        run, quantizes = self.run, self.run.build_method().quantizes
        return micro_batch_size(run.train, run.impl.micro_batch, gpus, quantizes)

    @cache  # noqa: B019
    def footprint(self, samples: int) -> Footprint:
        """The memory of a step whose micro-batch has so many samples."""
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
        """Bytes on one of the GPUs by what they are for, and their `peak`.

        Raises:
            UserError: a training is not shared so.
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
        """The fewest GPUs, a power of two, that have the memory, and how they share it."""
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
    """Bytes on one GPU by what they are for, and their `peak`.

    offloads: what `fsdp2` shares lies in the memory of the host instead.
    accumulates: there is more than one micro-batch in a step. Gradients then stay beside the
    activations; otherwise these go as gradients come.
    """
    shared = shard == "fsdp2" and gpus > 1
    share = gpus if shared else 1
    communication = need.trained if shard == "ddp" and gpus > 1 else 0
    if shared:
        weights = (2 * need.block + need.root) * gathered_width(need)
        gradients = (need.block + need.root) * (need.width + 4)
        communication = weights + gradients + (weights if need.frozen else 0)
    # What the GPUs share, a GPU's part of it; the host has it where it is offloaded.
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


def gathered_width(need: Footprint) -> int:
    """Bytes of a weight that `fsdp2` gathers."""
    return need.width if sharding.gathers_rounded() else 4


def exchanged(need: Footprint, gpus: int, shard: str, micro_batches: int) -> float:
    """Bytes that each GPU sends in a step.

    `ddp` sums the gradients once. `fsdp2` gathers the weights of each micro-batch for its forward
    pass and again for its backward pass, a teacher's once, and spreads the sums of its gradients.
    """
    of_others = (gpus - 1) / gpus
    if shard == "ddp":
        return 2 * of_others * need.trained
    gathered = (2 * need.trained + need.frozen) * gathered_width(need) / 4
    return of_others * micro_batches * (gathered + need.trained)


def plan(planned: Planned) -> dict[str, Any]:
    """The whole plan as plain values; bytes in MiB.

    `days` and `days_at_most`: where what GPUs exchange costs nothing, and where all wait for it;
    both None where the plan does not fit. The latter is None, too, for GPUs of several hosts,
    between which nothing was measured, and for sparse methods with `fsdp2` and those whose teacher
    is counted by its forward pass alone, which take longer. `days_slower`: least and most days of a
    sparse method with `fsdp2`, if its steps take `SLOWER` times as long as dense ones.

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
    micro_batches = run.train.batch_size // (samples * options.gpus)
    fits = memory["peak"] <= options.gpu_memory * GIB
    days = days_at_most = days_slower = None
    slower = run.method != "dense" and shard == "fsdp2" and options.gpus > 1
    if speed is not None and fits:
        days = units / (speed.per_second * options.gpus * DAY)
        if slower:
            dense = _speed(run, need, dense=True) or speed
            each = units / (dense.per_second * options.gpus * DAY)
            if need.frozen and run.dino is None:
                each /= TAUGHT
            days_slower = [max(days, times * each) for times in SLOWER]
        elif options.gpus <= HOST and not speed.taught:
            sent = exchanged(need, options.gpus, shard, micro_batches)
            days_at_most = days + run.train.steps * sent / LINK / DAY
    return {
        "model": planned.path or run.model_name,
        "method": run.method,
        "parameters": need.parameters,
        "gpus": options.gpus,
        "shard": shard if options.gpus > 1 else None,
        "micro_batch": samples,
        "micro_batches": micro_batches,
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
        "days_at_most": days_at_most,
        "days_slower": days_slower,
    }


def _speed(run: RunConfig, need: Footprint, dense: bool = False) -> Speed | None:
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
    method = "dense" if dense else name
    taught = bool(need.frozen) and run.dino is None  # DINO's teacher is part of `work`
    return nearest(family, method, need.parameters, taught, work, unlike)


def lines(found: dict[str, Any]) -> Iterator[str]:
    """The plan for a reader."""
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
    most = found["days_at_most"]
    times, unit = _in_a_unit(found["days"], *([] if most is None else [most]))
    small = speed["factor"] > _SMALLER
    time = f"at least {times[0]}" if most is None or small else " to ".join(dict.fromkeys(times))
    taught = ", x 3/4 for a teacher" if speed["taught"] else ""
    unlike = f"; {speed['unlike']}" if speed["unlike"] else ""
    yield (
        f"{time} {unit} at {speed['per_second'] * found['gpus']:,.0f} "
        f"{speed['unit']}/s: one H200 on {speed['row']}{dense} ({speed['conditions']}), "
        f"x {speed['factor']:.3g} by the number of weights{taught}"
        f"{', x ' + str(found['gpus']) + ' GPUs' if found['gpus'] > 1 else ''}{unlike}"
        f"{'; none so small was measured, and it may wait for the CPU' if small else ''}"
    )
    if found["days_slower"] is not None:
        slower, unit = _in_a_unit(*found["days_slower"])
        yield (
            f"of sparse methods with fsdp2, a step on two H200s took {SLOWER[0]} to {SLOWER[1]} "
            "times as long as a dense one with fsdp2 (not compiled, without a teacher); with such "
            f"steps {' to '.join(dict.fromkeys(slower))} {unit}"
        )


def _several(number: int, name: str, ending: str = "s") -> str:
    """The number and the name of that many."""
    return f"{number:,} {name}{ending if number > 1 else ''}"


def _in_a_unit(*days: float) -> tuple[list[str], str]:
    """Times in days, or below one in hours or minutes, and that unit."""
    name, unit = next(
        (pair for pair in (("days", 1), ("hours", 24)) if max(days) * pair[1] >= 1),
        ("minutes", 1440),
    )
    return [f"{x:,.0f}" if x >= 10 else f"{x:.2g}" for x in (d * unit for d in days)], name
