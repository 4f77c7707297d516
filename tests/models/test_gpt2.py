"""GPT-2: forward, initialisation, parameter groups, and the weights of transformers both ways."""

import itertools
import math

import pytest
import torch

from models.gpt2 import GPT, GPTConfig, from_hf, to_hf
from tests.models.random_models import randomised, tokens


def tiny(**overrides):
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 40, "block_size": 12}
    return GPTConfig(**{**shape, **overrides})


def test_module_names_are_those_of_nanogpt():
    names = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
    block = {f"transformer.h.0.{name}.weight" for name in names}
    others = {f"transformer.{name}.weight" for name in ("wte", "wpe", "ln_f")}
    assert set(GPT(tiny(n_layer=1)).state_dict()) == block | others | {"lm_head.weight"}


def test_loss_is_the_mean_over_the_targets_that_count():
    model = randomised(GPT(tiny()))
    idx, target = tokens(), tokens(seed=2)
    target[0, :5] = -1
    logits, loss = model(idx, target)
    assert logits.shape == (3, 12, 40)
    kept = target != -1
    picked = logits.log_softmax(-1)[kept].gather(-1, target[kept][:, None])
    torch.testing.assert_close(loss, -picked.mean())


def test_initialisation():
    """Sample deviations of n >= 16k normal values: within 4 sigma, sigma = std / sqrt(2 n)."""
    torch.manual_seed(0)
    model = GPT(GPTConfig.of_size("nano", bias=True))
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            std = 0.02 / math.sqrt(8) if "c_proj" in name else 0.02
            slack = 4 * std / math.sqrt(2 * parameter.numel())
            assert abs(parameter.std().item() - std) < slack, name
        else:
            expected = 1.0 if "ln_" in name and name.endswith("weight") else 0.0
            assert torch.all(parameter == expected), name


def hf_model(**overrides):
    import transformers

    shape = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 40, "n_positions": 12}
    ids = {"bos_token_id": None, "eos_token_id": None}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**shape, **ids, **overrides}))


def test_weights_there_and_back_give_the_same_logits():
    for activation in ("gelu_new", "gelu", "gelu_pytorch_tanh"):
        theirs = randomised(hf_model(activation_function=activation))
        ours = from_hf(theirs)
        assert ours.config.gelu == ("erf" if activation == "gelu" else "tanh")
        assert ours.config.bias and ours.config.vocab_size == 40 and not ours.training
        torch.testing.assert_close(ours(tokens())[0], theirs(tokens()).logits, rtol=1e-5, atol=1e-5)
    for bias, gelu in itertools.product((False, True), ("erf", "tanh", "relu2")):
        ours = randomised(GPT(tiny(gelu=gelu, bias=bias, dropout=0.25, n_inner=24)))
        theirs = to_hf(ours)
        assert theirs.config.attn_pdrop == theirs.config.embd_pdrop == 0.25
        torch.testing.assert_close(theirs(tokens()).logits, ours(tokens())[0], rtol=1e-5, atol=1e-5)
        back = from_hf(theirs).state_dict()
        assert all(torch.equal(back[name], value) for name, value in ours.state_dict().items())


def test_a_config_that_we_do_not_carry_is_refused():
    for name, value in (("activation_function", "relu"), ("tie_word_embeddings", False)):
        with pytest.raises(ValueError, match=f"{name}={value!r}"):
            from_hf(hf_model(**{name: value}))
