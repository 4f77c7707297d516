"""Masked text for BERT, in batches for the trainer. Shapes: B sequences of T tokens.

A sample is a window of the corpus between [CLS] and [SEP]; a window may cross the ends of
documents, which are [SEP] tokens as well. A fixed number of its tokens is predicted, so that every
sample has the same weight in any micro-batch. A predicted token becomes [MASK] in 80 % of the cases
and another token in 10 %, and is unchanged in 10 % (Devlin et al., 2019, appendix A.1). Training
masks are new in every step; evaluation masks are fixed.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.data.corpus import CausalText, Corpus, check_fits
from experiments.data.manifest import DataConfig
from experiments.data.source import Batch, Request, sample_words
from experiments.data.tokenizer import CLS, MASK, PAD, SEP, HFTokenizer
from experiments.support.errors import UserError
from experiments.support.names import check_bounds
from models.bert import BertConfig

# Second words of the Philox keys; 0 and 1 are used for the windows (`CausalText.batch`).
_TRAIN_MASKS, _EVAL_MASKS = 2, 3
_PAIR_WORDS = 4  # random words of a sample for its two halves; then one for each token
_CHUNK = 2**24  # tokens counted at once
_LOW = np.uint64(2**32 - 1)


@dataclass(frozen=True)
class MLMConfig(DataConfig):
    """Settings of masked text: the corpus (`DataConfig`), and how many of its tokens are hidden, at
    most `max_predictions` of a sequence; conf/data/_mlm.yaml explains the others."""

    objective: str = "mlm"
    mask_probability: float = 0.15
    max_predictions: int | None = None
    next_sentence: bool = False
    sequence_length: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(
            self, "data.", mask_probability=(0.001, 0.999), max_predictions=(1, math.inf),
            sequence_length=(8, math.inf),
        )  # fmt: skip


def mask_tokens(
    tokens: np.ndarray, words: np.ndarray, count: int, special: np.ndarray, mask: int
) -> tuple[np.ndarray, np.ndarray]:
    """Choose `count` tokens of each row and hide them: (input, target), both [B, T] int64.

    A row's chosen tokens are those with the `count` smallest upper halves of their words. The lower
    half of a word decides what the token becomes. Rows of fewer ordinary tokens have fewer targets.

    Args:
        tokens: [B, T] int64. words: [B, T] uint64, random.
        special: [V] bool; such tokens are neither chosen nor replacements.
        mask: the id of [MASK].
    """
    eligible = ~special[tokens]
    rank = np.where(eligible, words >> np.uint64(32), _LOW + np.uint64(1))
    chosen = np.argsort(rank, axis=1, kind="stable")[:, :count]
    chosen_mask = np.zeros_like(eligible)
    np.put_along_axis(chosen_mask, chosen, True, axis=1)
    chosen_mask &= eligible
    # Taking remainders of 32-bit numbers has a bias below 2^-12 for these sizes.
    outcome, ordinary = (words & _LOW) % np.uint64(10), np.flatnonzero(~special)
    replacement = ordinary[(words & _LOW) // np.uint64(10) % np.uint64(len(ordinary))]
    hidden = np.select([outcome < 8, outcome == 8], [mask, replacement], tokens)
    return np.where(chosen_mask, hidden, tokens), np.where(chosen_mask, tokens, -1)


class MaskedText:
    """Batches of a corpus's windows with hidden tokens.

    Batches are {"input": [B, T], "target": [B, T]}, int64, with target -1 where nothing is
    predicted; with `next_sentence` also {"token_types": [B, T], "next_sentence": [B]}, as
    `BertLM.forward` describes them. A batch depends only on the corpus's seed, the step and the
    samples' indices; evaluation batches depend only on the data.
    """

    unit, one_shape = "tokens", True

    def __init__(self, corpus: Corpus, data: MLMConfig, model: BertConfig) -> None:
        block = data.sequence_length or model.block_size
        if block > model.block_size:
            raise UserError(
                f"data.sequence_length={block} is longer than model.block_size={model.block_size}"
            )
        if data.next_sentence != model.next_sentence:
            raise UserError(
                f"data.next_sentence={data.next_sentence} and model.next_sentence="
                f"{model.next_sentence} must agree; set one of them as the other"
            )
        check_fits(corpus, model.vocab_size, block)
        encoding = corpus.encoding
        ids = encoding.special_tokens if isinstance(encoding, HFTokenizer) else {}
        if missing := [name for name in (CLS, SEP, MASK, PAD) if name not in ids]:
            raise UserError(
                f"the tokenizer of {corpus.directory} has no {', '.join(missing)}: pass "
                "data.tokenizer=wordpiece"
            )
        self.corpus, self.pairs, self.tokens_per_sample = corpus, data.next_sentence, block
        self.directory, self.fingerprint = corpus.directory, corpus.fingerprint
        most = data.max_predictions or block
        self.predictions = min(most, max(1, round(data.mask_probability * block)))
        self.cls, self.sep, self.mask = ids[CLS], ids[SEP], ids[MASK]
        self.special = np.zeros(corpus.vocab_size, dtype=bool)
        self.special[list(ids.values())] = True
        self.window = block - (3 if self.pairs else 2)
        self.text = CausalText(corpus, self.window)
        self.eval_size = self.text.eval_size
        self.words = (_PAIR_WORDS + block + 3) // 4 * 4  # random ones of a sample

    def batches(self, requests: Iterable[Request]) -> Iterator[Batch]:
        for step, samples in requests:
            windows = self.text.batch("train", step, samples)
            key = (self.corpus.seed, _TRAIN_MASKS)
            words = sample_words(key, step, np.array(samples), self.words)
            yield self._batch("train", windows["input"].numpy(), words)

    def eval_batches(self, count: int, batch_size: int) -> Iterator[Batch]:
        windows = self.text.eval_batches(count, batch_size)
        words = sample_words((0, _EVAL_MASKS), 0, np.arange(count), self.words)
        both = zip(range(0, count, batch_size), windows, strict=True)
        return (self._batch("val", w["input"].numpy(), words[n : n + batch_size]) for n, w in both)

    def score(self, output: Any, loss: Tensor, batch: Batch) -> tuple[dict[str, Tensor], int]:
        """(sums over the predicted tokens, their number). The sums are `loss`, `accuracy` and, with
        `next_sentence`, the two parts of the loss, `mlm_loss` and `nsp_loss`."""
        target = batch["target"][batch["target"] != -1]
        right = (output.argmax(-1) == target).sum()
        sums = {"loss": loss * len(target), "accuracy": right}
        if self.pairs:
            sums["mlm_loss"] = F.cross_entropy(output.float(), target, reduction="sum")
            sums["nsp_loss"] = sums["loss"] - sums["mlm_loss"]
        return sums, len(target)

    def describe(self) -> dict[str, Any]:
        """The corpus's entry in `result.json`, with the loss of a model that sees no context."""
        return {**self.corpus.manifest, "unigram_entropy": unigram_entropy(self)}

    def _batch(self, split: str, windows: np.ndarray, words: np.ndarray) -> Batch:
        rows = len(windows)
        cls, sep = np.full((rows, 1), self.cls), np.full((rows, 1), self.sep)
        batch: dict[str, np.ndarray] = {}
        if self.pairs:
            half = self.window // 2
            first, second = windows[:, :half], windows[:, half:]
            elsewhere, text = words[:, 0] & np.uint64(1), CausalText(self.corpus, second.shape[1])
            places = np.uint64(len(self.corpus.tokens[split]) - second.shape[1])
            starts = (words[:, 1] % places).astype(np.int64)
            others = text.windows(split, starts)["input"].numpy()
            second = np.where(elsewhere[:, None] == 1, others, second)
            tokens = np.concatenate([cls, first, sep, second, sep], axis=1)
            types = np.arange(self.tokens_per_sample) >= half + 2
            batch["token_types"] = np.tile(types.astype(np.int64), (rows, 1))
            batch["next_sentence"] = elsewhere.astype(np.int64)
        else:
            tokens = np.concatenate([cls, windows, sep], axis=1)
        own = words[:, _PAIR_WORDS : _PAIR_WORDS + self.tokens_per_sample]
        batch["input"], batch["target"] = mask_tokens(
            tokens, own, self.predictions, self.special, self.mask
        )
        return {name: torch.from_numpy(array) for name, array in batch.items()}


def unigram_entropy(source: MaskedText) -> float:
    """The cross entropy in nats of a predicted validation token under the training split's counts.

    A model that knows only the frequency of each token reaches this loss; a training that stays
    above it has not learnt to use the context. Special tokens, which are never predicted, are left
    out. One is added to each count, so that none is 0.
    """
    counts = {}
    for split, tokens in source.corpus.tokens.items():
        pieces = (tokens[i : i + _CHUNK] for i in range(0, len(tokens), _CHUNK))
        total = sum(np.bincount(piece, minlength=len(source.special)) for piece in pieces)
        counts[split] = np.asarray(total)[~source.special]
    seen = counts["train"] + 1
    return float(counts["val"] @ -np.log(seen / seen.sum()) / counts["val"].sum())
