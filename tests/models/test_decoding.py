"""Generation with a cache of fixed size: the logits are those of the whole text without a cache, in
all families, again and again, and a step reads nothing back from the device."""

import functools

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from models.decoding import Decoder
from tests.lifetimes import Reads

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 64}
GATED = {**SIZES, "intermediate_size": 128, "num_key_value_heads": 2}
MODELS = {
    "llama": ("llama", GATED),
    "gpt2": ("gpt2", {**SIZES, "num_attention_heads": 2}),
    "opt": ("opt", {**SIZES, "ffn_dim": 128, "word_embed_proj_dim": 64}),
    "short window": ("mistral", {**GATED, "sliding_window": 8}),
}


@pytest.fixture
def built(hf_model):
    """built("short window") -> a model of `MODELS`."""

    def build(name):
        family, settings = MODELS[name]
        return hf_model(family, **settings).to(DEVICE)

    return build


class ReadBack(TorchDispatchMode):
    """Fails where a number is read back, for which a CUDA graph cannot wait."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in str(function) and "nonzero" not in str(function)
        return function(*args, **(kwargs or {}))


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(MODELS))
@torch.no_grad()
def test_logits_are_those_of_the_whole_text(name, built):
    model = built(name)
    ids = torch.randint(0, 320, (3, 20), device=DEVICE)
    decoder = Decoder(model, 3, 20)
    assert decoder.fixed == (name != "short window")
    for turn in range(2):
        want = model(input_ids=ids, use_cache=False).logits
        found = [decoder.read(ids[:, :12]).clone()]
        found += [decoder.step(ids[:, at]).clone() for at in range(12, 20)]
        # fp32 sums in another order, over two layers with logits below 1
        torch.testing.assert_close(torch.stack(found, 1), want[:, 11:], rtol=0, atol=1e-5)
        ids = ids.flip(1) if not turn else ids
    if decoder.fixed:
        decoder.place(13)
        torch.testing.assert_close(decoder.step(ids[:, 13]), want[:, 13], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt"])
@torch.no_grad()
def test_one_graph_serves_all_blocks(name, built, monkeypatch):
    model, ids = built(name), torch.randint(0, 320, (2, 12), device=DEVICE)
    compiles, eager = torch.compile, functools.partial(torch.compile, backend="aot_eager")
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(torch, "compile", eager if DEVICE.type == "cpu" else compiles)
    plain, compiled = Decoder(model, 2, 12), Decoder(model, 2, 12, compiled=True)
    torch.testing.assert_close(compiled.read(ids[:, :8]), plain.read(ids[:, :8]))
    for at in range(8, 12):
        found, want = (decoder.step(ids[:, at]) for decoder in (compiled, plain))
        torch.testing.assert_close(found, want, rtol=0, atol=1e-5)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert not any("forward" in vars(module) for module in model.modules())


@torch.no_grad()
def test_a_text_that_is_too_long_is_refused(built):
    """On a GPU an index beyond the cache would end the process."""
    decoder, ids = Decoder(built("llama"), 1, 9), torch.zeros(1, 10, dtype=torch.int64).to(DEVICE)
    with pytest.raises(ValueError, match=r"^10 tokens do not fit into a decoder for 9$"):
        decoder.read(ids)
    decoder.read(ids[:, :9])
    with pytest.raises(ValueError, match="10 tokens"):
        decoder.step(ids[:, 0])


@pytest.mark.parametrize("name", [name for name in MODELS if name != "short window"])
@torch.no_grad()
def test_a_step_can_be_replayed_from_a_graph(name, built):
    """It reads nothing back, and keeps what it reads where it was."""
    decoder = Decoder(built(name), 2, 8)
    ids = torch.randint(0, 320, (2, 5), device=DEVICE)
    decoder.read(ids)
    with ReadBack():
        decoder.logits(ids[:, :1])
    with Reads() as reads:
        decoder.logits(ids[:, :1])
    assert not reads.lost()
