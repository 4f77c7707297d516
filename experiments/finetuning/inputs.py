"""Texts as sequences of tokens with a model's special tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from experiments.data.tokenizer import CLS, PAD, SEP, HFTokenizer
from experiments.support.errors import UserError

if TYPE_CHECKING:
    import tiktoken

    Encoding = tiktoken.Encoding | HFTokenizer


@dataclass(frozen=True)
class Frame:
    """The special tokens with which texts become one sequence.

    BERT: [CLS] a [SEP] b [SEP], where the second text and its [SEP] have type 1. Causal models: a b
    with nothing between them, as in transformers for GPT-2 and in FST's and S-STE's runs. `pad`
    fills the end of shorter sequences, which no model attends to.
    """

    start: tuple[int, ...]
    between: tuple[int, ...]
    end: tuple[int, ...]
    pad: int

    @classmethod
    def of(cls, encoding: Encoding) -> Frame:
        """The frame of the models that a tokenizer is made for."""
        special = encoding.special_tokens if isinstance(encoding, HFTokenizer) else {}
        if CLS in special:
            if missing := [name for name in (SEP, PAD) if name not in special]:
                raise UserError(f"the tokenizer has {CLS}, but no {', '.join(missing)}")
            separator = (special[SEP],)
            return cls((special[CLS],), separator, separator, special[PAD])
        return cls((), (), (), encoding.eot_token)

    def special(self, texts: int) -> int:
        """The number of special tokens in a sequence of so many texts."""
        return len(self.start) + (texts - 1) * len(self.between) + len(self.end)

    def join(self, texts: Sequence[Sequence[int]]) -> tuple[list[int], int]:
        """(ids of one sequence, never empty; index of its first token of type 1)."""
        first = [*self.start, *texts[0]]
        if len(texts) == 1:
            ids = [*first, *self.end] or [self.pad]
            return ids, len(ids)
        first += self.between
        return [*first, *texts[1], *self.end] or [self.pad], len(first)


def encode(
    encoding: Encoding, frame: Frame, texts: Sequence[tuple[str, ...]], max_length: int
) -> list[tuple[list[int], int]]:
    """`Frame.join` of each example, with at most `max_length` tokens; of two texts the longer one
    is cut first."""
    columns = [encoding.encode_ordinary_batch(list(column)) for column in zip(*texts, strict=True)]
    encoded = []
    for parts in zip(*columns, strict=True):
        available = max_length - frame.special(len(parts))
        first, second = len(parts[0]), len(parts[1]) if len(parts) == 2 else 0
        first = min(first, max(available - second, available - available // 2))
        encoded.append(frame.join([parts[0][:first], *(p[: available - first] for p in parts[1:])]))
    return encoded
