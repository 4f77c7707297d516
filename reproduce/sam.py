"""The image encoder of SAM, which torchao's benchmark calls ViT-L.

Its script (benchmarks/benchmark_semi_sparse_training.py of pytorch/ao, removed in August 2026)
takes `image_encoder` of segment-anything-fast on 8 x 3 x 1024 x 1024 random pixels, all in fp16:
forward, backward from a random gradient down to the pixels, no optimizer. Here it is timm's,
without trained weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from experiments.bench import arms
from experiments.bench.arms import Converted
from experiments.bench.sam import encoder as encoder

# max-autotune without its two slowest parts, which would take minutes: kernels that inductor
# writes are tuned, products stay with cuBLAS. CUDA graphs come from experiments.bench.timing.
COMPILED = {"max_autotune": True, "max_autotune_gemm_backends": "ATEN"}


class EncoderStep:
    """The encoder under a method, and its step: forward and backward with the method's hooks.

    bytes: of what it holds between steps.
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
        """Compile the blocks, which share their code. Raises a `UserError` if gradients change.

        how: arguments of torch.compile; none = as `COMPILED` says.
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
        """Peak bytes that torch allocated during a step, without the `others` bytes that other
        models hold."""
        torch.cuda.reset_peak_memory_stats()
        self.step()
        self.clear()
        return torch.cuda.max_memory_allocated() - others
