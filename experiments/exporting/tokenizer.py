"""Converts the tokenizer of a finished run to transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from experiments.config.initial import HFConfig
from experiments.data.tokenizer import HFTokenizer, pretrained_tokenizer
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
    file = run.result["corpus"]["tokenizer"].get("file")
    if not isinstance(encoding, HFTokenizer):
        fast = Tokenizer.from_file(str(run.directory / file)) if file else _converted(encoding)
    else:
        fast = Tokenizer.from_str(encoding.text)
        if "[CLS]" in encoding.special_tokens:  # a BERT tokenizer
            roles = {f"{token[1:-1].lower()}_token": token for token in encoding.special_tokens}
    return PreTrainedTokenizerFast(
        tokenizer_object=fast, model_max_length=shape.block_size, **roles
    )


def _converted(encoding: tiktoken.Encoding) -> Any:
    """The `tokenizers.Tokenizer` of a tiktoken `Encoding`: same ids, the special tokens at the
    end."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    special = sorted(encoding._special_tokens, key=encoding._special_tokens.__getitem__)
    converter: Any = TikTokenConverter(pattern=encoding._pat_str, extra_special_tokens=special)
    converter.load_tiktoken_bpe = lambda _: encoding._mergeable_ranks  # instead of a file
    return converter.converted()
