"""The encoder-decoder: torch.nn.Transformer with the same weights, names, loss and decoding."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from models.transformer import Transformer, TransformerConfig
from tests.models.random_models import randomised, sinusoids, tokens


def tiny(**overrides):
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 40, "block_size": 12}
    return TransformerConfig(**{**shape, "dropout": 0.0, **overrides})


def padding():
    """Sources of 5, 9 and 1 tokens."""
    return (torch.arange(9) < torch.tensor([[5], [9], [1]])).long()


def theirs_of(ours):
    """torch.nn.Transformer with a copy of the weights of our two stacks."""
    config = ours.config
    options = {"activation": "relu", "batch_first": True, "norm_first": config.pre_norm}
    sizes = config.n_embd, config.n_head, config.n_layer, config.n_layer, config.ffn_width, 0.0
    theirs = nn.Transformer(*sizes, **options)
    if not config.pre_norm:  # it norms the output of a stack always
        theirs.encoder.norm = theirs.decoder.norm = None
    state = ours.state_dict()
    loaded = {}
    for name in theirs.state_dict():
        parts = ("q_proj", "k_proj", "v_proj")
        our = name.replace("multihead_attn", "encoder_attn").replace("linear", "mlp.fc")
        if ".layers." in our:
            our = our.replace(".norm", ".norm_")
        stem, _, last = our.rpartition(".")
        if last.startswith("in_proj_"):
            kind = last.removeprefix("in_proj_")
            loaded[name] = torch.cat([state[f"{stem}.{part}.{kind}"] for part in parts])
        else:
            loaded[name] = state[our]
    theirs.load_state_dict(loaded)
    return theirs.eval()


@pytest.mark.parametrize("pre_norm", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_forward_is_that_of_torch(pre_norm, masked):
    ours = randomised(Transformer(tiny(pre_norm=pre_norm)))
    theirs = theirs_of(ours)
    source, input, mask = tokens((3, 9)), tokens((3, 7), seed=2), padding() if masked else None

    def embedded(ids):
        return ours.embedding.weight[ids] * 4 + sinusoids(ids.shape[1], 16).float()

    hidden = None if mask is None else mask == 0
    out = theirs(
        embedded(source),
        embedded(input),
        tgt_mask=nn.Transformer.generate_square_subsequent_mask(7).isinf(),
        src_key_padding_mask=hidden,
        memory_key_padding_mask=hidden,
    )
    logits, _ = ours(source, input, source_mask=mask)
    scale = logits.abs().max()
    expected = out @ ours.embedding.weight.T
    torch.testing.assert_close(logits / scale, expected / scale, atol=1e-6, rtol=0)


def test_decoding_token_by_token_gives_the_logits_of_the_whole():
    model = randomised(Transformer(tiny()))
    source, input, mask = tokens((3, 9)), tokens((3, 7), seed=2), padding()
    whole = model(source, input, source_mask=mask)[0]
    state = model.start(model.encode(source, mask))
    for t in range(7):
        one = model.decode_next(input[:, t : t + 1], state, mask)
        torch.testing.assert_close(one, whole[:, t], atol=1e-5, rtol=1e-5)
    for layer in state:
        layer.select(torch.tensor([2, 0]))
    rows = model.decode_next(tokens((2, 1)), state, mask[[2, 0]])
    longer = torch.cat([input[[2, 0]], tokens((2, 1))], 1)
    expected = model(source[[2, 0]], longer, source_mask=mask[[2, 0]])[0][:, -1]
    torch.testing.assert_close(rows, expected, atol=1e-5, rtol=1e-5)


def test_loss_is_label_smoothed_in_training_alone():
    """By the definition: (1 - e) of the target's and e of the mean over the vocabulary."""
    model = randomised(Transformer(tiny(label_smoothing=0.2)), std=0.1)
    source, input, target = tokens((3, 9)), tokens((3, 7), 2), tokens((3, 7), 3)
    target[0, 4:] = -1
    logits, loss = model(source, input, target)
    log_p = F.log_softmax(logits, -1)[target != -1]
    nll = -log_p.gather(1, target[target != -1][:, None]).mean()
    torch.testing.assert_close(loss, nll)
    _, smoothed = model.train()(source, input, target)
    torch.testing.assert_close(smoothed, 0.8 * nll - 0.2 * log_p.mean())
    _, shared = model(source, input, target, target_tokens=torch.tensor(9.0))
    torch.testing.assert_close(shared, smoothed * 18 / 9)


def test_initialisation():
    torch.manual_seed(0)
    model = Transformer(tiny(n_embd=64, n_head=4, vocab_size=4000))
    assert model.head.weight is model.embedding.weight
    assert model.embedding.weight.std().item() == pytest.approx(1 / 8, rel=0.02)
    layer = model.encoder.layers[0]
    bound = math.sqrt(6 / (4 * 64))
    assert 0.98 * bound < layer.self_attn.k_proj.weight.abs().max() <= bound
    bound = math.sqrt(6 / (5 * 64))
    assert 0.98 * bound < layer.mlp.fc1.weight.abs().max() <= bound
    assert not any(p.any() for n, p in model.named_parameters() if n.endswith("bias"))
