"""SLoPe's measures: products by shape, the zeros of its second mask, and a layer with tiles and
with adapters that have products of their own."""

import pytest
import torch

from common_kernels import nm_mask
from experiments.bench.timing import Time
from experiments.support.errors import UserError
from reproduce.measure import base, operators, slope
from reproduce.measure.base import Base


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


def test_tiles_take_part_and_wrong_ones_stop_the_measurement(clock, monkeypatch):
    linear, asked = slope.Tiles.linear, []

    def spy(self, x, bias):
        asked.append(tuple(self.stack.shape))
        return linear(self, x, bias)

    monkeypatch.setattr(slope.Tiles, "linear", spy)
    quick(width=32).measure(print)
    assert set(asked) == {(3, 32, 32), (4, 32, 32)}  # queries, keys and values; the wide weight
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
