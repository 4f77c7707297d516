"""Text for causal language models, in batches for the trainer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from experiments.data.corpus import Corpus
from experiments.data.source import Batch, Request


@dataclass(frozen=True)
class CausalText:
    """Batches of windows of `block` tokens; the target of each token is the next one.

    Batches are {"input": [B, T], "target": [B, T]}, int64.
    """

    corpus: Corpus
    block: int
    unit, one_shape = "tokens", True

    @property
    def directory(self) -> Path:
        return self.corpus.directory

    @property
    def fingerprint(self) -> str:
        return self.corpus.fingerprint

    @property
    def tokens_per_sample(self) -> int:
        return self.block

    @property
    def eval_size(self) -> int:
        return self.corpus.eval_size(self.block)

    def batches(self, requests: Iterable[Request]) -> Iterator[Batch]:
        for step, samples in requests:
            yield self.corpus.batch("train", step, samples, self.block)

    def eval_batches(self, count: int, batch_size: int) -> Iterator[Batch]:
        return self.corpus.eval_batches(count, batch_size, self.block)

    def score(self, output: Any, loss: Tensor, batch: Batch) -> tuple[dict[str, Tensor], int]:
        targets = batch["target"].numel()
        return {"loss": loss * targets}, targets

    def describe(self) -> dict[str, Any]:
        return self.corpus.manifest
