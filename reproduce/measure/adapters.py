"""Measures how similar SLoPe's adapters are to their final values during training: Figure 3b.

The trainer stores only the final weights, so a small model is trained here, and its adapters are
copied after every step.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.config.run import load
from experiments.training.optimization import DTYPES, Optimization
from methods.nn.compressed import CompressedLinear
from reproduce.measure.base import Base, Metrics, Report, Result

# The overrides that choose the data and the training of a model, as in blocks and the quickstart.
TRAININGS = {
    "gpt2_nano": ["data=stdlib", "train=nano"],
    "gpt2_5m": [
        *("data=packages", "train=mini"),
        *("train.learning_rate=0.008", "train.min_learning_rate=0.0008"),
    ],
}
MOST = 100  # steps that train the adapters, as in the paper; never more than a quarter of all
State = dict[str, list[Tensor]]  # of all layers, L^T under `left` and R under `right`


@dataclass(frozen=True, kw_only=True)
class Adapters(Base):
    """Cosine similarity of the adapters after `after` percent of their steps to the final ones, as
    the mean over the layers: of L (`down`), R (`up`) and their product (`both`), in a training of
    `model`."""

    what: ClassVar[str] = "adapters"
    products: ClassVar[tuple[str, ...]] = ()
    model: str
    adapter_rank: int
    batch: int = 1
    steps: int = 0
    after: int = 100

    def measure(self, _: Report) -> Result:
        states = trained(dataclasses.replace(self, after=100))
        now, end = states[max(1, round(len(states) * self.after / 100)) - 1], states[-1]
        pairs = {key: list(zip(now[key], end[key], strict=True)) for key in end}
        products = zip(*(matrices(state) for state in (now, end)), strict=True)
        metrics: Metrics = {"steps": float(len(states))}
        metrics |= {"down": mean_cosine(pairs["left"]), "up": mean_cosine(pairs["right"])}
        metrics["both"] = mean_cosine(list(products))
        return metrics, f"training of {self.model}"


@functools.cache
def trained(config: Adapters) -> list[State]:
    """The adapters after each of the steps that train them. Cached, because all rows of the table
    show the same training."""
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
    samples = range(config.batch)
    batches = run.open_source(model).batches((step, samples) for step in range(config.steps))
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
        for name, copies in state.items():
            copies.append(getattr(layer, name).detach().float().cpu().clone())
    return state


def matrices(state: State) -> list[Tensor]:
    """The low-rank matrices [out, in] that the adapters add."""
    return [r.t() @ left for left, r in zip(state["left"], state["right"], strict=True)]


def mean_cosine(pairs: list[tuple[Tensor, Tensor]]) -> float:
    """The mean cosine similarity of pairs of tensors, each flattened to one vector."""
    similarities = [F.cosine_similarity(a.flatten(), b.flatten(), 0) for a, b in pairs]
    return torch.stack(similarities).mean().item()
