"""Evaluation on held-out samples, as in pre-training."""

from __future__ import annotations

from torch import Tensor

from experiments.data.source import Source
from experiments.training.trainer import Trainer


class HeldOut:
    """The evaluation of pre-training: means over fixed held-out samples, equal on all ranks, of
    `val_loss` in nats and of the source's other metrics.

    samples: their number; `source` may have fewer.
    """

    def __init__(self, source: Source, samples: int) -> None:
        self.source, self.samples = source, min(samples, source.eval_size)

    def __call__(self, trainer: Trainer) -> dict[str, float]:
        totals: dict[str, Tensor] = {}
        count = 0
        for batch in self.source.eval_batches(self.samples, trainer.micro_batch):
            output, loss, on_device = trainer.forward(batch)
            sums, targets = self.source.score(output, loss.float(), on_device)
            totals = {name: totals.get(name, 0) + value for name, value in sums.items()}
            count += targets
        return {f"val_{name}": float(value) / count for name, value in totals.items()}
