"""Tests of what is timed without training: the right tokens, weights packed where it is said."""

import pytest
import torch
from torch import nn

from common_kernels import check24
from common_kernels.pack import BUFFERED
from experiments.support.errors import UserError
from models import packed
from models.packed import PackedProduct
from reproduce import measure
from reproduce.measure import packed as packing_
from reproduce.measure import sam
from reproduce.measure.packed import Decode, Decoding, llama, to_packed

TINY = {"width": 64, "inner": 96, "heads": 4, "repeats": 2, "threads": 1}


@pytest.fixture
def packing(monkeypatch):
    """Packed products on a CPU, emulated; the numbers of tokens that they were chosen for."""
    asked = []
    monkeypatch.setattr(
        packing_, "is_faster", lambda problem, _: asked.append(problem.tokens) or problem.rows > 64
    )
    return asked


def test_a_cache_of_fixed_size_gives_the_logits_of_the_whole_text():
    model = llama(Decode(layers=2, **TINY))
    decoding = Decoding(model, 5, 8)
    whole = model(decoding.ids).logits[0]
    assert decoding.prefill() == whole[4].argmax()
    for at in (5, 6):
        decoding.decoder.step(decoding.ids[:, at])
    assert decoding.step() == decoding.step() == whole[7].argmax()
    assert decoding.prefill() == whole[4].argmax()


def test_tokens_a_second_are_those_of_prompt_and_text(tmp_path):
    config = Decode(layers=1, length=4, new=6, runs=str(tmp_path), **TINY)
    found = measure.run(config, lambda _: None)["metrics"]
    for name in ("dense", "sparse"):
        seconds = (found[f"{name}_prompt_ms"] + 6 * found[f"{name}_step_ms"]) / 1e3
        assert found[f"{name}_rate"] == pytest.approx(6 / seconds)
    assert found["speedup"] == pytest.approx(found["sparse_rate"] / found["dense_rate"])


def test_chosen_linears_are_packed_and_the_rest_stays(packing):
    torch.manual_seed(0)
    model = nn.ModuleDict({"mlp": nn.Linear(32, 64), "head": nn.Linear(64, 32)}).bfloat16()
    head = model["head"].weight.clone()
    x = torch.randn(3, 32, dtype=torch.bfloat16)
    assert to_packed(model, lambda name: name == "mlp", (1, 20), x.device) == BUFFERED
    layer = model["mlp"]
    assert isinstance(layer, PackedProduct) and layer.limits == (0, 0)
    assert packing == [8, 24]  # as many as the products take
    assert torch.equal(model["head"].weight, head)
    assert int(check24(layer.weight)) == 0
    with torch.no_grad():
        assert layer.runs_packed(x, 3)
        torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.weight, layer.bias))


def test_few_tokens_have_a_product_of_their_own_and_many_run_packed_where_that_is_faster(packing):
    torch.manual_seed(0)
    model = nn.ModuleDict({"up": nn.Linear(64, 128), "down": nn.Linear(128, 64)}).bfloat16()
    used = to_packed(model, lambda _: True, (1, 20), torch.device("cpu"), few=16)
    assert used == f"few, {BUFFERED}" and packing == [24, 24]
    assert (model["up"].limits, model["down"].limits) == ((16, 0), (16, None))


def test_a_wrong_packed_product_is_not_timed(packing, monkeypatch):
    monkeypatch.setattr(packed, "linear24", lambda packed, x, bias: x @ x.t())
    model = nn.ModuleDict({"mlp": nn.Linear(64, 64)}).bfloat16()
    with pytest.raises(UserError, match="the packed product 64 x 64 -> 64 is off by"):
        to_packed(model, lambda _: True, (64,), torch.device("cpu"))


@pytest.mark.parametrize("parts", [(), ("mlp",), ("attn", "mlp")])
def test_images_a_second(parts, tmp_path):
    config = sam.EncoderInference(
        model="samvit_base_patch16", width=32, heads=2,
        image=32, batch=2, repeats=2, threads=1, packed=parts, runs=str(tmp_path),
    )  # fmt: skip
    found = measure.run(config, lambda _: None)["metrics"]
    assert found["rate"] > 0
    assert (found["speedup"] == 1.0) is (not parts)
    assert found["mib"] is None  # a CPU does not tell
