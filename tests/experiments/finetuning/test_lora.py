"""LoRA on a sparse model, by peft: trained, kept, merged under the mask."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from common_kernels import check24, nm_mask
from experiments import finetune
from experiments.finetuning import lora
from experiments.finetuning.lora import Adapters, LoraConfig
from experiments.support import errors
from experiments.support.errors import UserError
from models.gpt2 import GPT, GPTConfig
from models.heads import Classifier

SETTINGS = {"rank": 2, "alpha": 4.0, "include": "all"}


def classifier():
    """A model of one block whose feed-forward network is 2:4."""
    torch.manual_seed(0)
    shape = GPTConfig(n_layer=1, n_head=2, n_embd=16, vocab_size=32, block_size=8)
    model = Classifier(GPT(shape), 2)
    for linear in model.transformer.h[0].mlp.children():
        if isinstance(linear, nn.Linear):
            linear.weight.data *= nm_mask(linear.weight)
    return model


def test_settings_count_for_this_mode_alone_and_without_peft_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(errors, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"mode=lora needs .* -c constraints.txt -e '.\[lora\]' in"):
        finetune.load(["run=nowhere", "mode=lora"])
    monkeypatch.setattr(errors, "find_spec", lambda _: SimpleNamespace())
    plain, other = ({**finetune.load(["run=x", *o])._settings()} for o in ([], ["lora.rank=2"]))
    assert plain == other and "lora" not in plain
    assert finetune.load(["run=x", "mode=lora"])._settings()["lora"]["rank"] == 8


def test_adapters_train_alone_and_are_merged(tmp_path):
    peft = pytest.importorskip("peft")
    model = classifier()
    base, tokens = copy.deepcopy(model), torch.arange(16).reshape(2, 8)
    patterns = {f"transformer.h.0.{name}": (2, 4) for name in ("mlp.c_fc", "attn.c_attn")}
    adapters = Adapters(model, LoraConfig(**SETTINGS), patterns)
    assert [name for name in adapters.masks if "mlp" in name] == list(adapters.masks) != []
    assert len(adapters.names) == 2 * len(adapters.masks) == 4
    assert torch.equal(model(tokens)[0], base(tokens)[0])  # B begins at zero
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        model(tokens, torch.tensor([0, 1]))[1].backward()
        optimizer.step()
        optimizer.zero_grad()
    frozen = dict(model.named_parameters())
    for name in adapters.names:
        start = base.get_parameter(f"{name}.weight")
        assert torch.equal(frozen[f"{name}.base_layer.weight"], start)
    trained = model(tokens)[0]
    assert not torch.equal(trained, base(tokens)[0])
    adapters.save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(lora.FILES)
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path).base_model.model.eval()
    assert torch.equal(loaded(tokens)[0], trained)
    sums = {}
    for name in adapters.names:
        a, b = (frozen[f"{name}.lora_{part}.default.weight"].detach() for part in "AB")
        sums[name] = base.get_parameter(f"{name}.weight").detach() + 2.0 * b @ a
    adapters.merge()
    assert dict(model.named_parameters()).keys() == dict(base.named_parameters()).keys()
    for name, total in sums.items():
        weight, own = model.get_parameter(f"{name}.weight"), base.get_parameter(f"{name}.weight")
        kept = torch.where(own == 0, 0.0, total) if "mlp" in name else total
        torch.testing.assert_close(weight.detach(), kept)
        assert (int(check24(weight)) == 0) == ("mlp" in name)


def test_globs_that_match_nothing_are_one_line():
    pytest.importorskip("peft")
    config = LoraConfig(**{**SETTINGS, "include": ["*encoder*"]})
    with pytest.raises(UserError, match=r"no linear matches lora\.include=.*transformer\.h\.0"):
        Adapters(classifier(), config, {})
