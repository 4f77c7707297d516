"""Measures one cell of a speed or memory table on the present device.

It is a driver like those of `experiments`, with `load`, `run` and `finished`. A result is
identified by its config and the device, and is stored, so that it is measured only once.
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import methods
from common_kernels.matmul import unavailable
from experiments.bench.arms import ARMS
from experiments.bench.timing import SUSTAINED_S, allow_repeated_steps
from experiments.config.compose import one_line_errors, typed
from experiments.config.run import digest
from experiments.support import memory, results
from experiments.support.errors import UserError
from reproduce import (
    adapter_similarity,
    inference_speed,
    operator_speed,
    sam,
    slope_layer,
    slope_products,
    speed,
    step_speed,
)

MEASURES = {
    **speed.MEASURES,
    **operator_speed.MEASURES,
    **step_speed.MEASURES,
    **inference_speed.MEASURES,
    **sam.MEASURES,
    **slope_layer.MEASURES,
    **slope_products.MEASURES,
    **adapter_similarity.MEASURES,
}
# What is measured without 2:4 products, and what torch's own are enough for, those of Ampere.
WITHOUT = ("search", "geglu", "slow_down", "imposed_zeros", "adapters")
SERVED = ("decode", "sam_inference")
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of one measurement. What is measured is compared with a dense model of the same
    shape.

    what: the measurement, a key of `MEASURES`, whose function explains it:
        `linear`: a linear width -> inner, with batch * length tokens.
        `gpt2`: a feed-forward network and a whole GPT-2 block.
        `decoder`: a decoder layer, at inference also with adapters of `ranks`.
        `search`: the search for transposable masks of a weight width -> inner.
        `geglu`: GEGLU on batch * length tokens with `inner` features.
        `product`: the product of two matrices width x width.
        `train`: whole training steps of `model`.
        `slow_down`: training steps of a block under Bi-Mask.
        `parts`: the parts of a training step of a linear width -> inner.
        `decode`: decoding `new` tokens after `length` with `layers` layers of LLaMA.
        `kernels`: the product and the packing of a weight width -> inner.
        `mlp`: an MLP, forward and backward.
        `sam`, `sam_inference`: SAM's image encoder, in training, and at inference with the linears
        in the parts `packed` as 2:4.
        `layer`: a layer of OPT's shapes, with and without the parts of SLoPe.
        `shapes`: products with weights of several shapes made from width x width.
        `imposed_zeros`: the zeros that the second mask adds to a weight width x width, for an N:M
        `pattern`.
        `adapters`: SLoPe's adapters in a training of `model`, `after` a percentage of their steps.
    method: a key of experiments.bench.arms.ARMS, or the name of a method.
    inner: width of the feed-forward network; null = 4 * width.
    kv_heads: number of key and value heads of a LLaMA layer; null = a GPT-2 block, which has OPT's
        shapes.
    ranks: ranks of adapters, in percent of the width.
    accumulate: micro-batches per step. steps: steps of a whole training.
    model: for `train` a size of GPT-2, `transformer_base` or `deit_base`; for SAM the name of a
        model in timm. image: side of SAM's images in pixels. `width` and `heads` change timm's
        model, if given.
    precision: dtype of weights and products on a GPU, bf16 or fp16; a CPU uses fp32.
    repeats: samples of each time.
    shrink: divisor of width and inner, for small tiers.
    device: `auto`, or `cuda` to require a GPU.
    """

    what: str
    method: str
    batch: int = 1
    length: int = 1
    width: int = 0
    inner: int | None = None
    heads: int = 1
    kv_heads: int | None = None
    layers: int = 1
    new: int = 0
    ranks: tuple[float, ...] = ()
    accumulate: int = 1
    steps: int = 0
    packed: tuple[str, ...] = ()
    pattern: str = "2:4"
    adapter_rank: int = 0
    after: int = 100
    model: str = ""
    image: int = 1024
    precision: str = "bf16"
    repeats: int = 7
    shrink: int = 1
    device: str = "auto"
    threads: int = 2
    seed: int = 0
    tier: str = "none"
    runs: str = "runs"

    def __post_init__(self) -> None:
        for name in ("ranks", "packed"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        known = {
            "what": tuple(MEASURES),
            "method": tuple(dict.fromkeys([*ARMS, *methods.available()])),
            "precision": tuple(PRECISIONS),
            "device": ("auto", "cuda"),
        }
        for name, choices in known.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)}; choose of {', '.join(choices)}")

    @property
    def on(self) -> torch.device:
        """The device to measure on."""
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and products."""
        return PRECISIONS[self.precision] if self.on.type == "cuda" else torch.float32

    @property
    def no_products(self) -> str:
        """Why this device has no 2:4 products for the measurement; "" if it has them or needs none.
        Dense products would be measured in their place."""
        names = () if self.what in WITHOUT else ("cusparselt", "cutlass")
        reasons = [unavailable(n, self.on, self.dtype) for n in names[: 1 + (self.what in SERVED)]]
        return "" if None in reasons else "; ".join(map(str, reasons))

    @property
    def tokens(self) -> int:
        """Number of tokens of a batch."""
        return self.batch * self.length

    @property
    def ffn(self) -> int:
        """Width of the feed-forward network."""
        return self.inner or 4 * self.width

    def shrunk(self) -> Config:
        """This config with its widths divided by `shrink`."""
        inner = None if self.inner is None else self.inner // self.shrink
        return dataclasses.replace(self, width=self.width // self.shrink, inner=inner, shrink=1)

    def identity(self) -> dict[str, Any]:
        """Everything that the result depends on, including the device, as plain values."""
        fields = dataclasses.asdict(self)
        for name in ("tier", "runs"):
            del fields[name]
        sustained = SUSTAINED_S if self.on.type == "cuda" else None
        machine = {"device": device_name(self.on), "torch": torch.__version__}
        return {**fields, **machine, "sustained_s": sustained, "order": "random"}

    def digest(self) -> str:
        """Hash of `identity()`."""
        return digest(self.identity())

    def directory(self) -> Path:
        """The directory of the result."""
        device = re.sub(r"\W+", "-", device_name(self.on).lower())
        return Path(self.runs, "bench", device, f"{self.what}-{self.method}-{self.digest()}")


def device_name(device: torch.device) -> str:
    """The name of the GPU or the CPU."""
    return torch.cuda.get_device_name() if device.type == "cuda" else results.cpu_name()


def load(overrides: list[str]) -> Config:
    """The config of `key=value` overrides in hydra's syntax.

    Raises:
        UserError: a key or value that does not exist.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    with one_line_errors():
        parsed = OverridesParser.create().parse_overrides(overrides)
        values = {override.key_or_group: override.value() for override in parsed}
        values = {k: str(v) if hasattr(v, "text") else v for k, v in values.items()}
        return typed(Config, "bench", values).shrunk()


def finished(config: Config) -> dict[str, Any] | None:
    """The stored result of this config on this device, or None."""
    shape = {"metrics": dict, "environment": dict}
    return results.read_finished(config.directory(), config.digest(), shape)


def run(config: Config, report: Callable[[str], None] = print) -> dict[str, Any]:
    """Measure, unless there is a result already; return the content of `result.json`.

    Raises:
        UserError: a product is wrong, a package is missing, or there is no GPU.
    """
    stored = finished(config)
    if stored is not None:
        return stored
    if config.device == "cuda" and config.on.type != "cuda":
        raise UserError("device=cuda, but torch sees no GPU here; tier=smoke runs on a CPU")
    memory.free(config.on)  # a measurement that failed still used its memory at its end
    threads = torch.get_num_threads()
    torch.set_num_threads(config.threads)
    try:
        with warnings.catch_warnings():
            allow_repeated_steps()
            metrics, used = MEASURES[config.what](config, report)
    finally:
        torch.set_num_threads(threads)
        memory.free(config.on)
    result = {
        "config_hash": config.digest(),
        "config": config.identity(),
        "seed": config.seed,
        "tier": config.tier,
        "metrics": metrics,
        "backend": used,
    }
    measured = {name: number for name, number in metrics.items() if number is not None}
    report(", ".join(f"{name} {number:.4g}" for name, number in measured.items()))
    return results.write_result(config.directory(), result)
