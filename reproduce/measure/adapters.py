"""Measures how similar SLoPe's adapters are to their final values during training: Figure 3b.

The trainer stores only final weights: a small model is trained here, with a copy after each step.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from itertools import starmap
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.config.run import load
from experiments.training.optimization import DTYPES, Optimization
from reproduce.measure.base import Base, Metrics, Report, Result

# The overrides that choose the data and the training of a model, as in blocks and the quickstart.
RATES = ("train.learning_rate=0.008", "train.min_learning_rate=0.0008")
TRAININGS = {
    "gpt2_nano": ["data=stdlib", "train=nano"],
    "gpt2_5m": ["data=packages", "train=mini", *RATES],
}
MOST = 100  # steps that train the adapters, as in the paper; never more than a quarter of all
State = list[tuple[Tensor, ...]]  # L^T and R of each layer
# What is compared of them: L, R, and the matrix [out, in] that they add.
PARTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "down": lambda left, right: left,
    "up": lambda left, right: right,
    "both": lambda left, right: right.t() @ left,
}


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
        metrics: Metrics = {"steps": float(len(states))}
        for name, part in PARTS.items():
            pairs = zip(starmap(part, now), starmap(part, end), strict=True)
            cosines = [F.cosine_similarity(a.flatten(), b.flatten(), 0) for a, b in pairs]
            metrics[name] = torch.stack(cosines).mean().item()
        return metrics, f"training of {self.model}"


@functools.cache
def trained(config: Adapters) -> list[State]:
    """The adapters after each of their steps. Cached: all rows show the same training."""
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
            both = [(layer.left, layer.right) for layer in method.layers.values()]
            states.append([tuple(t.detach().cpu().float().clone() for t in pair) for pair in both])
    return states
