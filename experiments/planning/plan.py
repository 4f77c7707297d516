"""Predicts the memory that a training needs on each GPU.

`footprint` counts the memory of a training step on one GPU, and `per_gpu` divides it among GPUs.
With `ddp` every GPU holds everything, and a second copy of the gradients in the buckets that are
sent. With `fsdp2` every GPU holds its share of weights, gradients, optimizer moments and masks.
Besides, it holds all masks at one bit per entry, the gathered weights of at most two blocks and of
the layers outside of blocks, the gradients of one block and of these layers before they are
divided, and the operands of one block. Before torch 2.15 weights are gathered in fp32
(training/sharding.py), and copies in autocast's dtype are kept for the backward pass.

Tests compare the memory with measurements on one and two H200s; for more it is extrapolated.

A transformers checkpoint is planned by its shape, which is read from the `config.json` of a local
folder or, for the checkpoints of the experiment files, known here, so that nothing is downloaded.
"""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import methods
from experiments.config.run import RunConfig
from experiments.config.settings import ImplConfig, TrainConfig
from experiments.data.mlm import MLMConfig
from experiments.data.parallel import PairsConfig
from experiments.planning.footprint import Footprint, footprint
from experiments.support.errors import UserError
from experiments.support.names import check_bounds
from experiments.training import sharding
from experiments.training.distributed import World
from experiments.training.optimization import micro_batch_size
from models.bert import BertLM
from models.hf import DROPOUT, CausalLM
from models.vit import ViTConfig

# OPT (Zhang et al., arXiv 2205.01068, table 1): layers, heads, width.
_OPT = {
    "facebook/opt-125m": (12, 12, 768),
    "facebook/opt-1.3b": (24, 32, 2048),
    "facebook/opt-2.7b": (32, 32, 2560),
    "facebook/opt-6.7b": (32, 32, 4096),
    "facebook/opt-13b": (40, 40, 5120),
    "facebook/opt-30b": (48, 56, 7168),
    "facebook/opt-66b": (64, 72, 9216),
}


def transformers_config(path: str) -> Any:
    """The transformers config of a checkpoint: a local folder, or one whose shape is known here."""
    from transformers import AutoConfig, GPT2Config, LlamaConfig, OPTConfig

    if (Path(path) / "config.json").is_file():
        return AutoConfig.from_pretrained(path, trust_remote_code=False)
    known: dict[str, Any] = {
        name: OPTConfig(num_hidden_layers=layers, num_attention_heads=heads, hidden_size=width,
                        ffn_dim=4 * width, word_embed_proj_dim=width)
        for name, (layers, heads, width) in _OPT.items()
    }  # fmt: skip
    known["openai-community/gpt2"] = GPT2Config()  # the default, as LLaMA's below
    known["meta-llama/Llama-2-7b-hf"] = LlamaConfig(max_position_embeddings=4096)
    if (config := known.get(path.partition("@")[0])) is None:
        raise UserError(
            f"model.path={path} is no folder with a config.json, and its shape is not known here: "
            f"known are {', '.join(known)}"
        )
    return config


def build(run: RunConfig, hf: Any = None) -> nn.Module:
    """A run's model of fake tensors. hf: the transformers config of its checkpoint, if any."""
    shape: Any = run.model
    if hf is None:
        return dataclasses.replace(run, init=None).build_model()
    from transformers import AutoModelForCausalLM

    for name in DROPOUT:  # as `CausalLM.from_pretrained` does
        if hasattr(hf, name):
            setattr(hf, name, 0.0)
    return CausalLM(AutoModelForCausalLM.from_config(hf), shape.block_size)


def loss_of(
    run: RunConfig, method: methods.Method, samples: int, hf: Any = None
) -> Callable[[Any], Tensor]:
    """A function that computes the model's loss on a micro-batch of `samples` samples."""
    shape, zeros, indices = cast(Any, run.model), torch.zeros, torch.int64
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]
    if isinstance(shape, ViTConfig):
        size, dino = (3, shape.image_size, shape.image_size), run.dino
        tensors = {"input": (size, torch.float32), "target": ((), indices)}
        if dino is not None:
            local = (dino.local_crops, 3, dino.local_size, dino.local_size)
            crops = {"global_crops": (2, *size), "local_crops": local}
            tensors = {name: (own, torch.float32) for name, own in crops.items()}
    elif isinstance(run.data, MLMConfig):
        tokens = run.data.sequence_length or shape.block_size
        most = run.data.max_predictions or tokens
        predicted = samples * min(most, max(1, round(run.data.mask_probability * tokens)))

        def masked(model: BertLM) -> Tensor:  # here simply the first words are masked
            hidden = model.bert(zeros(samples, tokens, dtype=indices))
            logits = model.predictions(hidden.flatten(0, 1)[:predicted])
            return F.cross_entropy(logits, zeros(predicted, dtype=indices))

        return masked
    elif isinstance(run.data, PairsConfig):  # a sample is a bundle of pairs
        tokens = min(run.data.max_tokens or shape.block_size, shape.block_size)
        samples *= max(1, run.data.batch_tokens // tokens)
        names = ("input", "target", "source", "source_mask")
        tensors = dict.fromkeys(names, ((tokens,), indices))
    else:
        tokens = shape.block_size or hf.max_position_embeddings
        tensors = dict.fromkeys(("input", "target"), ((tokens,), indices))
    return lambda model: method.loss(
        model, {name: zeros(samples, *own, dtype=of) for name, (own, of) in tensors.items()}
    )


MIB, GIB = 2**20, 2**30


@dataclass(frozen=True, kw_only=True)
class Options:
    """Settings of a plan. gpus: that share the training. gpu_memory: usable GiB (H200: 139.8)."""

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

    def footprint(self, samples: int) -> Footprint:
        """The footprint of a step whose micro-batches have `samples` samples."""
        run, method = self.run, self.run.build_method()
        loss = loss_of(run, method, samples, self.hf)
        try:
            return footprint(lambda: build(run, self.hf), method, loss, run.train, run.impl)
        except ValueError as error:
            raise UserError(str(error)) from error


def per_gpu(
    need: Footprint, train: TrainConfig, impl: ImplConfig, gpus: int, accumulates: bool
) -> dict[str, int]:
    """Bytes on one GPU by purpose, and their `peak`. accumulates: a step has several micro-batches,
    so that gradients are held together with activations; otherwise these are freed layer by layer.
    """
    shared = impl.shard == "fsdp2" and gpus > 1
    share = gpus if shared else 1
    communication = need.trained if impl.shard == "ddp" and gpus > 1 else 0
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
        "averages": trained if train.ema or train.average_last else 0,
        "masks": need.masks // share + (need.bits if shared else 0),
        "packed operands": 0 if shared else need.packed,
        "dense operands": 0 if shared else need.operands,
        "operands in passing": need.passing if shared else 0,
        "communication": communication,
    }
    forward = {
        "weights under autocast": 0 if shared and sharding.gathers_rounded() else need.casts,
        "activations": need.checkpointed if impl.activation_checkpointing else need.activations,
        "loss": need.loss,
    }
    step = sum(forward.values())
    most = trained + step if accumulates else max(trained, step)
    return {**held, "gradients": trained, **forward, "peak": sum(held.values()) + most}


def lines(planned: Planned) -> Iterator[str]:
    """The plan as sentences, and the bytes on one GPU by purpose as a table."""
    run, gpus, memory = planned.run, planned.options.gpus, planned.options.gpu_memory
    train, impl = run.train, dataclasses.replace(run.impl, offload=False)
    samples = planned.micro_batch()
    sharding.check_shardable(run.build_method(), impl, World(0, gpus, torch.device("cuda")))
    need = planned.footprint(samples)
    found = per_gpu(need, train, impl, gpus, accumulates=train.batch_size > samples * gpus)
    yield f"{run.model_name} with the method {run.method}: {need.parameters:,} weights"
    yield f"GPUs: {gpus}{f', with {impl.shard}' if gpus > 1 else ''}"
    parts = train.batch_size // samples // gpus
    yield f"micro-batches a step: {parts}, each of {samples} samples a GPU, in {train.dtype}"
    for name, size in found.items():
        if size:
            yield f"  {name:<24}{size / MIB:>12,.0f} MiB"
    does = "fits" if found["peak"] <= memory * GIB else "does not fit"
    yield f"This {does} into the {memory:,.0f} GiB of a GPU."
