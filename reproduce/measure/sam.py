"""Measures the image encoder of SAM in training: torchao's Table 2.

torchao's benchmark (benchmarks/benchmark_semi_sparse_training.py of pytorch/ao, removed in August
2026) calls this encoder ViT-L. Its script takes `image_encoder` of segment-anything-fast on
8 x 3 x 1024 x 1024 random pixels, all in fp16: forward, backward from a random gradient down to the
pixels, no optimizer. Here the encoder is timm's, without trained weights.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from experiments.bench import variants
from experiments.bench.sam import ATTENTION, PATCH, encoder
from experiments.bench.timing import Call, in_turns
from experiments.bench.variants import Converted
from reproduce.measure.base import Base, Metrics, Report, Result
from reproduce.measure.setup import check_products, clock_and_power, launched, matmul

# max-autotune without its two slowest parts, which would take minutes: inductor's own kernels are
# tuned, products stay with cuBLAS. CUDA graphs come from experiments.bench.timing.
COMPILED = {"max_autotune": True, "max_autotune_gemm_backends": "ATEN"}


@dataclass(frozen=True, kw_only=True)
class Images(Base):
    """An encoder and its batch.

    model: the name of a model in timm, whose `width` and `heads` are changed if they are given.
    image: side of the images in pixels.
    """

    batch: int = 1
    width: int = 0
    heads: int = 1
    model: str
    image: int = 1024

    @property
    def tokens(self) -> int:
        """Number of patches of a batch."""
        return self.batch * (self.image // PATCH) ** 2


@dataclass(frozen=True, kw_only=True)
class Settings(Images):
    """An encoder under a method."""

    method: str


def build_encoder(config: Images) -> Any:
    """SAM's encoder of the config's size, with random weights."""
    changed: dict[str, Any] = {"img_size": config.image}
    if config.width:
        changed |= {"embed_dim": config.width, "num_heads": config.heads}
    with config.on:
        return encoder(config.model, **changed).to(config.dtype)


def random_images(config: Images) -> Tensor:
    """A batch of random pixels."""
    size = config.batch, 3, config.image, config.image
    return torch.randn(size, device=config.on, dtype=config.dtype)


class EncoderStep:
    """The encoder under a method, and its step: forward and backward with the method's hooks.

    bytes: of the memory that it holds between steps.
    """

    def __init__(self, name: str, converted: Converted, images: Tensor, gradient: Tensor) -> None:
        self.name, self.converted, self.model = name, converted, converted.model
        self.images, self.gradient = images, gradient
        self.bytes = 0

    def step(self, _: int = 0) -> None:
        """Forward and backward of one batch, with the method's hooks."""
        self.clear()
        self.converted.before(0)
        self.model(self.images).backward(self.gradient)
        self.converted.after(0)

    def clear(self) -> None:
        """Drop the gradients."""
        self.images.grad = None
        self.model.zero_grad()

    def compile(self, **how: Any) -> None:
        """Compile the blocks, which share their code.

        Args:
            how: arguments of torch.compile; none = the options in `COMPILED`.
        Raises:
            UserError: the gradients of the compiled encoder are others.
        """
        self.step()
        want = self.gradients()
        for block in self.model.blocks:  # type: ignore[union-attr]
            block.compile(fullgraph=True, **(how or {"options": COMPILED}))
        with variants.compiling():
            self.step()
        variants.check_same(self.name, self.gradients(), want)
        self.clear()

    def gradients(self) -> list[Tensor | None]:
        """The gradients of the images and of all parameters."""
        return [self.images.grad, *(p.grad for p in self.model.parameters())]

    def peak(self, others: int) -> int:
        """Peak bytes that torch has allocated during a step, minus `others`, the bytes that are not
        this model's."""
        torch.cuda.reset_peak_memory_stats()
        self.step()
        self.clear()
        return torch.cuda.max_memory_allocated() - others


def measure(config: Settings, report: Report) -> Result:
    """Speed of the encoder in training: forward and backward with the hooks of a step.

    On a GPU the encoder is compiled and runs in a CUDA graph; figures named `launched` are without
    both.
    """
    already = allocated(config.on)
    images = random_images(config).requires_grad_()
    methods = {"dense": "dense", "sparse": config.method}
    steps = {label: encoder_step(name, images, config) for label, name in methods.items()}
    calls: dict[str, Call] = {label: one.step for label, one in steps.items()}
    metrics: Metrics = {"launched_speedup": None}
    for label in steps:
        metrics |= {f"{label}_launched_ms": None, f"{label}_gb": None}
    with sdpa_kernel(ATTENTION):
        if config.on.type == "cuda":
            times = in_turns(calls, config.on, config.repeats, graphs=False)
            metrics |= {f"{label}_launched_ms": time.ms for label, time in times.items()}
            metrics["launched_speedup"] = times["dense"].ms / times["sparse"].ms
            report(f"launched: dense {times['dense'].ms:.1f} ms, 2:4 {times['sparse'].ms:.1f} ms")
            metrics |= compile_steps(steps, already, report)
        times = in_turns(calls, config.on, config.repeats)
        for one in steps.values():
            one.clear()
    metrics |= {f"{label}_ms": time.ms for label, time in times.items()}
    metrics["speedup"] = times["dense"].ms / times["sparse"].ms
    used = f"{steps['sparse'].converted.used}, {launched(times, on_cpu='not compiled')}"
    return metrics | clock_and_power(times), used


def encoder_step(name: str, images: Tensor, config: Settings) -> EncoderStep:
    """The encoder under the method `name`, after its products were checked."""
    before = allocated(config.on)
    torch.manual_seed(config.seed)
    model = build_encoder(config)
    mlp = model.blocks[0].mlp
    for layer in (mlp.fc1, mlp.fc2):
        check_products(config, (layer.in_features, layer.out_features))
    size = (config.dtype, config.tokens, matmul(config))
    converted = variants.convert(name, model, ("*mlp.*",), *size)
    with torch.no_grad():
        gradient = torch.randn_like(model(images))
    step = EncoderStep(name, converted, images, gradient)
    step.bytes = allocated(config.on) - before
    return step


def compile_steps(steps: dict[str, EncoderStep], already: int, report: Report) -> Metrics:
    """Compile the encoders; return the peak memory of a step of each in GB, `<label>_gb`.

    already: bytes that earlier measurements have left allocated, such as cuBLAS's workspaces.
    """
    for label, one in steps.items():
        start = time.monotonic()
        one.compile()
        report(f"{label}: compiled in {time.monotonic() - start:.0f} s")
    held = already + sum(one.bytes for one in steps.values())
    return {f"{label}_gb": one.peak(held - one.bytes) / 1e9 for label, one in steps.items()}


def allocated(device: torch.device) -> int:
    """Bytes that torch has allocated on a GPU; 0 on a CPU."""
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0
