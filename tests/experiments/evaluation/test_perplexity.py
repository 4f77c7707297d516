"""The protocol: what the text is, which windows it gives, and what the number means."""

import math

import pytest
import torch
from torch import nn

from experiments.evaluation.perplexity import Text, perplexity, raw_rows, window_losses
from experiments.support.errors import UserError
from models.gpt2 import GPT, GPTConfig


class Fixed(nn.Module):
    """Gives every position the same logits."""

    def __init__(self, logits):
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, input):
        return self.logits.expand(*input.shape, -1), None


def stream(vocab_size, count, block, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (count, block), generator=generator)


def test_by_hand():
    """Probabilities 1/2, 1/4, 1/4: the first token of a window is given, not predicted. Uniform
    ones; and all of it on token 0 in a text of token 1, so that the loss is the gap in nats."""
    model = Fixed(torch.tensor([2.0, 1.0, 1.0]).log())
    data = torch.tensor([[2, 0, 0], [0, 1, 0]])  # costs in bits: 1 + 1 and 2 + 1
    losses = window_losses(model, data, batch=1) / math.log(2)
    torch.testing.assert_close(losses, torch.tensor([1.0, 1.5], dtype=torch.float64))
    assert perplexity(model, data, batch=1)["ppl"] == pytest.approx(2**1.25)
    found = perplexity(Fixed(torch.zeros(50257)), stream(50257, 3, 8), batch=2)
    assert found["ppl"] == pytest.approx(50257, rel=1e-13)
    assert (found["ppl_windows"], found["ppl_tokens"]) == (3, 21)
    for gap, expected in ((700.0, math.exp(700)), (710.0, math.inf)):
        found = perplexity(Fixed(torch.tensor([gap, 0.0])), torch.ones(2, 4, dtype=torch.int64), 2)
        assert found["ppl_loss"] == pytest.approx(gap)
        assert found["ppl"] == pytest.approx(expected, rel=1e-9)


def test_the_batch_does_not_matter():
    """Five windows in batches of 1, 2 (a smaller one last) and 3: the loss of each window."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=16, vocab_size=64, block_size=16))
    data = stream(64, 5, 16)
    expected = window_losses(model, data, batch=1)
    for batch in (2, 3):
        # Products of another size may add in another order: fp32, some ulps.
        torch.testing.assert_close(window_losses(model, data, batch), expected, rtol=1e-6, atol=0)


RAW = " \n = Title = \n \n First line . \n Second line . \n \n"
ROWS = ["", " = Title = \n", "", " First line . \n", " Second line . \n", ""]


def test_the_raw_file_and_the_hub_s_rows_are_the_same_text(tmp_path, monkeypatch):
    """The hub's at one revision; any other file is taken as it is, if it can be read."""
    import pyarrow
    import pyarrow.parquet

    assert raw_rows(RAW) == ROWS
    (tmp_path / "wiki.test.raw").write_text(RAW)
    pyarrow.parquet.write_table(pyarrow.table({"text": ROWS}), tmp_path / "test.parquet")
    joined = "\n\n = Title = \n\n\n\n\n First line . \n\n\n Second line . \n\n\n"
    for name in ("wiki.test.raw", "test.parquet"):
        assert Text(str(tmp_path / name)).content == joined
    asked = []
    monkeypatch.setattr(
        "experiments.evaluation.perplexity.load_dataset",
        lambda *given: asked.append(given) or {"test": {"text": ROWS}},
    )
    text = Text("wikitext2")
    assert text.content == joined
    [(name, config, revision)] = asked
    assert (name, config) == ("Salesforce/wikitext", "wikitext-2-raw-v1") and len(revision) == 40
    assert text.identity() == {"name": "wikitext2", "revision": revision}
    for name, content, message in (
        ("a.txt", "ein Wort\n\n\nnoch eins; Überschuß".encode(), None),
        ("missing.txt", None, r"ppl=.*missing\.txt is no file"),
        ("no.parquet", b"PAR", r"no\.parquet cannot be read as text: ArrowInvalid"),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        text = Text(str(tmp_path / name))
        if message is None:
            assert text.content == content.decode()
            continue
        with pytest.raises(UserError, match=message):
            _ = text.content
