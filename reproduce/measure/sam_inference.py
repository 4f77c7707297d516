"""Measures the image encoder of SAM at inference: torchao's Table 5."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from experiments.bench.timing import Call, Time, in_turns
from reproduce.measure.base import Report, Result
from reproduce.measure.packed import SERVED, packed_layers, to_packed
from reproduce.measure.sam import Images, build_encoder, random_images
from reproduce.measure.setup import clock_and_power, launched


@dataclass(frozen=True, kw_only=True)
class Settings(Images):
    """An encoder whose linears in the parts `packed` are 2:4."""

    products: ClassVar[tuple[str, ...]] = SERVED
    packed: tuple[str, ...] = ()


def measure(config: Settings, _: Report) -> Result:
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
            built["sparse"], lambda name: bool(chosen(name)), (config.tokens,), config.on
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
    return metrics, f"{products}, {launched(times)}"


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
