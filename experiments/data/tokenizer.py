"""Tokenizers with the interface of tiktoken's `Encoding`; an end-of-text token separates documents.

There are GPT-2's own vocabulary, if it is cached or can be downloaded; a byte-level BPE or BERT's
WordPiece, trained on the corpus by the `tokenizers` library and kept in its `tokenizer.json`
format, which transformers can read; and the tokenizer of a transformers checkpoint.

Fine-tuning puts texts into one sequence with a model's special tokens (`Frame`).
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from experiments.support import hub
from experiments.support.checkpoint import read_sealed
from experiments.support.errors import UserError

if TYPE_CHECKING:
    import tiktoken
    from transformers import PreTrainedTokenizerBase


END_OF_TEXT = "<|endoftext|>"
# A checkpoint of transformers with a tokenizer has one of these.
FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_FURTHER = ("merges.txt", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
ALL_FILES = (*FILES, *_FURTHER)  # that a checkpoint's tokenizer may have
# BERT's special tokens; in a trained WordPiece their ids are 0 to 4.
PAD, UNK, CLS, SEP, MASK = SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
# GPT-2's split into words (Radford et al., 2019): merges never cross one of these pieces.
_WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def gpt2_encoding() -> tiktoken.Encoding:
    """GPT-2's vocabulary of 50257 tokens, from tiktoken's cache or the network."""
    import tiktoken

    try:
        return tiktoken.get_encoding("gpt2")
    except OSError as error:  # raised without a network, through `requests`
        raise UserError(
            f"GPT-2's vocabulary is not cached and could not be downloaded ({type(error).__name__})"
            ": set TIKTOKEN_CACHE_DIR to a folder that holds it, or pass data.tokenizer=bpe to "
            "train one on the corpus"
        ) from error


def train_bpe(documents: Iterable[str], vocab_size: int) -> str:
    """Train a byte-level BPE and return the text of its `tokenizer.json`.

    Tokens 0..255 are the bytes, so that every text can be encoded; then come the merges in the
    order they were learnt, and the end-of-text token is the last. A small corpus can give fewer
    than `vocab_size` tokens. The result depends on the documents alone.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer.to_str(pretty=True)


def load_bpe(path: Path) -> tiktoken.Encoding:
    """The `Encoding` of a `tokenizer.json` that `train_bpe` wrote."""
    import tiktoken

    vocabulary: dict[str, int] = json.loads(path.read_text(encoding="utf-8"))["model"]["vocab"]
    # A byte that prints in Latin-1 stands for itself; others are, in order, code points from 256.
    prints = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = iter(range(256, 512))
    byte_of = {chr(byte if byte in prints else next(substitutes)): byte for byte in range(256)}
    ranks = {bytes(byte_of[c] for c in token): rank for token, rank in vocabulary.items()}
    return tiktoken.Encoding(
        name=path.parent.name,
        pat_str=_WORDS,
        mergeable_ranks=ranks,
        special_tokens={END_OF_TEXT: len(ranks)},
    )


def train_wordpiece(documents: Iterable[str], vocab_size: int) -> str:
    """Train a WordPiece tokenizer like BERT-uncased's and return the text of its `tokenizer.json`.

    Text is lower-cased and loses its accents and its white space; punctuation stands alone. The
    special tokens are the ids 0 to 4. A character that is too rare for an entry of its own makes
    its word [UNK]; a small corpus can give fewer tokens. The result depends on the documents alone.
    """
    from tokenizers import BertWordPieceTokenizer, Tokenizer, models, normalizers, pre_tokenizers
    from tokenizers.trainers import WordPieceTrainer

    normalizer = normalizers.BertNormalizer(lowercase=True)
    split = pre_tokenizers.BertPreTokenizer()
    texts = [normalizer.normalize_str(document) for document in documents]
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    common = sorted((-count, c) for c, count in counts.items() if not c.isspace())
    alphabet = sorted(c for _, c in common[: min(1000, vocab_size // 8)])
    # The trainer breaks ties by ids. It assigns those of one-character pieces inside a word in an
    # order that differs between processes, unless the pieces are given.
    inner = [f"##{c}" for c in alphabet if len(split.pre_tokenize_str("a" + c)) == 1]
    trained = Tokenizer(models.WordPiece(unk_token=UNK))
    trained.pre_tokenizer = split
    trainer = WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=[*SPECIAL, *inner],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    trained.train_from_iterator(texts, trainer)
    # Build the tokenizer again, because these pieces must be special tokens only for the trainer.
    return BertWordPieceTokenizer(trained.get_vocab()).to_str(pretty=True)


class HFTokenizer:
    """A `tokenizer.json` with the part of tiktoken's interface that this project uses.

    revision: its commit, if it is from the hub.
    """

    def __init__(self, text: str, end_of_text: int, revision: str | None = None) -> None:
        from tokenizers import Tokenizer

        self.text, self.eot_token, self.revision = text, end_of_text, revision
        self.tokenizer = Tokenizer.from_str(text)
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.tokenizer.encode_special_tokens = True  # "[CLS]" in a text is encoded as text

    @property
    def n_vocab(self) -> int:
        """Number of tokens."""
        return max(self.tokenizer.get_vocab().values()) + 1

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """Ids of the special tokens by their texts, such as [CLS]; no text is encoded into them."""
        added = self.tokenizer.get_added_tokens_decoder().items()
        return {token.content: id for id, token in added if token.special}

    @property
    def fingerprint(self) -> str:
        """Hash of all that changes the tokens, 8 hex digits."""
        return hashlib.sha256(f"{self.eot_token} {self.text}".encode()).hexdigest()[:8]

    def encode_ordinary_batch(self, text: list[str], num_threads: int = 0) -> list[list[int]]:
        """Token ids of each document, without special tokens; threads are the library's choice."""
        encoded = self.tokenizer.encode_batch_fast(text, add_special_tokens=False)
        return [encoding.ids for encoding in encoded]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids."""
        return self.tokenizer.decode(list(tokens), skip_special_tokens=False)


Encoding: TypeAlias = "tiktoken.Encoding | HFTokenizer"


def check_vocabulary(highest: int, size: int) -> None:
    """Raise a `UserError` unless a vocabulary of `size` covers the token id `highest`."""
    if highest >= size:
        raise UserError(
            f"the tokenizer gives the id {highest}, but the model has {size} tokens: use the "
            "model's own tokenizer"
        )


def pretrained_tokenizer(folder: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a transformers checkpoint: a folder or `owner/name[@revision]`."""
    path = Path(folder)
    if not path.is_dir():
        if folder.count("/") != 1 or folder.startswith(("/", ".")):
            raise UserError(
                f"data.tokenizer={folder} is neither gpt2, bpe nor wordpiece, nor a folder, nor an "
                "owner/name on the hub"
            )
        path = hub.download(folder, (*ALL_FILES, "config.json"), "data.tokenizer")
    # transformers makes up an empty one if there is none.
    if not any((path / name).is_file() for name in FILES):
        raise UserError(
            f"{folder} holds no tokenizer ({', '.join(FILES)}): add the one that its model was "
            "trained with"
        )
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"no tokenizer can be read from {folder}: {reason}") from error


@cache
def folder_tokenizer(folder: str) -> HFTokenizer:
    """The tokenizer of a checkpoint (`pretrained_tokenizer`), or the file of a prepared corpus.

    Documents end with its end-of-text token, or with [SEP] if it has none.
    """
    if (manifest := Path(folder, "manifest.json")).is_file():
        record = read_sealed(manifest)["tokenizer"]
        if record["file"] is not None:
            text = Path(folder, record["file"]).read_text(encoding="utf-8")
            return HFTokenizer(text, record["end_of_text"])
    tokenizer: Any = pretrained_tokenizer(folder)
    end = tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    if not tokenizer.is_fast or end is None:
        raise UserError(
            f"the tokenizer in {folder} has no tokenizer.json form or no end-of-text token; "
            "pass data.tokenizer=bpe to train one on the corpus"
        )
    text = tokenizer.backend_tokenizer.to_str()
    return HFTokenizer(text, end, hub.commit(Path(tokenizer.name_or_path)))


# ---- texts as one sequence


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
    """`Frame.join` of each example, at most `max_length` tokens; the longer text is cut first."""
    columns = [encoding.encode_ordinary_batch(list(column)) for column in zip(*texts, strict=True)]
    encoded = []
    for parts in zip(*columns, strict=True):
        available = max_length - frame.special(len(parts))
        first, second = len(parts[0]), len(parts[1]) if len(parts) == 2 else 0
        first = min(first, max(available - second, available - available // 2))
        encoded.append(frame.join([parts[0][:first], *(p[: available - first] for p in parts[1:])]))
    return encoded
