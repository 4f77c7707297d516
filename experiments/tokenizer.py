"""Tokenizers, always as a tiktoken `Encoding` whose end-of-text token separates documents.

GPT-2's own vocabulary where it can be had; otherwise a byte-level BPE trained on the corpus by the
`tokenizers` library and kept in its `tokenizer.json` format, which transformers reads too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.errors import UserError

if TYPE_CHECKING:
    import tiktoken

END_OF_TEXT = "<|endoftext|>"
# GPT-2's split into words (Radford et al., 2019): merges never cross one of these pieces.
_WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def gpt2_encoding() -> tiktoken.Encoding:
    """GPT-2's vocabulary of 50257 tokens, from tiktoken's cache or the network."""
    import tiktoken

    try:
        return tiktoken.get_encoding("gpt2")
    except OSError as error:  # what a missing network raises, through `requests`
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

    if vocab_size < 257:
        raise UserError(
            f"data.vocab_size={vocab_size} is too small for a byte-level BPE: 256 bytes and the "
            "end-of-text token need 257"
        )
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
    byte_of = {character: byte for byte, character in enumerate(_byte_characters())}
    ranks = {bytes(byte_of[c] for c in token): rank for token, rank in vocabulary.items()}
    return tiktoken.Encoding(
        name=path.parent.name,
        pat_str=_WORDS,
        mergeable_ranks=ranks,
        special_tokens={END_OF_TEXT: len(ranks)},
    )


def _byte_characters() -> list[str]:
    """The character that stands for each byte in a byte-level `tokenizer.json`.

    A byte that prints in Latin-1 stands for itself; the others take, in order, the code points
    from 256 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = iter(range(256, 512))
    return [chr(byte if byte in printable else next(substitutes)) for byte in range(256)]
