"""BERT: both forms, initialisation, parameter groups, and the weights of transformers both ways."""

import math

import pytest
import torch

from models.bert import BertConfig, BertLM, from_hf, to_hf
from tests.models.random_models import randomised, sinusoids, tokens

CRAMMING = {"pre_norm": True, "bias": False, "glu": True, "positions": "sinusoidal",
            "head_transform": False}  # fmt: skip


def tiny(**overrides):
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 40, "block_size": 12}
    return BertConfig(**{**shape, "dropout": 0.0, **overrides})


def targets(seed=2):
    """A third of the tokens of `tokens()`, -1 elsewhere."""
    kept = torch.rand(3, 12, generator=torch.Generator().manual_seed(seed)) < 1 / 3
    return tokens(seed=3).where(kept, -1)


def padding():
    """Sequences of 7, 12 and 1 tokens."""
    return (torch.arange(12) < torch.tensor([[7], [12], [1]])).long()


def test_cramming_forward_is_the_textbook_transformer():
    """The same weights through explicit softmax attention, one head at a time, in float64."""
    model = randomised(BertLM(tiny(**CRAMMING)).double())
    ids, types, mask = tokens(), tokens(vocab_size=2), padding()
    weights = model.state_dict()

    def norm(x, name):
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-12).sqrt()
        return scaled * weights[name + ".weight"] + weights[name + ".bias"]

    x = weights["bert.embeddings.word_embeddings.weight"][ids]
    x = x + weights["bert.embeddings.token_type_embeddings.weight"][types]
    x = x + weights["bert.embeddings.position_embeddings.scale"] * sinusoids(12, 16)
    x = norm(x, "bert.embeddings.norm")
    for i in range(2):
        layer = f"bert.layer.{i}."
        qkv = norm(x, layer + "norm_1") @ weights[layer + "attention.self.qkv.weight"].T
        heads = []
        for head in range(2):
            q, k, v = (qkv[..., 16 * j + 8 * head : 16 * j + 8 * head + 8] for j in range(3))
            scores = (q @ k.transpose(1, 2) / math.sqrt(8)).masked_fill(
                mask[:, None, :] == 0, -math.inf
            )
            heads.append(scores.softmax(-1) @ v)
        x = x + torch.cat(heads, -1) @ weights[layer + "attention.output.weight"].T
        u = norm(x, layer + "norm_2") @ weights[layer + "mlp.fc1.weight"].T
        value, gate = u[..., :32], u[..., 32:]
        cubic = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
        gated = value * 0.5 * gate * (1 + torch.tanh(cubic))
        x = x + gated @ weights[layer + "mlp.fc2.weight"].T
    words = weights["bert.embeddings.word_embeddings.weight"]
    expected = norm(x, "bert.norm") @ words.T

    logits, _ = model(ids, token_types=types, attention_mask=mask)
    # the table of positions was computed in fp32: 2^-24 of an angle of at most 11
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def hf_model(kind="BertForMaskedLM", **overrides):
    import transformers

    shape = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
             "intermediate_size": 24, "max_position_embeddings": 12}  # fmt: skip
    return getattr(transformers, kind)(transformers.BertConfig(**{**shape, **overrides}))


def test_outputs_and_losses_are_those_of_transformers():
    """Logits of every position, with sentence types and padding; the losses of both tasks."""
    ids, types, mask, target = tokens(), tokens(vocab_size=2), padding(), targets()
    options, label = {"token_types": types, "attention_mask": mask}, torch.tensor([1, 0, 1])
    for kind in ("BertForMaskedLM", "BertForPreTraining"):
        pairs = kind == "BertForPreTraining"
        theirs = randomised(hf_model(kind))
        ours = from_hf(theirs)
        assert type(to_hf(ours)) is type(theirs) and not ours.training
        back = from_hf(to_hf(ours))
        assert back.config == ours.config
        assert all(torch.equal(back.state_dict()[n], v) for n, v in ours.state_dict().items())
        labels = {"next_sentence_label": label} if pairs else {}
        labels["labels"] = target.where(target != -1, -100)
        expected = theirs(ids, token_type_ids=types, attention_mask=mask, **labels)
        torch.testing.assert_close(ours(ids, **options)[0], expected[1], rtol=1e-5, atol=1e-5)
        _, loss = ours(ids, target, next_sentence=label if pairs else None, **options)
        torch.testing.assert_close(loss, expected.loss, rtol=1e-5, atol=1e-5)
        if pairs:
            found = ours.sentence_logits(ours.bert(ids, **options))
            torch.testing.assert_close(found, expected[2], rtol=1e-5, atol=1e-5)


def test_a_model_that_we_do_not_carry_is_refused():
    with pytest.raises(ValueError, match="hidden_act='relu'"):
        from_hf(hf_model(hidden_act="relu"))
    with pytest.raises(ValueError, match="has no head for masked language"):
        from_hf(hf_model("BertForSequenceClassification"))
    for name, value in CRAMMING.items():  # nor is there a form of these in transformers
        with pytest.raises(ValueError, match=f"does not support {name}={value}"):
            to_hf(BertLM(tiny(**{name: value})))
