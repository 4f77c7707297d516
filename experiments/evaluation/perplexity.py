"""Perplexity of a causal language model on a text, by the protocol that the papers use.

The text is one stream of tokens, cut into non-overlapping windows of `block` tokens; the remainder
is dropped. No token is prepended to a window or the text, even if the tokenizer does so by default
(LLaMA's begins every text with <s>). Within a window each token but the first is predicted from
those before it, and

    perplexity = exp(mean over windows of the mean cross entropy of its block - 1 predictions)

Sums are kept per window in fp64, so the result does not depend on how windows are batched. The text
of WikiText-2 is the raw test split, the hub's rows joined by two newlines: with GPT-2's tokenizer
287,644 tokens, 280 windows of 1024. To check these counts, run
`SPARSE24_WIKITEXT2=PATH python -m pytest tests/experiments/evaluation/test_perplexity.py` with the
path of wiki.test.raw or of the hub's .parquet.
"""

from __future__ import annotations

import hashlib
import io
import math
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.support.errors import UserError, check_installed

WIKITEXT2 = "wikitext2"
STDIN = "-"
_LARGEST = math.log(sys.float_info.max)  # nats; a larger loss's perplexity overflows
_HUB = ("Salesforce/wikitext", "wikitext-2-raw-v1/test-00000-of-00001.parquet")


@dataclass(frozen=True)
class Text:
    """A text to measure perplexity on, read on demand.

    source: `wikitext2` (from the hub, at `revision`), `-` (standard input) or a file: WikiText as
        .parquet with a column `text`, or as .raw, both row by row; any other file is UTF-8 text
        that is taken as it is.
    """

    source: str
    revision: str

    @cached_property
    def content(self) -> str:
        """The text. Raises a `UserError` if it cannot be read or is not UTF-8."""
        if self.source == WIKITEXT2:
            return "\n\n".join(_parquet_rows(_download(self.revision)))
        if self.source == STDIN:
            return _decoded(sys.stdin.buffer.read(), "standard input")
        path = Path(self.source)
        if not path.is_file():
            raise UserError(
                f"ppl={self.source} is no file; give a text file, - for standard input or wikitext2"
            )
        if path.suffix == ".parquet":
            return "\n\n".join(_parquet_rows(path))
        text = _decoded(path.read_bytes(), self.source)
        return "\n\n".join(raw_rows(text)) if path.suffix == ".raw" else text

    def identity(self) -> dict[str, str]:
        """Plain values that identify the text: its revision on the hub, or the hash of
        any other."""
        if self.source == WIKITEXT2:
            return {"name": WIKITEXT2, "revision": self.revision}
        return {"sha256": hashlib.sha256(self.content.encode()).hexdigest()}


def raw_rows(text: str) -> list[str]:
    """The lines of a WikiText .raw file in the form of the hub's rows: with their newline, and
    blank lines as empty strings."""
    return [line if line.strip() else "" for line in io.StringIO(text, newline="\n")]


def windows(tokens: Sequence[int], block: int) -> Tensor:
    """The stream `tokens` as non-overlapping windows, int64 [n, block]; an incomplete window at the
    end is dropped.

    Raises:
        UserError: there is no whole window, or a window has nothing to predict.
    """
    if block < 2:
        raise UserError(f"block_size={block}; a window needs at least 2 tokens")
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
    """Mean cross entropy in nats of each window: [n] fp64, on the CPU.

    Args:
        model: `model(input [B, T])` gives (logits [B, T, V], None). It is put into eval mode.
        stream: windows [n, block]. batch: windows per forward pass.
        dtype: of autocast; None computes in the dtype of the weights.
    """
    device = next(model.parameters()).device
    model.eval()
    losses = []
    for part in stream.split(batch):
        inputs, targets = part[:, :-1].to(device), part[:, 1:].to(device)
        with _autocast(device, dtype):
            logits, _ = model(inputs)
        for row, target in zip(logits, targets, strict=True):  # fp64 of one window at a time
            losses.append(F.cross_entropy(row.double(), target))
    return torch.stack(losses).cpu()


def perplexity(
    model: nn.Module, stream: Tensor, batch: int, dtype: torch.dtype | None = None
) -> dict[str, Any]:
    """`ppl` (inf if it overflows), `ppl_loss` (nats per token) and the counts behind them;
    arguments as for `window_losses`."""
    loss = float(window_losses(model, stream, batch, dtype).mean())
    count, block = stream.shape
    return {
        "ppl": math.inf if loss > _LARGEST else math.exp(loss),
        "ppl_loss": loss,
        "ppl_windows": count,
        "ppl_tokens": count * (block - 1),
        "ppl_block_size": block,
    }


def _autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def _download(revision: str) -> Path:
    need = "ppl=wikitext2 needs the hub's client, or the test split as a file, ppl=wiki.test.raw"
    check_installed("huggingface_hub", need, "hf")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    repository, file = _HUB
    try:
        path = hf_hub_download(repository, file, repo_type="dataset", revision=revision)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(
            f"{repository} at {revision} could not be downloaded ({type(error).__name__}); give "
            "the test split as a file: ppl=FILE with wiki.test.raw or the hub's .parquet"
        ) from error
    return Path(path)


def _parquet_rows(path: Path) -> list[str]:
    check_installed("pyarrow", f"reading {path} needs pyarrow", "hf")
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"{path} is not a Parquet file: {reason}") from error
    if "text" not in table.column_names:
        raise UserError(f"{path} has no column text, only {', '.join(table.column_names)}")
    rows = table.column("text").to_pylist()
    if not all(isinstance(row, str) for row in rows):
        raise UserError(f"the column text of {path} has rows without text; leave them out")
    return rows


def _decoded(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not UTF-8 text (byte {error.start})") from error
