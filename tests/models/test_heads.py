"""The heads of fine-tuning, and transformers' causal language models in the trainer's form."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from methods import ste
from models.bert import BertConfig, BertLM
from models.gpt2 import GPT, GPTConfig, from_hf
from models.heads import Classifier, SpanPredictor
from models.hf import FAMILIES as OF_TRANSFORMERS
from models.hf import CausalLM, ForTrainer

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


def test_every_trained_parameter_gets_a_gradient_for_which_ddp_waits(pretrained):
    for family in FAMILIES:
        for kind, target in ((Classifier, [0, 1, 2]), (SpanPredictor, [[0, 1]] * 3)):
            model = kind(pretrained(family), *[3] * (kind is Classifier))
            model(**batch(7), target=torch.tensor(target))[1].backward()
            trained = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
            assert not [n for n, grad in trained.items() if grad is None], (family, kind)


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


def tokens(seed=1):
    return torch.randint(0, 320, (3, 32), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def checkpoint(hf_model, tmp_path):
    """checkpoint("gpt2") -> (the plain model, the folder of its checkpoint)."""

    def write(family):
        model = hf_model(family)
        with torch.no_grad():  # no bias or gain can be lost unseen
            for parameter in model.parameters():
                parameter.copy_(0.2 * torch.randn_like(parameter))
        folder = tmp_path / family
        model.save_pretrained(folder)
        return model, folder

    return write


def test_logits_and_loss_are_those_of_transformers_up_to_its_length(checkpoint):
    for family in OF_TRANSFORMERS:
        plain, folder = checkpoint(family)
        model = CausalLM.from_pretrained(folder)
        assert {p.dtype for p in model.train().parameters()} == {torch.float32}
        assert torch.equal(model(tokens())[0], model(tokens())[0])  # no dropout
        inputs, targets = tokens(), tokens(2)
        targets[0, :5] = -1
        logits, loss = model(inputs, targets)
        expected = plain(input_ids=inputs).logits
        # The same products by way of another layout.
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
        by_hand = F.cross_entropy(logits[targets >= 0], targets[targets >= 0])
        torch.testing.assert_close(loss, by_hand, rtol=1e-6, atol=0)
        assert model(inputs)[1] is None
        assert (model.vocab_size, model.block_size) == (320, 32)
    with pytest.raises(ValueError, match=r"block_size=64, but .* takes at most 32"):
        CausalLM.from_pretrained(folder, block_size=64)


def test_every_linear_is_converted_and_a_saved_model_is_the_loaded_one_bit_for_bit(checkpoint):
    from transformers import AutoModelForCausalLM

    for family in OF_TRANSFORMERS:
        plain, folder = checkpoint(family)
        model, export = CausalLM.from_pretrained(folder), folder.with_name(f"export-{family}")
        method = ste.Method(ste.Config(include="all"))
        assert len(method.convert(model).names) == 2 * {"gpt2": 4, "opt": 6}.get(family, 7)
        assert not any("Conv1D" in type(m).__name__ for m in model.modules())
        model = CausalLM.from_pretrained(folder)
        model.save_pretrained(export)
        assert {path.suffix for path in export.iterdir()} == {".json", ".safetensors"}
        again = AutoModelForCausalLM.from_pretrained(export)
        state, expected = again.state_dict(), plain.state_dict()
        assert state.keys() == expected.keys() and type(again) is type(plain)
        assert all(torch.equal(state[name], expected[name]) for name in expected)
        # The rates of dropout, which training here sets to 0, included.
        configs = [json.loads((path / "config.json").read_text()) for path in (folder, export)]
        assert configs[0] == configs[1]
        assert model(tokens())[0].equal(CausalLM.from_pretrained(export)(tokens())[0])


def test_what_cannot_be_loaded_is_one_line(hf_model, checkpoint, tmp_path):
    """No pickle is read; and weights that are missing are not made up, as transformers does."""
    from safetensors.torch import load, save_file

    model = hf_model("opt")
    model.config.save_pretrained(tmp_path / "pickle")
    torch.save(model.state_dict(), tmp_path / "pickle" / "pytorch_model.bin")
    with pytest.raises(ValueError, match="no causal language model in"):
        CausalLM.from_pretrained(tmp_path / "pickle")
    families = (("llama", CausalLM.from_pretrained, "layers.1"), ("gpt2", from_hf, "h.1"))
    for family, read, part in families:
        _, folder = checkpoint(family)
        path = folder / "model.safetensors"
        whole = load(path.read_bytes())  # not mapped: the file is written over
        save_file({k: v for k, v in whole.items() if part not in k}, path, {"format": "pt"})
        with pytest.raises(ValueError, match=rf"files lack .*{part}\..* and \d+ more"):
            read(folder)
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.raises(ValueError, match="no causal language model in"):
            read(folder)


def test_our_gpt2_as_the_trainer_of_transformers_takes_it(checkpoint):
    plain, folder = checkpoint("gpt2")
    model = ForTrainer(from_hf(folder)).eval()
    ids, mask = tokens(), torch.ones(3, 32, dtype=torch.int64)
    labels = ids.clone()
    mask[0, 20:], labels[0, 20:], labels[1, :4] = 0, -100, -100
    found = model(input_ids=ids, attention_mask=mask, labels=labels)
    expected = plain(input_ids=ids, attention_mask=mask, labels=labels)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=0)
    assert model(ids).loss is None
    with pytest.raises(ValueError, match="pad on the right"):
        model(input_ids=ids, attention_mask=mask.flip(1))
    state = model.state_dict()
    assert len({tensor.data_ptr() for tensor in state.values()}) == len(state)
    model.load_state_dict(state)
    assert model.model.lm_head.weight is model.model.transformer.wte.weight
