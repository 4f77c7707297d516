"""transformers' causal language models in the trainer's form, and back without a lost bit."""

import json

import pytest
import torch
import torch.nn.functional as F

from methods import ste
from models.gpt2 import from_hf
from models.hf import FAMILIES, CausalLM, ForTrainer


def tokens(seed=1):
    return torch.randint(0, 320, (3, 32), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def checkpoint(hf_model, tmp_path):
    """checkpoint("gpt2") -> (the plain model, the folder of its checkpoint)."""

    def write(family, randomise=True):
        model = hf_model(family)
        with torch.no_grad():  # no bias or gain can be lost unseen
            for parameter in model.parameters() if randomise else ():
                parameter.copy_(0.2 * torch.randn_like(parameter))
        folder = tmp_path / family
        model.save_pretrained(folder)
        return model, folder

    return write


def test_logits_and_loss_are_those_of_transformers(checkpoint):
    for family in FAMILIES:
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


def test_every_linear_of_the_blocks_can_be_converted(checkpoint):
    for family in FAMILIES:
        _, folder = checkpoint(family)
        model = CausalLM.from_pretrained(folder)
        method = ste.Method(ste.Config(include="all"))
        assert len(method.convert(model).names) == 2 * {"gpt2": 4, "opt": 6}.get(family, 7)
        assert not any("Conv1D" in type(m).__name__ for m in model.modules())
        with pytest.raises(ValueError, match=r"call the method's finalize\(model\) first"):
            model.save_pretrained(folder.with_name("export"))
        assert not folder.with_name("export").exists()


def test_a_saved_model_is_the_loaded_one_bit_for_bit(checkpoint, tmp_path):
    for family in FAMILIES:
        from transformers import AutoModelForCausalLM

        plain, folder = checkpoint(family)
        export = tmp_path / f"export-{family}"
        model = CausalLM.from_pretrained(folder)
        model.save_pretrained(export)
        assert {path.suffix for path in export.iterdir()} == {".json", ".safetensors"}
        again = AutoModelForCausalLM.from_pretrained(export)
        state, expected = again.state_dict(), plain.state_dict()
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], expected[name]) for name in expected)
        assert type(again) is type(plain)
        # The rates of dropout, which training here sets to 0, included.
        configs = [json.loads((path / "config.json").read_text()) for path in (folder, export)]
        assert configs[0] == configs[1]
        assert model(tokens())[0].equal(CausalLM.from_pretrained(export)(tokens())[0])


def test_lengths(checkpoint):
    _, folder = checkpoint("opt")
    model = CausalLM.from_pretrained(folder, block_size=16)
    with pytest.raises(ValueError, match=r"32 tokens is longer than the model's block_size=16"):
        model(tokens())
    with pytest.raises(ValueError, match=r"block_size=64, but .* takes at most 32"):
        CausalLM.from_pretrained(folder, block_size=64)


def test_what_cannot_be_loaded_is_one_line(hf_model, checkpoint, tmp_path):
    """No pickle is read; and weights that are missing are not made up, as transformers does."""
    from safetensors.torch import load, save_file
    from transformers import BertConfig, BertForMaskedLM

    for name in ("empty", "pickle", "bert"):
        (tmp_path / name).mkdir()
    model = hf_model("opt")
    model.config.save_pretrained(tmp_path / "pickle")
    torch.save(model.state_dict(), tmp_path / "pickle" / "pytorch_model.bin")
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertForMaskedLM(BertConfig(vocab_size=320, **shape)).save_pretrained(tmp_path / "bert")
    none = "no causal language model in"
    for name, said in (("empty", none), ("pickle", none), ("bert", "it is a bert, none of gpt2")):
        with pytest.raises(ValueError, match=said) as caught:
            CausalLM.from_pretrained(tmp_path / name)
        assert "\n" not in str(caught.value)
    families = (("llama", CausalLM.from_pretrained, "layers.1"), ("gpt2", from_hf, "h.1"))
    for family, read, part in families:
        _, folder = checkpoint(family)
        path = folder / "model.safetensors"
        whole = load(path.read_bytes())  # not mapped: the file is written over
        save_file({k: v for k, v in whole.items() if part not in k}, path, {"format": "pt"})
        with pytest.raises(ValueError, match=rf"files lack .*{part}\..* and \d+ more"):
            read(folder)
        save_file(whole, path, {"format": "pt"})
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.raises(ValueError, match=none):
            read(folder)
    with pytest.raises(ValueError, match="there is no such folder"):
        from_hf("openai-community/gpt2")


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
