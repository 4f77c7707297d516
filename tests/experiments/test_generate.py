"""Greedy text of a finished run, dense and 2:4, and what is said where 2:4 products cannot run."""

import re

import pytest
import torch

from common_kernels import backend, register_cpu_operators
from experiments import generate, pretrain, semi_structured
from experiments.errors import UserError
from experiments.finished import FinishedRun
from experiments.settings import ImplConfig


def config(run, prompt, dtype="fp32", **options):
    settings = generate.Settings(run=str(run.directory), prompt=prompt, repeats=1, **options)
    return generate.GenerateConfig(settings, ImplConfig(device="cpu", dtype=dtype, threads=1))


@pytest.fixture
def trained(tiny):
    options = tiny("method=ste", "train.steps=2", "train.warmup_steps=0")
    pretrain.run(options, lambda message: None)
    return FinishedRun.open(options.directory())


def test_the_text_is_the_most_likely_one_and_a_missing_device_is_named(
    trained, capsys, monkeypatch
):
    monkeypatch.setattr(backend, "interpreted", lambda: False)
    generate.run(config(trained, "the mask keeps", tokens=5, batch=2))
    out = capsys.readouterr().out
    model, encoding = trained.model().eval(), trained.tokenizer()
    ids = encoding.encode_ordinary("the mask keeps")
    with torch.no_grad():
        for _ in range(5):  # without a cache, by our own model
            ids.append(int(model(torch.tensor([ids]))[0][0, -1].argmax()))
    assert out.startswith(encoding.decode(ids) + "\ndense products: ")
    assert "2:4 products: not run, no 2:4 products here: cuSPARSELt takes bf16" in out
    generate.run(config(trained, "", tokens=2, sparse=False))  # from the end-of-text token on
    assert "2:4" not in capsys.readouterr().out


@pytest.fixture
def semi_structured_cpu(monkeypatch):
    """torch's 2:4 products on the CPU, as on an Ampere GPU."""
    operators = register_cpu_operators()
    monkeypatch.setattr(semi_structured, "semi_structured_layout", lambda *_: "cutlass_sm80")
    yield
    del operators


@pytest.fixture
def wide(tiny):
    """A finished run of a size that torch's 2:4 tensors take."""
    options = tiny("method=ste", "train.steps=12", "model.n_embd=64", "train.learning_rate=1e-2")
    pretrain.run(options, lambda message: None)
    return FinishedRun.open(options.directory())


def test_the_same_weights_go_on_as_2_4_products(wide, semi_structured_cpu, monkeypatch, capsys):
    models, texts = [], []
    original = generate.timed

    def timed(model, ids, count, repeats):
        models.append({n: type(m).__name__ for n, m in model.named_modules()})
        text, rate = original(model, ids, count, repeats)
        texts.append(text[0, ids.shape[1] :].tolist())
        return text, rate

    monkeypatch.setattr(generate, "timed", timed)
    generate.run(config(wide, "the mask keeps", "bf16", tokens=5, batch=2))
    out = capsys.readouterr().out
    shape = r"\n2:4 products in 2 linears: [\d.]+ tokens/s, [\d.]+ of dense; the first (\d) of 5 "
    equal = int(re.search(shape, out)[1])
    assert [len(text) for text in texts] == [5, 5] and texts[0][:equal] == texts[1][:equal]
    assert equal == 5 or texts[0][equal] != texts[1][equal]
    sparse = {n for n, kind in models[1].items() if kind == "SemiStructuredLinear"}
    assert sparse == {f"model.transformer.{name}" for name in ("h.0.mlp.c_fc", "h.0.mlp.c_proj")}
    assert "SemiStructuredLinear" not in models[0].values()


def test_tokens_that_differ_are_counted_and_shown(wide, semi_structured_cpu, monkeypatch, capsys):
    """The third of five tokens is another one, as it can be where two are equally likely."""
    texts = iter([[7, 8, 1, 2, 3, 4, 5], [7, 8, 1, 2, 9, 4, 5]])
    monkeypatch.setattr(generate, "timed", lambda *_: (torch.tensor([next(texts)]), 1.0))
    encoding = wide.tokenizer()
    monkeypatch.setattr(type(encoding), "encode_ordinary_batch", lambda *_: [[7, 8]])
    generate.run(config(wide, "two tokens", "bf16", tokens=5))
    dense, _, counted, sparse = capsys.readouterr().out.rstrip("\n").rsplit("\n", 3)
    assert counted.endswith("1.00 of dense; the first 2 of 5 tokens are the same")
    assert (dense, sparse) == tuple(encoding.decode([7, 8, 1, 2, third, 4, 5]) for third in (3, 9))


def test_more_than_the_model_takes_is_one_line(trained):
    with pytest.raises(UserError, match="tokens=16 exceed the 16 that the model takes"):
        generate.run(config(trained, "two of four", tokens=16))
