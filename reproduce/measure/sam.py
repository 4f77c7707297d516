"""Measures the image encoder of SAM in training: torchao's Table 2.

torchao's benchmark (benchmarks/benchmark_semi_sparse_training.py of pytorch/ao, removed in August
2026) calls this encoder ViT-L. Its script takes `image_encoder` of segment-anything-fast on
8 x 3 x 1024 x 1024 random pixels, all in fp16: forward, backward from a random gradient down to the
pixels, no optimizer. Here the encoder is timm's, without trained weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from experiments.bench import variants
from experiments.bench.sam import ATTENTION, PATCH, encoder
from experiments.bench.timing import Call, in_turns
from experiments.bench.variants import Bench
from reproduce.measure.base import Base, Metrics, Report, Result
from reproduce.measure.setup import check_products, clock_and_power, described, matmul

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


def measure(config: Settings, report: Report) -> Result:
    """Speed of the encoder in training: forward and backward with the hooks of a step.

    On a GPU the encoder is compiled and runs in a CUDA graph; figures named `launched` are without
    both.
    """
    already = allocated(config.on)  # by earlier measurements, such as cuBLAS's workspaces
    images = random_images(config)
    built: dict[str, Bench] = {}
    held: dict[str, int] = {}  # bytes between steps
    for label, name in {"dense": "dense", "sparse": config.method}.items():
        before = allocated(config.on)
        built[label] = encoder_bench(name, images, config)
        held[label] = allocated(config.on) - before
    calls: dict[str, Call] = {label: one.whole for label, one in built.items()}
    metrics: Metrics = {"launched_speedup": None}
    for label in built:
        metrics |= {f"{label}_launched_ms": None, f"{label}_gb": None}
    with sdpa_kernel(ATTENTION):
        if config.on.type == "cuda":
            times = in_turns(calls, config.on, config.repeats, graphs=False)
            metrics |= {f"{label}_launched_ms": time.ms for label, time in times.items()}
            metrics["launched_speedup"] = times["dense"].ms / times["sparse"].ms
            report(f"launched: dense {times['dense'].ms:.1f} ms, 2:4 {times['sparse'].ms:.1f} ms")
            for label, one in built.items():
                compile_blocks(label, one, {"options": COMPILED})
            for label, one in built.items():
                others = already + sum(held.values()) - held[label]
                metrics[f"{label}_gb"] = peak(one, others) / 1e9
        times = in_turns(calls, config.on, config.repeats)
    metrics |= {f"{label}_ms": time.ms for label, time in times.items()}
    metrics["speedup"] = times["dense"].ms / times["sparse"].ms
    used = described(built["sparse"], times, on_cpu="not compiled")
    return metrics | clock_and_power(times), used


def encoder_bench(name: str, images: Tensor, config: Settings) -> Bench:
    """The encoder under the method `name`, after its products were checked."""
    torch.manual_seed(config.seed)
    model = build_encoder(config)
    mlp = model.blocks[0].mlp
    for layer in (mlp.fc1, mlp.fc2):
        check_products(config, (layer.in_features, layer.out_features))
    size = (config.dtype, config.tokens, matmul(config))
    converted = variants.convert(name, model, ("*mlp.*",), *size)
    with torch.no_grad():
        gradient = torch.randn_like(model(images))
    return Bench(converted, [images], [gradient])


def compile_blocks(name: str, built: Bench, how: dict[str, Any]) -> None:
    """Compile the blocks, which share their code.

    Args:
        how: arguments of torch.compile.
    Raises:
        UserError: the gradients of the compiled encoder are others.
    """
    built.whole(0)
    want = built.found()
    blocks: Any = built.converted.model.blocks
    for block in blocks:
        block.compile(fullgraph=True, **how)
    with variants.compiling():
        built.whole(0)
    variants.check_same(name, built.found(), want)
    built.clear()


def allocated(device: torch.device) -> int:
    """Bytes that torch has allocated on a GPU; 0 on a CPU."""
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


def peak(built: Bench, others: int) -> int:
    """Peak bytes that torch has allocated during a step, minus `others`, the bytes that are not
    this model's."""
    built.clear()
    torch.cuda.reset_peak_memory_stats()
    built.whole(0)
    built.clear()
    return torch.cuda.max_memory_allocated() - others
