"""GPT-2: forward, initialisation, parameter groups, and the weights of transformers both ways."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from models.gpt2 import GPT, SIZES, GPTConfig, from_hf, to_hf


def tiny(**overrides):
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 40, "block_size": 12}
    return GPTConfig(**{**shape, **overrides})


def randomised(model, std=0.3):
    """Every tensor random and large, so that no bias, gain or activation can be lost unseen."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(std * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def tokens(shape=(3, 12), vocab_size=40, seed=1):
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(seed))


# The published GPT-2 has biases and 50257 tokens; these are the counts of its released weights.
@pytest.mark.parametrize(
    ("size", "count"),
    [
        ("124M", 124_439_808),
        ("350M", 354_823_168),
        ("774M", 774_030_080),
        ("1558M", 1_557_611_200),
    ],
)
def test_number_of_parameters_is_that_of_the_released_models(size, count):
    with torch.device("meta"):
        model = GPT(GPTConfig.of_size(size, bias=True, vocab_size=50257))
    assert model.num_params() == count


def test_defaults_are_the_pre_training_recipe():
    config = GPTConfig.of_size("124M")
    assert (config.vocab_size, config.block_size) == (50304, 1024)
    assert (config.bias, config.dropout, config.gelu) == (False, 0.0, "erf")


def test_module_names_are_those_of_nanogpt():
    names = set(GPT(tiny(n_layer=1)).state_dict())
    block = "transformer.h.0."
    assert names == {
        "transformer.wte.weight",
        "transformer.wpe.weight",
        block + "ln_1.weight",
        block + "attn.c_attn.weight",
        block + "attn.c_proj.weight",
        block + "ln_2.weight",
        block + "mlp.c_fc.weight",
        block + "mlp.c_proj.weight",
        "transformer.ln_f.weight",
        "lm_head.weight",
    }


@pytest.mark.parametrize("bias", [False, True])
def test_forward_is_the_textbook_transformer(bias):
    """The same weights through explicit softmax attention, one head at a time, in float64."""
    model = randomised(GPT(tiny(bias=bias)).double())
    idx = tokens()
    weights = model.state_dict()

    def linear(x, name):
        return F.linear(x, weights[name + ".weight"], weights.get(name + ".bias"))

    def norm(x, name):
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
        return scaled * weights[name + ".weight"] + weights.get(name + ".bias", 0)

    x = weights["transformer.wte.weight"][idx] + weights["transformer.wpe.weight"][: idx.shape[1]]
    future = torch.ones(12, 12, dtype=torch.bool).triu(1)
    for layer in range(2):
        block = f"transformer.h.{layer}."
        qkv = linear(norm(x, block + "ln_1"), block + "attn.c_attn")
        heads = []
        for head in range(2):
            q, k, v = (qkv[..., 16 * i + 8 * head : 16 * i + 8 * head + 8] for i in range(3))
            scores = (q @ k.transpose(1, 2) / math.sqrt(8)).masked_fill(future, -math.inf)
            heads.append(scores.softmax(-1) @ v)
        x = x + linear(torch.cat(heads, -1), block + "attn.c_proj")
        u = linear(norm(x, block + "ln_2"), block + "mlp.c_fc")
        x = x + linear(u * 0.5 * (1 + torch.erf(u / math.sqrt(2))), block + "mlp.c_proj")
    expected = norm(x, "transformer.ln_f") @ weights["transformer.wte.weight"].T

    logits, loss = model(idx)
    assert loss is None
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)


def test_loss_is_the_mean_over_the_targets_that_count():
    model = randomised(GPT(tiny()))
    idx, target = tokens(), tokens(seed=2)
    target[0, :5] = -1
    logits, loss = model(idx, target)
    assert logits.shape == (3, 12, 40)
    kept = target != -1
    picked = logits.log_softmax(-1)[kept].gather(-1, target[kept][:, None])
    torch.testing.assert_close(loss, -picked.mean())
    assert torch.equal(model(input=idx, target=target)[1], loss)


def test_a_token_does_not_see_the_future():
    model = randomised(GPT(tiny()))
    idx = tokens()
    changed = idx.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 40
    before, after = model(idx)[0], model(changed)[0]
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert (before[:, 7:] - after[:, 7:]).abs().amax(-1).min() > 1e-3


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


def test_the_head_is_tied_and_stays_tied():
    model = GPT(tiny())
    assert len([p for p in model.parameters() if p.shape == (40, 16)]) == 1
    for same in (model, copy.deepcopy(model), model.to(torch.float64)):
        assert same.lm_head.weight is same.transformer.wte.weight


def test_param_groups_decay_matrices_only():
    model = GPT(tiny(bias=True))
    decayed, plain = model.param_groups(0.1)
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert all(p.dim() == 2 for p in decayed["params"])
    assert all(p.dim() == 1 for p in plain["params"])
    assert len(decayed["params"]) == 2 + 4 * 2  # embeddings, and four linears in each block
    assert len(plain["params"]) == 2 + 8 * 2  # final norm; two norms and four biases in each block
    torch.optim.AdamW([decayed, plain])


def test_dropout_acts_in_training_only():
    model = randomised(GPT(tiny(dropout=0.5)))
    idx = tokens()
    assert torch.equal(model(idx)[0], model(idx)[0])
    model.train()
    assert not torch.equal(model(idx)[0], model(idx)[0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GPTConfig.of_size("125M"), "unknown GPT-2 size '125M'; choose from nano, 124M"),
        (lambda: tiny(n_head=3), "n_embd=16, n_head=3"),
        (lambda: tiny(n_layer=0), "n_layer must be at least 1, got 0"),
        (lambda: tiny(gelu="relu"), "gelu must be 'erf' or 'tanh', got 'relu'"),
        (lambda: tiny(dropout=1.0), r"dropout must be in \[0, 1\), got 1.0"),
        (lambda: GPT(tiny())(tokens((1, 13))), "13 tokens is longer .* block_size=12"),
    ],
)
def test_errors_name_the_value(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# ---------------------------------------------------------------------------------- transformers


def hf_model(**overrides):
    import transformers

    shape = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 40, "n_positions": 12}
    ids = {"bos_token_id": None, "eos_token_id": None}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**shape, **ids, **overrides}))


def test_half_has_half_the_weights_and_products_in_its_feed_forward_networks():
    """GPT-2 124M: 2 * 768 * 3072 weights in each of the 12 networks, 28.3 of 124 million less."""
    full, half = GPTConfig.of_size("124M"), GPTConfig.of_size("124M", n_inner=1536)
    with torch.device("meta"):
        models = GPT(full), GPT(half)
    counts = [m.num_params() for m in models]
    assert counts[0] - counts[1] == 12 * 2 * 768 * 1536
    for name, parameter in models[1].named_parameters():
        same = parameter.shape == models[0].get_parameter(name).shape
        assert same is ("mlp" not in name)
    flops = []
    for model in models:
        with FlopCounterMode(display=False) as counter:
            model.transformer.h[0].mlp(torch.empty(1, 8, 768, device="meta"))
        flops.append(counter.get_total_flops())
    assert flops == [2 * 8 * 2 * 768 * 3072, 2 * 8 * 2 * 768 * 1536]


def test_width_of_the_feed_forward_networks():
    wide = GPT(tiny(n_inner=None)).state_dict()
    assert wide.keys() == GPT(tiny(n_inner=24)).state_dict().keys()
    assert wide["transformer.h.0.mlp.c_fc.weight"].shape == (64, 16)
    assert GPT(tiny(n_inner=24)).transformer.h[0].mlp.c_proj.weight.shape == (16, 24)
    ours = randomised(GPT(tiny(n_inner=24, bias=True)))
    theirs = to_hf(ours)
    torch.testing.assert_close(theirs(tokens()).logits, ours(tokens())[0], rtol=1e-5, atol=1e-5)
    assert from_hf(theirs).config == ours.config
    with pytest.raises(ValueError, match="n_inner must be at least 1, got 0"):
        tiny(n_inner=0)


@pytest.mark.parametrize("activation", ["gelu_new", "gelu", "gelu_pytorch_tanh"])
def test_weights_of_transformers_give_the_same_logits(activation):
    theirs = randomised(hf_model(activation_function=activation))
    ours = from_hf(theirs)
    assert ours.config.gelu == ("erf" if activation == "gelu" else "tanh")
    assert ours.config.bias and ours.config.vocab_size == 40 and not ours.training
    torch.testing.assert_close(ours(tokens())[0], theirs(tokens()).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gelu", ["erf", "tanh"])
def test_our_weights_give_the_same_logits_in_transformers(gelu, bias):
    ours = randomised(GPT(tiny(gelu=gelu, bias=bias, dropout=0.25)))
    theirs = to_hf(ours)
    assert theirs.config.attn_pdrop == theirs.config.embd_pdrop == 0.25
    assert theirs.config.vocab_size == 40 and theirs.config.n_positions == 12
    torch.testing.assert_close(theirs(tokens()).logits, ours(tokens())[0], rtol=1e-5, atol=1e-5)
    back = from_hf(theirs)
    for name, value in ours.state_dict().items():
        assert torch.equal(back.state_dict()[name], value), name


def test_the_conversion_copies():
    ours = randomised(GPT(tiny(bias=True)))
    before = copy.deepcopy(ours.state_dict())
    randomised(to_hf(ours), std=9.0)
    assert all(torch.equal(before[k], v) for k, v in ours.state_dict().items())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        ({"activation_function": "relu"}, "activation_function='relu'"),
        ({"attn_pdrop": 0.3}, "attn_pdrop=0.3 .needs 0.1"),
        ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon=1e-06"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings=False"),
    ],
)
def test_a_config_that_we_do_not_carry_is_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        from_hf(hf_model(**overrides))


def test_a_model_with_a_method_attached_is_refused():
    model = GPT(tiny())
    layer = model.get_submodule("transformer.h.0.mlp.c_fc")
    layer.register_buffer("mask", torch.ones(64, 16, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"mlp\.c_fc\.mask .* finalize"):
        to_hf(model)


def test_every_size_is_buildable():
    assert list(SIZES) == ["nano", "124M", "350M", "774M", "1558M"]
    with torch.device("meta"):
        for size in SIZES:
            GPT(GPTConfig.of_size(size))
