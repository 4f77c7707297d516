"""Greedy text of a finished run, and what is said where 2:4 products cannot run."""

import pytest
import torch

from common_kernels import backend
from experiments import generate, pretrain
from experiments.errors import UserError
from experiments.finished import FinishedRun
from experiments.settings import ImplConfig


def config(run, prompt, **options):
    settings = generate.Settings(run=str(run.directory), prompt=prompt, repeats=1, **options)
    return generate.GenerateConfig(settings, ImplConfig(device="cpu", threads=1))


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


def test_more_than_the_model_takes_is_one_line(trained):
    with pytest.raises(UserError, match="tokens=16 exceed the 16 that the model takes"):
        generate.run(config(trained, "two of four", tokens=16))
