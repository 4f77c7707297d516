"""SLoPe's measures, what is timed without training, and SAM's image encoder: torchao's Table 2."""

import pytest
import timm
import torch
from torch import nn

from common_kernels import check24, nm_mask
from common_kernels.pack import BUFFERED
from experiments.bench.timing import Time
from experiments.support.errors import UserError
from models import packed
from models.packed import PackedProduct
from reproduce import measure
from reproduce.measure import base, operators, sam, slope
from reproduce.measure import packed as packing_
from reproduce.measure.base import Base
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


def test_a_wrong_packed_product_is_not_timed(packing, monkeypatch):
    monkeypatch.setattr(packed, "linear24", lambda packed, x, bias: x @ x.t())
    model = nn.ModuleDict({"mlp": nn.Linear(64, 64)}).bfloat16()
    with pytest.raises(UserError, match="the packed product 64 x 64 -> 64 is off by"):
        to_packed(model, lambda _: True, (64,), torch.device("cpu"))


@pytest.mark.parametrize("parts", [(), ("attn", "mlp")])
def test_images_a_second(parts, tmp_path):
    config = sam.EncoderInference(
        model="samvit_base_patch16", width=32, heads=2,
        image=32, batch=2, repeats=2, threads=1, packed=parts, runs=str(tmp_path),
    )  # fmt: skip
    found = measure.run(config, lambda _: None)["metrics"]
    assert found["rate"] > 0
    assert (found["speedup"] == 1.0) is (not parts)
    assert found["mib"] is None  # a CPU does not tell


def quick(**changed):
    fields = {"repeats": 2, "threads": 1, "batch": 1, "length": 16, "width": 64, "heads": 2}
    return slope.SlopeLayer(**fields | changed)


@pytest.fixture(params=["dense", "cusparselt"])
def products(request, monkeypatch):
    """Set what multiplies: dense products, as on a CPU, or packed operands in bf16, as on a GPU, by
    an emulation."""
    if request.param == "cusparselt":
        monkeypatch.setattr(Base, "dtype", torch.bfloat16)
        monkeypatch.setattr(slope, "sparse_products", lambda config: "cusparselt")
    return request.param


@pytest.fixture
def clock(monkeypatch):
    """Gives every call a time, after one call of it: 12 ms if dense, 8 if fused, 3 of hooks, else
    6."""
    calls = {}

    def fake(several, *_, **__):
        calls.update(several)
        for call in several.values():
            call(0)
        kinds = {"dense": 12.0, "dense_fused": 8.0, "sparse_fused": 8.0, "hooks": 3.0}
        ms = {n: kinds.get(n.removeprefix("inference ").partition("_1")[0], 6.0) for n in several}
        return {name: Time(value, value, value, "host") for name, value in ms.items()}

    monkeypatch.setattr(base, "in_turns", fake)
    return calls


def test_a_layer_with_and_without_its_parts(products, clock):
    found, used = quick(ranks=(1.56,)).measure(print)
    assert used == {"dense": "dense", "cusparselt": "cusparselt fprop dgrad"}[products]
    assert found["training_sparse"] == 12 / (6 + 3) and found["training_sparse_fused"] == 12 / 11
    assert found["training_dense_fused"] == 12 / 8  # without hooks
    assert found["training_sparse_tiled"] == 12 / 9
    assert found["inference_dense_fused"] == 12 / 8
    for name in ("sparse_1_56", "sparse_tiled_1_56", "sparse_apart_1_56", "sparse", "sparse_tiled"):
        assert found[f"inference_{name}"] == 12 / 6
    assert found["inference_sparse_fused_1_56"] == 12 / 8
    assert len(clock) == 6 + 5 + 4


@pytest.mark.usefixtures("clock")
def test_wrong_tiles_stop_the_measurement(monkeypatch):
    linear = slope.Tiles.linear
    monkeypatch.setattr(slope.Tiles, "grad", lambda self, dy: 1.1 * linear(self, dy, None))
    with pytest.raises(UserError, match=r"tiles: off by .* no time is reported"):
        quick(width=32).measure(print)


def test_tiles_give_the_product_of_the_whole(products):
    dtype = Base.dtype if products == "cusparselt" else torch.float32
    w, x = torch.randn(256, 64).to(dtype), torch.randn(16, 64).to(dtype)
    w, packed = w * nm_mask(w), products == "cusparselt"
    want, eps = slope.whole(w, packed).linear(x, None), torch.finfo(dtype).eps
    found = slope.tiled(w, packed).linear(x, None)
    assert torch.allclose(found.float(), want.float(), rtol=4 * eps, atol=64 * eps)


def test_products_by_shape(products, clock):
    found, used = slope.Shapes(length=16, width=64).measure(print)
    assert used == products
    assert found["tiled_speedup"] == found["attention_speedup"] == 1.0
    assert found["rank_10_speedup"] == 1.0 and found["multiply_ms"] == found["setup_ms"] == 6.0


@pytest.mark.parametrize(
    ("pattern", "zeros"), [("1:2", 1 / 8), ("2:4", 3 / 32), ("2:8", 0.058399), ("1:4", 0.079102)]
)
def test_double_pruning_imposes_what_the_lemma_says(pattern, zeros):
    """The standard deviation over n x n random masks is below 0.3 / n (2:4: 0.19)."""
    found, _ = operators.ImposedZeros(width=1024, pattern=pattern).measure(print)
    assert found["closed_form"] == pytest.approx(zeros, abs=1e-6)
    for kind in ("random", "magnitude"):
        assert found[kind] == pytest.approx(zeros, abs=5 * 0.3 / 1024)
        n, m = map(int, pattern.split(":"))
        assert found[kind] + found[f"{kind}_density"] == pytest.approx(n / m)


def test_the_encoder_is_that_of_sam_vit_l_and_of_timm():
    """Its size as published: 308,278,272 parameters with the neck, 256 channels on a 16th."""
    with torch.device("meta"):
        model = sam.encoder("samvit_large_patch16", img_size=1024)
        out = model(torch.empty(1, 3, 1024, 1024))
    assert sum(p.numel() for p in model.parameters()) == 308_278_272
    assert out.shape == (1, 256, 64, 64)
    linears = [name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    assert sum("mlp." in name for name in linears) == 48
    small = {"img_size": 32, "embed_dim": 16, "num_heads": 2, "depth": 2}
    small["global_attn_indexes"] = [1]
    torch.manual_seed(0)
    ours = sam.encoder("samvit_large_patch16", **small)
    for block in ours.blocks:
        torch.nn.init.normal_(block.attn.rel_pos_h)
        torch.nn.init.normal_(block.attn.rel_pos_w)
    theirs = timm.create_model("samvit_large_patch16", num_classes=0, global_pool="", **small)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 3, 32, 32)
    found = []
    for model in (ours, theirs):
        y = model(x)
        y.square().sum().backward()
        found.append([y, *(p.grad for p in model.parameters())])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
