"""The protocol: what the text is, which windows it gives, and what the number means."""

import io
import math
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from experiments.data.tokenizer import gpt2_encoding, load_bpe, train_bpe
from experiments.evaluation.perplexity import Text, perplexity, raw_rows, window_losses, windows
from experiments.support.errors import UserError
from models.gpt2 import GPT, GPTConfig

REVISION = "0" * 40


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


# ---------------------------------------------------------------- the number


@pytest.mark.parametrize("vocab_size", [1, 7, 50257])
def test_uniform_logits_give_the_size_of_the_vocabulary(vocab_size):
    found = perplexity(Fixed(torch.zeros(vocab_size)), stream(vocab_size, 3, 8), batch=2)
    assert found["ppl"] == pytest.approx(vocab_size, rel=1e-13)
    assert (found["ppl_windows"], found["ppl_tokens"]) == (3, 21)


def test_by_hand():
    """Probabilities 1/2, 1/4, 1/4: the first token of a window is given, not predicted."""
    model = Fixed(torch.tensor([2.0, 1.0, 1.0]).log())
    data = torch.tensor([[2, 0, 0], [0, 1, 0]])  # costs in bits: 1 + 1 and 2 + 1
    losses = window_losses(model, data, batch=1) / math.log(2)
    torch.testing.assert_close(losses, torch.tensor([1.0, 1.5], dtype=torch.float64))
    assert perplexity(model, data, batch=1)["ppl"] == pytest.approx(2**1.25)


@pytest.mark.parametrize(("gap", "expected"), [(700.0, math.exp(700)), (710.0, math.inf)])
def test_a_perplexity_that_is_no_float_is_infinite(gap, expected):
    """All probability is on token 0, the text is of token 1: the loss is the gap, in nats."""
    found = perplexity(Fixed(torch.tensor([gap, 0.0])), torch.ones(2, 4, dtype=torch.int64), 2)
    assert found["ppl_loss"] == pytest.approx(gap)
    assert found["ppl"] == pytest.approx(expected, rel=1e-9)


def test_the_perplexity_of_a_broken_model_is_no_number():
    found = perplexity(Fixed(torch.tensor([math.nan, 0.0])), torch.ones(1, 4, dtype=torch.int64), 1)
    assert math.isnan(found["ppl"])


def test_the_mean_of_the_model_s_own_loss():
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=16, vocab_size=64, block_size=16)).eval()
    data = stream(64, 5, 16)
    with torch.no_grad():
        own = [float(model(w[None, :-1], w[None, 1:])[1]) for w in data]
    found = perplexity(model, data, batch=5)
    assert found["ppl_loss"] == pytest.approx(sum(own) / 5, rel=1e-6)
    assert found["ppl"] == math.exp(found["ppl_loss"])


def test_the_batch_does_not_matter():
    """Five windows in batches of 1, 2 (a smaller one last), 3 and 5: the loss of each window."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=16, vocab_size=64, block_size=16))
    data = stream(64, 5, 16)
    expected = window_losses(model, data, batch=1)
    for batch in (2, 3, 5):
        # Products of another size may add in another order: fp32, some ulps.
        torch.testing.assert_close(window_losses(model, data, batch), expected, rtol=1e-6, atol=0)
    fixed = Fixed(torch.randn(64, generator=torch.Generator().manual_seed(1)))
    values = {perplexity(fixed, data, batch)["ppl"] for batch in (1, 2, 3, 5)}
    assert len(values) == 1  # where the logits are equal bit by bit, so is the result


def test_a_model_in_training_is_evaluated_without_dropout():
    torch.manual_seed(0)
    config = GPTConfig(n_layer=1, n_head=2, n_embd=16, vocab_size=64, block_size=16, dropout=0.5)
    model, data = GPT(config), stream(64, 2, 16)
    assert perplexity(model, data, 2) == perplexity(model, data, 2)


def test_autocast_is_asked_for():
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=16, vocab_size=64, block_size=16))
    data = stream(64, 2, 16)
    exact = perplexity(model, data, 2)["ppl_loss"]
    rounded = perplexity(model, data, 2, torch.bfloat16)["ppl_loss"]
    assert rounded != exact and rounded == pytest.approx(exact, rel=2**-8)


# ---------------------------------------------------------------- the windows


def test_windows_do_not_overlap_and_the_tail_is_dropped():
    assert windows(list(range(11)), 3).tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert windows(range(4), 4).tolist() == [[0, 1, 2, 3]]


def test_a_stream_as_long_as_wikitext2_gives_280_windows_and_drops_924_tokens():
    """287,644 is the number of GPT-2's tokens in the joined test split, by the protocol; that the
    text gives as many, the next test shows where it has the file."""
    tokens = torch.arange(287_644).tolist()
    found = windows(tokens, 1024)
    assert found.shape == (280, 1024)
    assert found.flatten().tolist() == tokens[:-924]


WIKITEXT = os.environ.get("SPARSE24_WIKITEXT2")  # path of wiki.test.raw or of the hub's .parquet


@pytest.mark.skipif(WIKITEXT is None, reason="SPARSE24_WIKITEXT2 names no file")
def test_the_real_wikitext2_has_287644_tokens_of_gpt2():
    tokens = gpt2_encoding().encode_ordinary(Text(WIKITEXT, REVISION).content)
    assert len(tokens) == 287_644
    assert windows(tokens, 1024).shape == (280, 1024)


@pytest.mark.parametrize(
    ("count", "block", "message"),
    [(7, 8, "the text has 7 tokens, a window 8"), (9, 1, "block_size=1")],
)
def test_no_window_is_one_line(count, block, message):
    with pytest.raises(UserError, match=message):
        windows(range(count), block)


# ---------------------------------------------------------------- the text

RAW = " \n = Title = \n \n First line . \n Second line . \n \n"
ROWS = ["", " = Title = \n", "", " First line . \n", " Second line . \n", ""]


def test_the_raw_file_and_the_hub_s_rows_are_the_same_text(tmp_path):
    import pyarrow
    import pyarrow.parquet

    assert raw_rows(RAW) == ROWS
    (tmp_path / "wiki.test.raw").write_text(RAW)
    pyarrow.parquet.write_table(pyarrow.table({"text": ROWS}), tmp_path / "test.parquet")
    joined = "\n\n = Title = \n\n\n\n\n First line . \n\n\n Second line . \n\n\n"
    for name in ("wiki.test.raw", "test.parquet"):
        assert Text(str(tmp_path / name), REVISION).content == joined


def test_a_raw_text_gives_these_windows(tmp_path):
    """Lines with their newlines, blank ones empty, two newlines between rows; a byte is a token.

    Counted by hand, the rows with the newlines behind them have 2, 5 + 2, 2, 5 + 2 and 3 bytes.
    """
    (tmp_path / "tiny.test.raw").write_text(" \n = A\n \n b .\n cd", encoding="utf-8")
    (tmp_path / "tokenizer.json").write_text(train_bpe([], 257))  # no merges
    encoding = load_bpe(tmp_path / "tokenizer.json")
    text = Text(str(tmp_path / "tiny.test.raw"), REVISION).content
    tokens = encoding.encode_ordinary_batch([text])[0]
    assert len(tokens) == 2 + 7 + 2 + 7 + 3
    spelled = [encoding.decode(window.tolist()) for window in windows(tokens, 6)]
    assert spelled == ["\n\n = A", "\n\n\n\n\n ", "b .\n\n\n"]  # " cd" is the tail


def test_any_other_file_and_standard_input_are_taken_as_they_are(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_bytes("ein Wort\n\n\nnoch eins; Überschuß".encode())
    text = Text(str(tmp_path / "a.txt"), REVISION)
    assert text.content == "ein Wort\n\n\nnoch eins; Überschuß"
    monkeypatch.setattr(
        "sys.stdin", io.TextIOWrapper(io.BytesIO((tmp_path / "a.txt").read_bytes()))
    )
    piped = Text("-", REVISION)
    assert piped.content == text.content
    assert piped.identity() == text.identity()  # by content, wherever it came from
    assert Text("wikitext2", REVISION).identity() == {"name": "wikitext2", "revision": REVISION}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.txt", None, r"ppl=.*missing\.txt is no file"),
        ("latin.txt", b"caf\xe9", r"latin\.txt is not UTF-8 text \(byte 3\)"),
        ("no.parquet", b"PAR", r"no\.parquet is not a Parquet file"),
    ],
)
def test_text_that_cannot_be_read_is_one_line(tmp_path, name, content, message):
    path: Path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        _ = Text(str(path), REVISION).content
    assert "\n" not in str(caught.value)


def test_a_parquet_file_of_something_else_is_one_line(tmp_path):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"line": ["a"]}), tmp_path / "x.parquet")
    with pytest.raises(UserError, match=r"x\.parquet has no column text, only line"):
        _ = Text(str(tmp_path / "x.parquet"), REVISION).content


@pytest.mark.parametrize(
    ("rows", "message"),
    [(["a", None], "row 1 of the column text in .* is no text: None"), ([7], "row 0 .*: 7")],
)
def test_a_row_without_text_is_one_line(tmp_path, rows, message):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": rows}), tmp_path / "x.parquet")
    with pytest.raises(UserError, match=message):
        _ = Text(str(tmp_path / "x.parquet"), REVISION).content


def test_no_network_is_one_line(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="could not be downloaded") as caught:
        _ = Text("wikitext2", REVISION).content
    assert "\n" not in str(caught.value)
