"""Pairs of sentences in batches. Shapes: B pairs, S source tokens, T target tokens.

A sample is a bundle of pairs of similar length, as many as fit into `data.batch_tokens` with their
padding. Each epoch has every pair once: pairs of equal length are shuffled, and then the bundles.
The number of bundles depends only on the lengths.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.data.corpus import Corpus, check_fits
from experiments.data.parallel import PairsConfig
from experiments.data.source import Batch, Request, evenly_spaced, random_words
from experiments.support.errors import UserError
from models.transformer import TransformerConfig

# Second words of the Philox keys; 0 to 3 are used for windows and masks.
_PAIRS, _BUNDLES = 4, 5
_EIGHT = 8  # larger bundles have a multiple of this many pairs, which suits matrix units


class Sentences:
    """The sentences of a split: alternating source and target, each with its end-of-text token."""

    def __init__(self, tokens: np.ndarray, end: int) -> None:
        self.tokens, self.end = tokens[:], end
        self.ends = np.flatnonzero(self.tokens == end) + 1  # after the end-of-text token
        self.lengths = np.diff(self.ends, prepend=0).reshape(-1, 2)  # of [source, target]

    def __len__(self) -> int:
        return len(self.lengths)

    def rows(self, pairs: Sequence[int] | np.ndarray, side: int) -> list[np.ndarray]:
        """The tokens, with end-of-text, of the sources (side 0) or targets (1) of some pairs."""
        last = self.ends[2 * np.asarray(pairs) + side]
        lengths = self.lengths[np.asarray(pairs), side]
        return [self.tokens[e - n : e] for e, n in zip(last, lengths, strict=True)]


def padded(rows: list[np.ndarray], fill: int) -> Tensor:
    """The rows as one int64 tensor [rows, longest], padded with `fill` at the end."""
    array = np.full((len(rows), max(map(len, rows))), fill, dtype=np.int64)
    for place, row in zip(array, rows, strict=True):
        place[: len(row)] = row
    return torch.from_numpy(array)


def cut(longest: np.ndarray, tokens: int) -> np.ndarray:
    """Boundaries of bundles of pairs, as int64 indices. The pairs are sorted by `longest`, the
    length of the longer sentence; a padded bundle has at most `tokens` on either side."""
    starts = [0]
    while (first := starts[-1]) < len(longest):
        some = longest[first : first + tokens // int(longest[first])]
        sizes = some * np.arange(1, len(some) + 1)  # padded size of a bundle ending with each pair
        number = int(np.searchsorted(sizes, tokens, side="right"))
        starts.append(first + (number // _EIGHT * _EIGHT or number))
    return np.array(starts)


class TranslationPairs:
    """Batches of sentence pairs (see experiments/data/source.py); a sample is a bundle of them.

    Batches are {"source": [B, S], "source_mask": [B, S], "input": [B, T], "target": [B, T]}, int64;
    `input` begins with the end-of-text token, and `target` is -1 after its end. In training there
    is also the scalar "target_tokens", by which the summed loss is divided: the step's target
    tokens times the micro-batch's share of its bundles, so that the mean over micro-batches is the
    mean over the step's tokens.

    Args:
        batch_size: bundles per optimizer step.
    """

    unit, one_shape = "tokens", False

    def __init__(
        self, corpus: Corpus, data: PairsConfig, model: TransformerConfig, batch_size: int
    ) -> None:
        check_fits(corpus, model.vocab_size)
        self.corpus, self.batch_size = corpus, batch_size
        self.directory, self.fingerprint = corpus.directory, corpus.fingerprint
        self.end: int = corpus.manifest["tokenizer"]["end_of_text"]
        limit = min(data.max_tokens or model.block_size, model.block_size, data.batch_tokens)
        self._order = lru_cache(maxsize=2)(self._epoch)  # a step may have parts of two epochs
        self.train, self.val = (
            ShortPairs(Sentences(corpus.tokens[split], self.end), limit, data.batch_tokens)
            for split in ("train", "val")
        )
        for name, split in (("train", self.train), ("val", self.val)):
            if not len(split.pairs):
                raise UserError(
                    f"no pair of the {name} split of {self.directory} has at most {limit} "
                    "tokens in either language; set data.max_tokens higher"
                )

    @cached_property
    def tokens_per_sample(self) -> int:
        """The mean number of tokens of a bundle with its padding: pairs times longest sentence."""
        starts, longest = self.train.starts, self.train.longest
        return round(float(np.mean(np.diff(starts) * longest[starts[1:] - 1])))

    def batches(self, requests: Iterable[Request]) -> Iterator[Batch]:
        for step, samples in requests:
            numbers = [step * self.batch_size + index for index in range(self.batch_size)]
            bundles = [self._bundle(number) for number in numbers]
            total = sum(int(self.train.sentences.lengths[b, 1].sum()) for b in bundles)
            chosen = np.concatenate([bundles[index] for index in samples])
            batch = self._batch(self.train.sentences, chosen)
            share = total * len(samples) / self.batch_size
            yield {**batch, "target_tokens": torch.tensor(share, dtype=torch.float32)}

    def _bundle(self, number: int) -> np.ndarray:
        """The indices of the pairs in bundle `number`, counted over all epochs of a training."""
        epoch, place = divmod(number, len(self.train.starts) - 1)
        order, bundles = self._order(epoch)
        first, last = self.train.starts[bundles[place] : bundles[place] + 2]
        return order[first:last]

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The pairs sorted by length, in random order among equals; a random order of bundles."""
        split, seed, at = self.train, self.corpus.seed, (0, epoch, 0, 0)
        keys = random_words((seed, _PAIRS), at, len(split.pairs))
        order = np.lexsort((keys, split.lengths[:, 0], split.lengths[:, 1], split.longest))
        bundles = random_words((seed, _BUNDLES), at, len(split.starts) - 1)
        return split.pairs[order], np.argsort(bundles, kind="stable")

    @property
    def eval_size(self) -> int:
        return len(self.val.starts) - 1

    def eval_batches(self, count: int, batch_size: int) -> Iterator[Batch]:
        """`count` bundles of the validation split, evenly spaced over their lengths."""
        parts, val = evenly_spaced(count, batch_size, self.eval_size, self.directory), self.val
        bundles = ([val.pairs[slice(*val.starts[i : i + 2])] for i in part] for part in parts)
        return (self._batch(val.sentences, np.concatenate(several)) for several in bundles)

    def score(self, output: Any, loss: Tensor, batch: Batch) -> tuple[dict[str, Tensor], int]:
        targets = int((batch["target"] != -1).sum())
        return {"loss": loss * targets}, targets

    def describe(self) -> dict[str, Any]:
        """The corpus's entry in `result.json`, with the numbers of bundles per epoch and of
        training pairs left out as too long or empty."""
        left_out = len(self.train.sentences) - len(self.train.pairs)
        return {**self.corpus.manifest, "bundles": len(self.train.starts) - 1, "left_out": left_out}

    def _batch(self, sentences: Sentences, pairs: np.ndarray) -> Batch:
        sources, targets = sentences.rows(pairs, 0), sentences.rows(pairs, 1)
        source, target = padded(sources, self.end), padded(targets, -1)
        lengths = torch.tensor([[len(row)] for row in sources])
        before = torch.full((len(pairs), 1), self.end)
        return {
            "source": source,
            "source_mask": (torch.arange(source.shape[1]) < lengths).long(),
            "input": torch.cat([before, target.where(target != -1, self.end)[:, :-1]], 1),
            "target": target,
        }


class ShortPairs:
    """The pairs of a split that are short enough, sorted by their longer sentence, then by target
    and source, and the boundaries `starts` of their bundles of so many tokens."""

    def __init__(self, sentences: Sentences, limit: int, tokens: int) -> None:
        lengths = sentences.lengths
        kept = np.flatnonzero((lengths.max(1) <= limit) & (lengths.min(1) > 1))
        order = np.lexsort((lengths[kept, 0], lengths[kept, 1], lengths[kept].max(1)))
        self.sentences, self.pairs = sentences, kept[order]
        self.lengths = lengths[self.pairs]
        self.longest = self.lengths.max(1)
        self.starts = cut(self.longest, tokens)
