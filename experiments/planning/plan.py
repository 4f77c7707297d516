"""Predicts the memory that a training needs on each GPU.

`footprint` counts the memory of a training step on one GPU, and `per_gpu` divides it among GPUs.
With `ddp` every GPU holds everything, and a second copy of the gradients in the buckets that are
sent. With `fsdp2` every GPU holds its share of weights, gradients, optimizer moments and masks.
Besides, it holds all masks at one bit per entry, the gathered weights of at most two blocks and of
the layers outside of blocks, the gradients of one block and of these layers before they are
divided, and the operands of one block. Before torch 2.15 weights are gathered in fp32
(experiments/training/sharding.py), and their copies in autocast's dtype are kept for the backward
pass.

Tests compare the memory with measurements on one and on two H200s. For more GPUs it is
extrapolated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from experiments.config.run import RunConfig
from experiments.planning import shapes
from experiments.planning.footprint import Footprint, footprint
from experiments.support.errors import UserError
from experiments.support.names import check_bounds
from experiments.training import averages, sharding
from experiments.training.distributed import World
from experiments.training.optimization import DTYPES, micro_batch_size

MIB, GIB = 2**20, 2**30


@dataclass(frozen=True, kw_only=True)
class Options:
    """Settings of a plan.

    gpus: number of GPUs that share the training.
    gpu_memory: GiB of one GPU that a training can use; an H200 has 139.8.
    """

    gpus: int = 1
    gpu_memory: float = 139.0

    def __post_init__(self) -> None:
        check_bounds(self, "plan.", gpus=(1, 1024), gpu_memory=(1, 10**6))


@dataclass(frozen=True, eq=False)
class Planned:
    """A training to plan. hf: the config of its transformers checkpoint, if any."""

    run: RunConfig
    options: Options
    hf: Any = None

    def micro_batch(self) -> int:
        """The number of samples in a micro-batch on each GPU."""
        run, quantizes = self.run, self.run.build_method().capabilities.quantizes
        return micro_batch_size(run.train, run.impl.micro_batch, self.options.gpus, quantizes)

    @cache  # noqa: B019
    def footprint(self, samples: int) -> Footprint:
        """The footprint of a step whose micro-batches have `samples` samples."""
        run, method = self.run, self.run.build_method()
        try:
            return footprint(
                lambda: shapes.build(run, self.hf),
                method,
                shapes.loss_of(run, method, samples, self.hf),
                dtype=DTYPES[run.train.dtype],
                optimizer=run.train.optimizer,
                compiled=run.impl.compile,
                packed=run.impl.matmul != "dense",
                repack=run.impl.repack_backward,
            )
        except ValueError as error:
            raise UserError(str(error)) from error

    def memory(self) -> dict[str, int]:
        """Bytes on one GPU by purpose, and their `peak`."""
        run, train, gpus = self.run, self.run.train, self.options.gpus
        impl = dataclasses.replace(run.impl, offload=False)
        world = World(0, gpus, torch.device("cuda"))
        sharding.check_shardable(run.build_method(), impl, train, world)
        samples = self.micro_batch()
        return per_gpu(
            self.footprint(samples),
            gpus,
            impl.shard,
            accumulates=train.batch_size > samples * gpus,
            checkpointing=impl.activation_checkpointing,
            averaged=averages.is_kept(train),
        )


def per_gpu(
    need: Footprint,
    gpus: int,
    shard: str,
    accumulates: bool,
    checkpointing: bool = False,
    averaged: bool = False,
) -> dict[str, int]:
    """Bytes on one GPU by purpose, and their `peak`.

    Args:
        accumulates: a step has several micro-batches, so that gradients are held together with
            activations. Otherwise a layer's activations are freed when its gradients are computed.
        averaged: an average of the weights is kept.
    """
    shared = shard == "fsdp2" and gpus > 1
    share = gpus if shared else 1
    communication = need.trained if shard == "ddp" and gpus > 1 else 0
    if shared:
        width = need.width if sharding.gathers_rounded() else 4
        weights = (2 * need.block + need.root) * width
        gradients = (need.block + need.root) * (need.width + 4)
        communication = weights + gradients + (weights if need.frozen else 0)
    trained = need.trained // share
    held = {
        "weights": trained,
        "teacher": need.frozen // share,
        "optimizer": need.moments // share,
        "averages": trained if averaged else 0,
        "masks": need.masks // share + (need.bits if shared else 0),
        "packed operands": 0 if shared else need.packed,
        "dense operands": 0 if shared else need.operands,
        "operands in passing": need.passing if shared else 0,
        "communication": communication,
    }
    forward = {
        "weights under autocast": 0 if shared and sharding.gathers_rounded() else need.casts,
        "activations": need.checkpointed if checkpointing else need.activations,
        "loss": need.loss,
    }
    step = sum(forward.values())
    most = trained + step if accumulates else max(trained, step)
    return {**held, "gradients": trained, **forward, "peak": sum(held.values()) + most}


def lines(planned: Planned) -> Iterator[str]:
    """The plan as sentences, and the memory as a table."""
    run, gpus, memory = planned.run, planned.options.gpus, planned.options.gpu_memory
    samples = planned.micro_batch()
    found = planned.memory()
    parameters = planned.footprint(samples).parameters
    parts = run.train.batch_size // samples // gpus
    yield f"{run.model_name} with the method {run.method}: {parameters:,} weights"
    yield f"GPUs: {gpus}{f', with {run.impl.shard}' if gpus > 1 else ''}"
    yield f"micro-batches a step: {parts}, each of {samples} samples a GPU, in {run.train.dtype}"
    for name, size in found.items():
        if size:
            yield f"  {name:<24}{size / MIB:>12,.0f} MiB"
    does = "fits" if found["peak"] <= memory * GIB else "does not fit"
    yield f"This {does} into the {memory:,.0f} GiB of a GPU."
