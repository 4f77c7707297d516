"""Perplexity of a causal language model on a text, by the protocol that the papers use.

The text is one stream of tokens, cut into non-overlapping windows of `block` tokens; the remainder
is dropped. No token is prepended to a window or the text, even if the tokenizer does so by default
(LLaMA's begins every text with <s>). Within a window each token but the first is predicted from
those before it, and

    perplexity = exp(mean over windows of the mean cross entropy of its block - 1 predictions)

Sums are kept per window in fp64, so the result does not depend on how windows are batched. The text
of WikiText-2 is the raw test split, the hub's rows joined by two newlines: with GPT-2's tokenizer
287,644 tokens, 280 windows of 1024.
"""

import hashlib
import io
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.support.errors import UserError, check_installed, first_line
from experiments.support.hub import load_dataset

WIKITEXT2 = "wikitext2"
REVISION = "b08601e04326c79dfdd32d625aee71d232d685c3"  # of WikiText on the hub
_LARGEST = math.log(sys.float_info.max)  # nats; a larger loss's perplexity overflows


@dataclass(frozen=True)
class Text:
    """A text to measure perplexity on, read on demand: `wikitext2` (from the hub) or a file,
    WikiText row by row as .parquet with a column `text` or as .raw, any other as UTF-8 text."""

    source: str

    @cached_property
    def content(self) -> str:
        """The text. Raises a `UserError` if it cannot be read."""
        path = Path(self.source)
        if self.source == WIKITEXT2 or path.suffix == ".parquet":
            check_installed("datasets", f"ppl={self.source} needs the library datasets", "hf")
        if self.source == WIKITEXT2:
            data = load_dataset("Salesforce/wikitext", "wikitext-2-raw-v1", REVISION)
            return "\n\n".join(data["test"]["text"])
        if not path.is_file():
            raise UserError(f"ppl={self.source} is no file; give a text file or wikitext2")
        try:
            if path.suffix == ".parquet":
                import pyarrow.parquet

                return "\n\n".join(pyarrow.parquet.read_table(path)["text"].to_pylist())
            text = path.read_bytes().decode()
        except Exception as error:  # Parquet's readers raise many kinds
            raise UserError(f"{path} cannot be read as text: {first_line(error)}") from error
        return "\n\n".join(raw_rows(text)) if path.suffix == ".raw" else text

    def identity(self) -> dict[str, str]:
        """Return what identifies the text: its revision on the hub, or the hash of any other."""
        if self.source == WIKITEXT2:
            return {"name": WIKITEXT2, "revision": REVISION}
        return {"sha256": hashlib.sha256(self.content.encode()).hexdigest()}


def raw_rows(text: str) -> list[str]:
    """The lines of a WikiText .raw file as the hub's rows; blank lines are empty strings."""
    return [line if line.strip() else "" for line in io.StringIO(text, newline="\n")]


def windows(tokens: Sequence[int], block: int) -> Tensor:
    """The stream `tokens` as non-overlapping windows, int64 [n, block]; an incomplete window at the
    end is dropped. Raises a `UserError` if there is no whole window."""
    count = len(tokens) // block
    if not count:
        raise UserError(
            f"the text has {len(tokens)} tokens, a window {block}: give a longer text or a smaller "
            "block_size"
        )
    return torch.tensor(tokens[: count * block], dtype=torch.int64).view(count, block)


@torch.no_grad()
def window_losses(
    model: nn.Module, stream: Tensor, batch: int, dtype: torch.dtype | None = None
) -> Tensor:
    """Mean cross entropy in nats of each window of `stream` [n, block]: [n] fp64, on the CPU.
    `model(input [B, T])` gives (logits [B, T, V], None); it is put into eval mode. dtype: of
    autocast; None computes in that of the weights."""
    device = next(model.parameters()).device
    model.eval()
    losses = []
    for part in stream.split(batch):
        inputs, targets = part[:, :-1].to(device), part[:, 1:].to(device)
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            logits, _ = model(inputs)
        for row, target in zip(logits, targets, strict=True):  # fp64 of one window at a time
            losses.append(F.cross_entropy(row.double(), target))
    return torch.stack(losses).cpu()


def perplexity(
    model: nn.Module, stream: Tensor, batch: int, dtype: torch.dtype | None = None
) -> dict[str, Any]:
    """`ppl` (inf if it overflows), `ppl_loss` (nats per token) and the counts behind them."""
    loss = float(window_losses(model, stream, batch, dtype).mean())
    count, block = stream.shape
    return {
        "ppl": math.inf if loss > _LARGEST else math.exp(loss),
        "ppl_loss": loss,
        "ppl_windows": count,
        "ppl_tokens": count * (block - 1),
        "ppl_block_size": block,
    }
