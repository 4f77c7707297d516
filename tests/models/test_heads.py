"""The heads of fine-tuning: names, what they look at, and their losses."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from models.bert import BertConfig, BertLM
from models.gpt2 import GPT, GPTConfig
from models.heads import Classifier, SpanPredictor
from models.hf import CausalLM

SHAPE = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 50, "block_size": 12}
FAMILIES = ["gpt2", "bert", "bert_with_pooler", "llama", "opt"]
LENGTHS = [3, 7, 5]


@pytest.fixture
def pretrained(hf_model):
    def build(family):
        torch.manual_seed(0)
        if family == "gpt2":
            return GPT(GPTConfig(**SHAPE))
        if family.startswith("bert"):
            pooler = family == "bert_with_pooler"
            return BertLM(BertConfig(**SHAPE, next_sentence=pooler, dropout=0.0))
        return CausalLM(hf_model(family, vocab_size=50), block_size=12)

    return build


def batch(length, seed=0):
    """Three sequences of LENGTHS, padded with random tokens to `length`."""
    tokens = torch.randint(50, (3, 7), generator=torch.Generator().manual_seed(1))
    junk = torch.randint(50, (3, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.arange(length) < torch.tensor(LENGTHS)[:, None]
    junk[:, :7] = torch.where(mask[:, :7], tokens, junk[:, :7])
    types = (torch.arange(length) >= 2).long().expand(3, -1)
    return {"input": junk, "attention_mask": mask, "token_types": types}


def linears(model):
    return {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def test_the_trunk_keeps_its_names_and_its_parameters(pretrained):
    for family in FAMILIES:
        model = pretrained(family)
        trunk = {name for name in linears(model) if name.startswith(f"{model.TRUNK}.")}
        classifier, spans = Classifier(model, 3), SpanPredictor(model)
        assert len(trunk) >= 8
        fresh = {"pooler.dense"} if family == "bert" else set()
        assert linears(classifier) == trunk | {"classifier"} | fresh
        assert linears(spans) == trunk | {"qa_outputs"}
        own = dict(model.named_parameters())
        for name, parameter in classifier.named_parameters():
            assert not name.startswith(f"{model.TRUNK}.") or parameter is own[name]
        assert classifier.block_size == 12
        biased = family.startswith("bert")  # as BertForSequenceClassification and GPT2For...
        assert (classifier.classifier.bias is not None) is biased


def test_padding_changes_nothing(pretrained):
    for family in FAMILIES:
        model = pretrained(family)
        classifier, spans = Classifier(model, 3).eval(), SpanPredictor(model).eval()
        with torch.no_grad():
            (classes, _), (ends, _) = classifier(**batch(7)), spans(**batch(7))
            (again, _), (longer, _) = (m(**batch(11, seed=5)) for m in (classifier, spans))
            torch.testing.assert_close(again, classes, rtol=0, atol=1e-5)
            for row, length in enumerate(LENGTHS):
                alone = {k: v[row : row + 1, :length] for k, v in batch(7).items()}
                alone["attention_mask"] = None
                expected = classifier(**alone)[0]
                torch.testing.assert_close(classes[row : row + 1], expected, rtol=0, atol=1e-5)
                own = spans(**alone)[0]
                for padded in (ends, longer):
                    assert padded[row, length:].eq(float("-inf")).all()
                    found = padded[row : row + 1, :length]
                    torch.testing.assert_close(found, own, rtol=0, atol=1e-5)


def test_causal_models_are_read_at_the_last_token_and_bert_at_the_first(pretrained):
    inputs = batch(7)
    gpt = pretrained("gpt2").eval()
    classifier = Classifier(gpt, 3)
    last = torch.stack([gpt.transformer(inputs["input"])[i, n - 1] for i, n in enumerate(LENGTHS)])
    assert torch.equal(classifier(**inputs)[0], classifier.classifier(last))
    for family in ("bert", "bert_with_pooler"):
        model = pretrained(family).eval()
        classifier = Classifier(model, 3)
        hidden = model.bert(inputs["input"], inputs["token_types"], inputs["attention_mask"])
        dense = (classifier.pooler or model.bert.pooler).dense
        expected = classifier.classifier(torch.tanh(dense(hidden[:, 0])))
        assert torch.equal(classifier(**inputs)[0], expected)


def test_losses_are_the_mean_cross_entropy_and_the_mean_squared_error(pretrained):
    model = pretrained("gpt2").eval()
    logits, loss = Classifier(model, 3)(**batch(7), target=torch.tensor([2, 0, 1]))
    picked = logits.softmax(-1)[torch.arange(3), torch.tensor([2, 0, 1])]
    torch.testing.assert_close(loss, -picked.log().mean())
    numbers = torch.tensor([1.0, 2.5, 5.0])
    logits, loss = Classifier(model, 1)(**batch(7), target=numbers)
    assert logits.shape == (3, 1)
    torch.testing.assert_close(loss, ((logits[:, 0] - numbers) ** 2).mean())
    target = torch.tensor([[0, 2], [3, 6], [0, 0]])
    logits, loss = SpanPredictor(model)(**batch(9), target=target)
    both = [F.cross_entropy(logits[:, :, i], target[:, i]) for i in (0, 1)]
    torch.testing.assert_close(loss, sum(both) / 2)
    assert Classifier(model, 3)(**batch(7))[1] is None
