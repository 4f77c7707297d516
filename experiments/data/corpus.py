"""Memory-mapped token corpora, the windows of tokens that training and evaluation take from them,
and batches of these for causal language models.

Shapes: B sequences of T tokens.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.data.manifest import (
    EMBEDDED,
    NUMBERS,
    SPLITS,
    TRAINED,
    DataConfig,
    check_files,
    fingerprint,
    load_encoding,
    read_manifest,
    token_type,
)
from experiments.data.prepare import prepare
from experiments.data.source import Batch, Request, evenly_spaced, sample_words
from experiments.data.tokenizer import Encoding
from experiments.support.errors import UserError

CALIBRATION = 2**40  # the step number of calibration samples, which training never reaches


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus, memory-mapped. `seed` only chooses the training windows."""

    directory: Path
    manifest: dict[str, Any]
    tokens: Mapping[str, np.ndarray]  # split -> [tokens] uint16 or uint32
    seed: int

    @property
    def vocab_size(self) -> int:
        """The number of tokens of the tokenizer; every token id is below it."""
        return self.manifest["tokenizer"]["vocab_size"]

    @property
    def fingerprint(self) -> str:
        """Hash of the tokens of both splits and of the tokenizer."""
        return fingerprint(self.manifest)

    @cached_property
    def encoding(self) -> Encoding:
        """The tokenizer of the corpus."""
        return load_encoding(self.directory, self.manifest["tokenizer"])


def load_tokens(config: DataConfig, seed: int) -> Corpus:
    """The corpus of `config`, memory-mapped. Its files are first checked against its manifest.

    The embedded corpus is prepared if it is missing; of several processes the first one wins.
    """
    if config.source in (EMBEDDED, NUMBERS) and not config.directory.exists():
        prepare(config)
    manifest = read_manifest(config)
    check_files(config, manifest)
    dtype = token_type(manifest["tokenizer"]["vocab_size"])
    tokens = {
        split: np.memmap(config.directory / record["file"], dtype=dtype, mode="r")
        for split, record in manifest["splits"].items()
    }
    return Corpus(config.directory, manifest, tokens, seed)


def check_fits(corpus: Corpus, vocab_size: int, block_size: int = 0) -> None:
    """Raise a `UserError` unless a model of this vocabulary and window can train on the corpus."""
    if corpus.vocab_size > vocab_size:
        kind = corpus.manifest["tokenizer"]["kind"]
        raise UserError(
            f"the corpus {corpus.directory} has {corpus.vocab_size} token ids, the model only "
            f"{vocab_size}: set model.vocab_size to {math.ceil(corpus.vocab_size / 64) * 64}, or "
            f"train a smaller tokenizer with data.tokenizer={kind if kind in TRAINED else 'bpe'} "
            f"data.vocab_size={vocab_size}"
        )
    for split in SPLITS:
        if len(corpus.tokens[split]) < block_size + 1:
            raise UserError(
                f"the {split} split of {corpus.directory} has {len(corpus.tokens[split])} tokens, "
                f"a window needs {block_size + 1}: use a larger corpus or a smaller "
                "model.block_size"
            )


class CausalText:
    """Batches of windows of `block` tokens; the target of each token is the next one.

    Batches are {"input": [B, T], "target": [B, T]}, int64.
    """

    unit, one_shape = "tokens", True

    def __init__(self, corpus: Corpus, block: int) -> None:
        self.corpus, self.tokens_per_sample = corpus, block
        self.directory, self.fingerprint = corpus.directory, corpus.fingerprint
        self.eval_size = (len(corpus.tokens["val"]) - 1) // block  # windows without overlap

    def batches(self, requests: Iterable[Request]) -> Iterator[Batch]:
        for step, samples in requests:
            yield self.batch("train", step, samples)

    def batch(self, split: str, step: int, samples: Sequence[int]) -> Batch:
        """Windows drawn uniformly with replacement, whose positions depend only on (seed, split,
        step, sample): ranks, micro-batches and a resumed run that ask for parts of a step's batch
        get what one process would get."""
        key = self.corpus.seed, SPLITS.index(split)
        words = sample_words(key, step, np.asarray(samples, dtype=np.int64), 1)[:, 0]
        # 64 bits against at most 2^34 positions: the bias of the remainder is below 2^-30.
        starts = words % np.uint64(len(self.corpus.tokens[split]) - self.tokens_per_sample)
        return self.windows(split, starts.astype(np.int64))

    def eval_batches(self, count: int, batch_size: int) -> Iterator[Batch]:
        """Fixed windows without overlap, evenly spaced over the validation split. The last batch
        may be smaller, so weight an average over batches by their sizes."""
        parts = evenly_spaced(count, batch_size, self.eval_size, self.directory)
        return (self.windows("val", part * self.tokens_per_sample) for part in parts)

    def windows(self, split: str, starts: np.ndarray) -> Batch:
        """The windows that start at these positions of the split."""
        tokens, length = self.corpus.tokens[split], self.tokens_per_sample + 1
        rows = np.stack([tokens[start : start + length] for start in starts])
        windows = torch.from_numpy(rows.astype(np.int64))
        return {"input": windows[:, :-1].contiguous(), "target": windows[:, 1:].contiguous()}

    def score(self, output: Any, loss: Tensor, batch: Batch) -> tuple[dict[str, Tensor], int]:
        targets = batch["target"].numel()
        return {"loss": loss * targets}, targets

    def describe(self) -> dict[str, Any]:
        return self.corpus.manifest
