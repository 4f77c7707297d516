"""Converts the tokenizer of a finished run to transformers."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from experiments.config.initial import HFConfig
from experiments.data.tokenizer import HFTokenizer, byte_characters, pretrained_tokenizer
from experiments.runs.finished import FinishedRun
from models.vit import ViT

if TYPE_CHECKING:
    import tiktoken
    from transformers import PreTrainedTokenizerBase


def tokenizer_of(run: FinishedRun, model: nn.Module) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a run in transformers' form; None for a run on images, and for a checkpoint
    of transformers that came without one."""
    if isinstance(model, ViT):
        return None
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    if isinstance(run.shape, HFConfig):
        if not run.shape.has_tokenizer:
            return None
        return pretrained_tokenizer(str(run.shape.folder))
    encoding, shape = run.tokenizer(), getattr(model, "config", model)
    roles = {"bos_token": encoding.decode([encoding.eot_token])}
    roles["eos_token"] = roles["bos_token"]
    if not isinstance(encoding, HFTokenizer):
        fast = byte_level_tokenizer(encoding)
    else:
        fast = Tokenizer.from_str(encoding.text)
        if "[CLS]" in encoding.special_tokens:  # a BERT tokenizer
            roles = {f"{token[1:-1].lower()}_token": token for token in encoding.special_tokens}
    return PreTrainedTokenizerFast(
        tokenizer_object=fast, model_max_length=shape.block_size, **roles
    )


def byte_level_tokenizer(encoding: tiktoken.Encoding) -> Any:
    """The `tokenizers.Tokenizer` of a tiktoken `Encoding`: same ids, one special token at the end.

    tiktoken keeps the rank of every token, `tokenizers` the merges that lead to them: a token's
    last merge joins the two parts that remain when only lower ranks are applied to its bytes.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    ranks: dict[bytes, int] = encoding._mergeable_ranks
    characters = byte_characters()

    def spelled(token: bytes) -> str:
        return "".join(characters[byte] for byte in token)

    parts = (_last_parts(t, ranks) for t in sorted(ranks, key=ranks.__getitem__) if len(t) > 1)
    merges = [(spelled(left), spelled(right)) for left, right in parts]
    tokenizer = Tokenizer(
        models.BPE(vocab={spelled(t): r for t, r in ranks.items()}, merges=merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(encoding._pat_str), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = sorted(encoding._special_tokens, key=encoding._special_tokens.__getitem__)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    return tokenizer


def _last_parts(token: bytes, ranks: Mapping[bytes, int]) -> list[bytes]:
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pairs = [ranks.get(a + b, len(ranks)) for a, b in itertools.pairwise(parts)]
        first = pairs.index(min(pairs))
        parts[first : first + 2] = [parts[first] + parts[first + 1]]
    return parts
