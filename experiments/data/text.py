"""Text for causal language models, in batches for the trainer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from experiments.data.corpus import Corpus
from experiments.data.source import Batch, Request


class CausalText:
    """Batches of windows of `block` tokens; the target of each token is the next one.

    Batches are {"input": [B, T], "target": [B, T]}, int64.
    """

    unit, one_shape = "tokens", True

    def __init__(self, corpus: Corpus, block: int) -> None:
        self.corpus, self.tokens_per_sample = corpus, block
        self.directory, self.fingerprint = corpus.directory, corpus.fingerprint
        self.eval_size = corpus.eval_size(block)

    def batches(self, requests: Iterable[Request]) -> Iterator[Batch]:
        for step, samples in requests:
            yield self.corpus.batch("train", step, samples, self.tokens_per_sample)

    def eval_batches(self, count: int, batch_size: int) -> Iterator[Batch]:
        return self.corpus.eval_batches(count, batch_size, self.tokens_per_sample)

    def score(self, output: Any, loss: Tensor, batch: Batch) -> tuple[dict[str, Tensor], int]:
        targets = batch["target"].numel()
        return {"loss": loss * targets}, targets

    def describe(self) -> dict[str, Any]:
        return self.corpus.manifest
