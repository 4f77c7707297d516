"""SLoPe's products by the shape of the weight, and the zeros of its second mask."""

import pytest
import torch

from experiments.bench.timing import Time
from reproduce.measure import imposed_zeros, shapes
from reproduce.measure.base import Base


@pytest.mark.parametrize("packed", [False, True])
def test_products_by_shape(packed, monkeypatch):
    def fake(calls, *_):
        for call in calls.values():
            call(0)
        return {name: Time(6.0, 6.0, 6.0, "host") for name in calls}

    monkeypatch.setattr(shapes, "in_turns", fake)
    if packed:  # packed operands in bf16, as on a GPU, multiplied by an emulation
        monkeypatch.setattr(Base, "dtype", torch.bfloat16)
        monkeypatch.setattr(shapes, "sparse_products", lambda config: "cusparselt")
    found, used = shapes.measure(shapes.Settings(length=16, width=64), print)
    assert used == ("cusparselt" if packed else "dense")
    assert found["tiled_speedup"] == found["attention_speedup"] == 1.0
    assert found["rank_10_speedup"] == 1.0 and found["multiply_ms"] == found["setup_ms"] == 6.0


@pytest.mark.parametrize(
    ("pattern", "zeros"), [("1:2", 1 / 8), ("2:4", 3 / 32), ("2:8", 0.058399), ("1:4", 0.079102)]
)
def test_double_pruning_imposes_what_the_lemma_says(pattern, zeros):
    """The standard deviation over n x n random masks is below 0.3 / n (2:4: 0.19)."""
    found, _ = imposed_zeros.measure(imposed_zeros.Settings(width=1024, pattern=pattern), print)
    assert found["closed_form"] == pytest.approx(zeros, abs=1e-6)
    for kind in ("random", "magnitude"):
        assert found[kind] == pytest.approx(zeros, abs=5 * 0.3 / 1024)
        n, m = map(int, pattern.split(":"))
        assert found[kind] + found[f"{kind}_density"] == pytest.approx(n / m)
