"""Low-rank adapters (LoRA, arXiv 2106.09685) of the library peft on frozen weights.

A linear with weight W computes W x + alpha / rank * B A x, where A [rank, in] and B [out, rank] are
trained and W is not, so the zeros of a 2:4 base stay. At the end the adapters are merged into W,
and if W is sparse, the sum is masked with W's mask. That changes the trained function, so the loss
is measured both before and after the merge.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from common_kernels import check_nm
from experiments.support.errors import UserError, check_installed, writing
from experiments.support.names import check_bounds
from methods.nn import conversion
from models.heads import Head

FOLDER = "adapter"  # in the directory of the fine-tuning
FILES = ("adapter_config.json", "adapter_model.safetensors")


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Settings of mode=lora. include: the linears that get adapters: `all`, `ffn` or globs, as for
    methods."""

    rank: int
    alpha: float
    include: Any

    def __post_init__(self) -> None:
        check_bounds(self, "lora.", rank=(1, math.inf), alpha=(1e-6, math.inf))
        if isinstance(self.include, str) and self.include not in conversion.PRESETS:
            words = ", ".join(conversion.PRESETS)
            raise ValueError(f"lora.include={self.include}; choose one of {words}, or list globs")


def require_peft() -> None:
    """Raise a UserError if peft is not installed."""
    check_installed("peft", "mode=lora needs the library peft", "lora")


class Adapters:
    """Adds adapters to linears of `model` in place; only the adapters and the head are trained.

    patterns: the pattern (n, m) of linears that may be sparse, by name; 2:4 for all others. `masks`
    has the masks of the linears that are sparse, for merging.

    Raises:
        UserError: no linear matches `config.include`.
    """

    def __init__(
        self, model: Head, config: LoraConfig, patterns: Mapping[str, tuple[int, int]]
    ) -> None:
        peft: Any = import_module("peft")
        linears = {
            name: module
            for name, module in conversion.named(model, config.include, ())
            if type(module) is nn.Linear and name.startswith(f"{model.trunk_name}.")
        }
        if not linears:
            some = conversion.some_names(conversion.linears(model))
            raise UserError(f"no linear matches lora.include={config.include}; there are: {some}")
        self.masks = {
            name: linear.weight != 0
            for name, linear in linears.items()
            if not int(check_nm(linear.weight, *patterns.get(name, (2, 4))))
        }
        heads = [name for name, child in model.named_children() if [*child.parameters()]]
        self.wrapped: Any = peft.get_peft_model(
            model,
            peft.LoraConfig(
                r=config.rank,
                lora_alpha=config.alpha,
                target_modules=list(linears),
                modules_to_save=[name for name in heads if name != model.trunk_name],
            ),
        )
        self.model = model
        self.names = tuple(linears)

    @property
    def parameters(self) -> int:
        """The number of trained parameters, those of the adapters and the head."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    def save(self, folder: Path) -> None:
        """Write the adapters and the head as peft does."""
        with writing(folder):
            self.wrapped.save_pretrained(folder, save_embedding_layers=False)
        (folder / "README.md").unlink(missing_ok=True)  # peft's empty template

    @torch.no_grad()
    def merge(self) -> None:
        """Add the adapters to the weights, under their masks, and remove them, so that the model is
        plain again."""
        self.wrapped.merge_and_unload()
        for name, mask in self.masks.items():
            self.model.get_parameter(f"{name}.weight").masked_fill_(~mask, 0.0)
