"""Measures how soon adapters point where they end: SLoPe's Figure 3b.

The trainer keeps the last weights alone, so here a small model is trained whose adapters are copied
in every step. `MEASURES` as in speed.py.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.config.run import load
from experiments.training.optimization import DTYPES, Optimization
from methods.nn.compressed import CompressedLinear
from reproduce.speed import Metrics, Told

if TYPE_CHECKING:
    from reproduce.bench import Config

# The data and the training of a model, as blocks and the quickstart have them.
TRAININGS = {
    "gpt2_nano": ["data=stdlib", "train=nano"],
    "gpt2_5m": [
        *("data=packages", "train=mini"),
        *("train.learning_rate=0.008", "train.min_learning_rate=0.0008"),
    ],
}
MOST = 100  # steps that train the adapters, as in the paper, at most a quarter of all
State = dict[str, list[Tensor]]  # L^T and R of all layers, by `left` and `right`


def of_adapters(config: Config, _: Told) -> tuple[Metrics, str]:
    """Cosine similarity of the adapters `after` a percentage of their steps to those at the end,
    the mean over the layers: of L (`down`), R (`up`) and their product (`both`)."""
    states = trained(dataclasses.replace(config, after=100))
    now, end = states[max(1, round(len(states) * config.after / 100)) - 1], states[-1]
    pairs = {key: list(zip(now[key], end[key], strict=True)) for key in end}
    products = zip(*(matrices(state) for state in (now, end)), strict=True)
    metrics: Metrics = {"sm_mhz": None, "watts": None, "steps": float(len(states))}
    metrics |= {"down": mean_cosine(pairs["left"]), "up": mean_cosine(pairs["right"])}
    metrics["both"] = mean_cosine(list(products))
    return metrics, f"training of {config.model}"


@functools.cache
def trained(config: Config) -> list[State]:
    """The adapters after each of the steps that train them. Kept: all rows show one training."""
    adapting = min(MOST, config.steps // 4)
    run = load([
        f"model={config.model}", *TRAININGS[config.model], "method=slope", f"seed={config.seed}",
        f"method.adapter_rank={config.adapter_rank}", f"train.batch_size={config.batch}",
        f"method.adapter_fraction={adapting / config.steps}", f"train.steps={config.steps}",
        f"train.warmup_steps={config.steps // 10}",
    ])  # fmt: skip
    torch.manual_seed(config.seed)
    model, method = run.build_model().to(config.on), run.build_method()
    method.convert(model, DTYPES[run.train.dtype])
    optimization = Optimization(model, method, run.train, config.on)
    every = range(config.batch)
    batches = run.open_source(model).batches((step, every) for step in range(config.steps))
    states = []
    for step in range(config.steps):
        optimization.step(step, batches, [1.0])
        if step >= config.steps - adapting:
            states.append(adapters(method.layers.values()))
    return states


def adapters(layers: Iterable[nn.Linear]) -> State:
    """Copies of the adapters of these layers."""
    state: State = {"left": [], "right": []}
    for layer in layers:
        assert isinstance(layer, CompressedLinear)
        for name, kept in state.items():
            kept.append(getattr(layer, name).detach().float().cpu().clone())
    return state


def matrices(state: State) -> list[Tensor]:
    """The low-rank matrices [out, in] that the adapters add."""
    return [r.t() @ left for left, r in zip(state["left"], state["right"], strict=True)]


def mean_cosine(pairs: list[tuple[Tensor, Tensor]]) -> float:
    """Mean of the cosine similarity of pairs of tensors, each taken as one vector."""
    found = [F.cosine_similarity(a.flatten(), b.flatten(), 0) for a, b in pairs]
    return torch.stack(found).mean().item()


MEASURES = {"adapters": of_adapters}
