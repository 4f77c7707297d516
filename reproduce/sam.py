"""Measures the image encoder of SAM, in training and at inference: torchao's Tables 2 and 5.

torchao's benchmark (benchmarks/benchmark_semi_sparse_training.py of pytorch/ao, removed in August
2026) calls this encoder ViT-L. Its script takes `image_encoder` of segment-anything-fast on
8 x 3 x 1024 x 1024 random pixels, all in fp16: forward, backward from a random gradient down to the
pixels, no optimizer. Here the encoder is timm's, without trained weights. `MEASURES` as explained
in speed_setup.py.
"""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from experiments.bench import arms
from experiments.bench.arms import Converted
from experiments.bench.sam import encoder
from experiments.bench.timing import Call, Time, in_turns
from reproduce.engine import Report
from reproduce.inference_speed import packed_layers, to_packed
from reproduce.speed_setup import Metrics, check_products, clock_and_power, convert, launched

if TYPE_CHECKING:
    from reproduce.bench import Config

# max-autotune without its two slowest parts, which would take minutes: inductor's own kernels are
# tuned, products stay with cuBLAS. CUDA graphs come from experiments.bench.timing.
COMPILED = {"max_autotune": True, "max_autotune_gemm_backends": "ATEN"}
PATCH = 16  # side of a patch in pixels
# The only fused attention that gives the gradient of a bias; torch may prefer others on some GPUs.
ATTENTION = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def build_encoder(config: Config) -> Any:
    """SAM's encoder of the config's size, with random weights."""
    changed: dict[str, Any] = {"img_size": config.image}
    if config.width:
        changed |= {"embed_dim": config.width, "num_heads": config.heads}
    with config.on:
        return encoder(config.model, **changed).to(config.dtype)


def random_images(config: Config) -> Tensor:
    """A batch of random pixels."""
    size = config.batch, 3, config.image, config.image
    return torch.randn(size, device=config.on, dtype=config.dtype)


def tokens(config: Config) -> int:
    """Number of patches of a batch."""
    return config.batch * (config.image // PATCH) ** 2


# --- training ------------------------------------------------------------------------------------


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
        with arms.compiling():
            self.step()
        arms.check_same(self.name, self.gradients(), want)
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


def of_sam(config: Config, report: Report) -> tuple[Metrics, str]:
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


def encoder_step(name: str, images: Tensor, config: Config) -> EncoderStep:
    """The encoder under the method `name`, after its products were checked."""
    before = allocated(config.on)
    torch.manual_seed(config.seed)
    model = build_encoder(config)
    mlp = model.blocks[0].mlp
    for layer in (mlp.fc1, mlp.fc2):
        check_products(config, (layer.in_features, layer.out_features), tokens(config))
    converted = convert(name, model, ("*mlp.*",), config, tokens(config))
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


# --- inference -----------------------------------------------------------------------------------


def of_sam_inference(config: Config, _: Report) -> tuple[Metrics, str]:
    """Images per second of the encoder whose linears in the parts `packed` are 2:4, its speed over
    dense, and the peak memory of a forward pass in MiB."""
    torch.manual_seed(config.seed)
    images = random_images(config)
    dense: Any = build_encoder(config).eval()
    built, products = {"dense": dense}, "dense"
    if config.packed:
        built["sparse"] = copy.deepcopy(dense)
        chosen = re.compile(rf"\.({'|'.join(config.packed)})\.").search
        products = to_packed(
            built["sparse"], lambda name: bool(chosen(name)), (tokens(config),), config.on
        )

    @torch.no_grad()
    def run(model: Any, _: int) -> Any:
        return model(images)

    calls: dict[str, Call] = {name: partial(run, model) for name, model in built.items()}
    times: dict[str, Time] = in_turns(calls, config.on, config.repeats)
    own = "sparse" if config.packed else "dense"
    metrics = clock_and_power(times) | {
        "rate": 1e3 * config.batch / times[own].ms,
        "speedup": times["dense"].ms / times[own].ms,
        "mib": peak(lambda: run(built[own], 0), built[own]) if config.on.type == "cuda" else None,
    }
    return metrics, f"{products}, {launched(times, on_cpu='not in a graph')}"


def peak(call: Callable[[], Any], model: nn.Module) -> float:
    """Peak MiB that torch has allocated during a call on a GPU, counting this model's weights as
    they are stored (packed ones without their dense copies) and no other model's."""
    own = sum(p.nbytes for p in model.parameters())
    own += sum(m.packed.buffer.nbytes - m.weight.nbytes for m in packed_layers(model))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    return (torch.cuda.max_memory_allocated() - before + own) / 2**20


MEASURES = {"sam": of_sam, "sam_inference": of_sam_inference}
