"""Memory-mapped token corpora, and the windows of tokens that training and evaluation take from
them.

Shapes: B sequences of T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from experiments.data.corpus_source import EMBEDDED, NUMBERS
from experiments.data.manifest import (
    SPLITS,
    TRAINED,
    DataConfig,
    check_files,
    fingerprint,
    load_encoding,
    read_manifest,
    token_type,
)
from experiments.data.order import Order, Part
from experiments.data.prepare import prepare
from experiments.data.tokenizer import HFTokenizer
from experiments.support.errors import UserError

if TYPE_CHECKING:
    import tiktoken

CALIBRATION = 2**40  # the step number of calibration samples, which training never reaches


class TokenFiles:
    """Several arrays read as if concatenated: `files[first:last]` is a slice of all of them."""

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self.arrays = arrays
        self.ends = np.cumsum([len(part) for part in arrays])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, entries: slice) -> np.ndarray:
        first, last, _ = entries.indices(len(self))
        pieces = [self.arrays[0][:0]]
        for index in range(int(np.searchsorted(self.ends, first, side="right")), len(self.ends)):
            begin = int(self.ends[index]) - len(self.arrays[index])
            if begin >= last:
                break
            pieces.append(self.arrays[index][max(0, first - begin) : last - begin])
        return pieces[1] if len(pieces) == 2 else np.concatenate(pieces)


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus, or a mixture of several, memory-mapped. `seed` only chooses the training
    windows. order: the order of the training windows; None = drawn with replacement."""

    directory: Path
    manifest: dict[str, Any]
    tokens: Mapping[str, np.ndarray | TokenFiles]  # split -> [tokens] uint16 or uint32
    seed: int
    order: Order | None = None

    @property
    def vocab_size(self) -> int:
        """The number of tokens of the tokenizer; every token id is below it."""
        return self.manifest["tokenizer"]["vocab_size"]

    @property
    def fingerprint(self) -> str:
        """Hash of the tokens of both splits and of the tokenizer."""
        return fingerprint(self.manifest)

    @cached_property
    def encoding(self) -> tiktoken.Encoding | HFTokenizer:
        """The tokenizer of the corpus."""
        return load_encoding(self.directory, self.manifest["tokenizer"])

    def batch(
        self, split: str, step: int, sequences: slice | Sequence[int], block: int
    ) -> dict[str, Tensor]:
        """Windows of `block` tokens: {"input": [B, T], "target": [B, T]}, int64, where the targets
        are shifted by one.

        Training windows follow `order`. Without an order, and for calibration, they are drawn
        uniformly with replacement. `sequences` are indices into the global batch of the optimizer
        step. A window's position depends only on (seed, split, step, index), so ranks,
        micro-batches and a resumed run that ask for parts of the batch get what one process would
        get.
        """
        if isinstance(sequences, slice):
            sequences = range(sequences.start or 0, sequences.stop, sequences.step or 1)
        indices = np.asarray(sequences, dtype=np.int64)
        if self.order is not None and split == "train" and step < self.order.steps:
            return self.windows(split, self.order.starts(step, indices, block), block)
        positions = len(self.tokens[split]) - block
        words = np.random.Philox(
            key=np.array([self.seed, SPLITS.index(split)], dtype=np.uint64),
            counter=np.array([0, step, 0, 0], dtype=np.uint64),
        ).random_raw(int(indices.max()) + 1)
        # 64 bits against at most 2^34 positions: the bias of the remainder is below 2^-30.
        return self.windows(split, (words[indices] % np.uint64(positions)).astype(np.int64), block)

    def describe(self, block: int) -> dict[str, Any]:
        """The manifest and, for training in epochs, the number of epochs of each part."""
        if self.order is None:
            return self.manifest
        return {**self.manifest, "epochs": self.order.epochs(block)}

    def eval_size(self, block: int) -> int:
        """Number of non-overlapping windows of `block` tokens in the validation split."""
        return (len(self.tokens["val"]) - 1) // block

    def eval_batches(
        self, n_sequences: int | None, batch_size: int, block: int
    ) -> Iterator[dict[str, Tensor]]:
        """The fixed evaluation windows: non-overlapping, evenly spaced over the validation split.

        They depend only on `n_sequences` and `block`; None takes every window that fits. The last
        batch may be smaller, so weight an average over batches by their sizes.
        """
        available = self.eval_size(block)
        count = available if n_sequences is None else n_sequences
        if not 1 <= count <= available:
            raise UserError(
                f"{count} evaluation sequences of {block} tokens asked for, but the validation "
                f"split of {self.directory} holds {available}: set train.eval_samples to 1 to "
                f"{available}"
            )
        starts = np.arange(count, dtype=np.int64) * available // count * block
        return (
            self.windows("val", starts[first : first + batch_size], block)
            for first in range(0, count, batch_size)
        )

    def windows(self, split: str, starts: np.ndarray, block: int) -> dict[str, Tensor]:
        """The windows that start at these positions of the split, in the form of `batch`."""
        tokens = self.tokens[split]
        rows = np.stack([tokens[start : start + block + 1] for start in starts])
        windows = torch.from_numpy(rows.astype(np.int64))
        return {"input": windows[:, :-1].contiguous(), "target": windows[:, 1:].contiguous()}


def load_tokens(config: DataConfig, seed: int, before: np.ndarray | None = None) -> Corpus:
    """The corpus of `config`, or the concatenated parts of a mixture, memory-mapped. The files are
    first checked against their manifests (`check_files`).

    The embedded corpus is prepared if it is missing, which takes some seconds; if several processes
    do so at once, the first to finish wins.

    Args:
        before: samples before each step and in total, [steps + 1], for a training in epochs.
    """
    if seed < 0:
        raise UserError(f"seed={seed} must not be negative")
    for corpus in config.corpora:
        if corpus.source in (EMBEDDED, NUMBERS) and not corpus.directory.exists():
            prepare(corpus)
    manifest = read_manifest(config)
    files: dict[str, list[np.ndarray]] = {split: [] for split in manifest["splits"]}
    parts: list[Part] = []
    weights = config.weights or (1.0,)
    for corpus, weight in zip(config.corpora, weights, strict=True):
        own = read_manifest(corpus)
        check_files(corpus, own)
        dtype = token_type(own["tokenizer"]["vocab_size"])
        for split in files:
            record = own["splits"][split]
            files[split] += [
                np.memmap(corpus.directory / shard["file"], dtype=dtype, mode="r")
                for shard in record.get("shards", [record])
            ]
        first = sum(part.tokens for part in parts)
        parts.append(Part(corpus.name, first, sum(map(len, files["train"])) - first, weight))
    tokens = {
        s: arrays[0] if len(arrays) == 1 else TokenFiles(arrays) for s, arrays in files.items()
    }
    order = None
    if before is not None and config.order == "epochs":
        order = Order(seed, parts, before)
    return Corpus(config.directory, manifest, tokens, seed, order)


def check_fits(corpus: Corpus, vocab_size: int, block_size: int) -> None:
    """Raise a `UserError` unless a model of this vocabulary and context can train on the corpus."""
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
    for part in corpus.order.parts if corpus.order is not None else ():
        if not part.windows(block_size):
            raise UserError(
                f"{part.name} has {part.tokens} tokens for training, a window needs "
                f"{block_size + 1}: leave it out of the mixture"
            )
