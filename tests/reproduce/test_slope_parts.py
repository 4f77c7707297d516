"""The parts of SLoPe that are measured: tiles and adapters apart are right, and ratios are of what
they say."""

import pytest
import torch

from common_kernels import nm_mask
from experiments.bench.timing import Time
from experiments.support.errors import UserError
from methods.nn.compressed import CompressedLinear
from reproduce import bench, slope_parts
from reproduce.bench import Config


def quick(**changed):
    fields = {"repeats": 2, "threads": 1, "batch": 1, "length": 16, "width": 64, "heads": 2}
    return Config(**fields | {"what": "layer", "method": "slope"} | changed)


@pytest.fixture
def emulated(monkeypatch):
    """Packed operands in bf16, as on a GPU, multiplied by an emulation."""
    monkeypatch.setattr(Config, "dtype", torch.bfloat16)
    monkeypatch.setattr(slope_parts, "sparse_products", lambda config: "cusparselt")


@pytest.fixture
def clock(monkeypatch):
    """Gives every call a time, after one call of it: 12 ms if dense, 8 if fused, 3 of hooks, else
    6."""
    calls = {}

    def fake(several, *_):
        calls.update(several)
        for call in several.values():
            call(0)
        kinds = {"dense": 12.0, "dense_fused": 8.0, "sparse_fused": 8.0, "hooks": 3.0}
        ms = {n: kinds.get(n.removeprefix("inference ").partition("_1")[0], 6.0) for n in several}
        return {name: Time(value, value, value, "host") for name, value in ms.items()}

    monkeypatch.setattr(slope_parts, "in_turns", fake)
    return calls


@pytest.mark.parametrize("packed", [False, True])
def test_a_layer_with_and_without_its_parts(packed, clock, request):
    if packed:
        request.getfixturevalue("emulated")
    found, used = slope_parts.of_layer(quick(ranks=(1.56,)), print)
    assert used == ("cusparselt fprop dgrad" if packed else "dense")
    assert found["training_sparse"] == 12 / (6 + 3) and found["training_sparse_fused"] == 12 / 11
    assert found["training_dense_fused"] == 12 / 8  # without hooks
    assert found["training_sparse_tiled"] == 12 / 9
    assert found["inference_dense_fused"] == 12 / 8
    for name in ("sparse_1_56", "sparse_tiled_1_56", "sparse_apart_1_56", "sparse", "sparse_tiled"):
        assert found[f"inference_{name}"] == 12 / 6
    assert found["inference_sparse_fused_1_56"] == 12 / 8
    assert len(clock) == 6 + 5 + 4


def test_tiles_take_part_and_wrong_ones_stop_the_measurement(clock, monkeypatch):
    cut, asked = slope_parts.DenseTiles.linear, []

    def spy(self, x, bias):
        asked.append(tuple(self.matrix.shape))
        return cut(self, x, bias)

    monkeypatch.setattr(slope_parts.DenseTiles, "linear", spy)
    slope_parts.of_layer(quick(width=32), print)
    assert set(asked) == {(96, 32), (128, 32)}  # queries, keys and values; the wide weight
    monkeypatch.setattr(slope_parts.DenseTiles, "grad", lambda self, dy: dy @ self.matrix * 1.1)
    with pytest.raises(UserError, match=r"tiles: off by .* no time is reported"):
        slope_parts.of_layer(quick(width=32), print)


def test_adapters_apart_leave_the_layers_as_they_were(clock):
    config = quick(width=32, ranks=(6.25,))
    build = slope_parts.partial(
        slope_parts.bench, config, build=slope_parts.gpt2(config), include=("*",)
    )
    arm = slope_parts.adapted(build, 2, "dense")
    want = slope_parts.evaluating(arm)(0)
    assert torch.allclose(slope_parts.apart(arm)(0), want, rtol=1e-5, atol=1e-5)
    assert {type(layer) for layer in arm.converted.layers.values()} == {CompressedLinear}


@pytest.mark.parametrize("packed", [False, True])
def test_squares_give_the_product_of_the_whole(packed):
    dtype = torch.bfloat16 if packed else torch.float32
    w = torch.randn(256, 64).to(dtype)
    w = w * nm_mask(w)
    x = torch.randn(16, 64).to(dtype)
    tiles = slope_parts.packed_tiles(w) if packed else slope_parts.DenseTiles(w)
    want = slope_parts.whole(w, packed).linear(x, None)
    eps = torch.finfo(dtype).eps
    assert torch.allclose(tiles.linear(x, None).float(), want.float(), rtol=4 * eps, atol=64 * eps)


@pytest.mark.parametrize("packed", [False, True])
def test_products_by_shape(packed, clock, request):
    if packed:
        request.getfixturevalue("emulated")
    found, used = slope_parts.of_shapes(quick(), print)
    assert used == ("cusparselt" if packed else "dense")
    assert found["tiled_speedup"] == found["attention_speedup"] == 1.0
    assert found["rank_10_speedup"] == 1.0 and found["multiply_ms"] == found["setup_ms"] == 6.0


def test_bi_mask_s_search_is_counted_once_in_its_period(tmp_path, monkeypatch):
    ms = {"dense": 2.0, "step": 6.0, "step with a search": 206.0}
    times = {name: Time(value, value, value, "host") for name, value in ms.items()}
    monkeypatch.setattr(slope_parts, "in_turns", lambda *_: times)
    config = quick(what="slow_down", method="bi_mask", width=32, runs=str(tmp_path))
    found = bench.run(config, lambda message: None)["metrics"]
    assert found["search_ms"] == 200.0 and found["slow_down"] == (6 + 200 / 100) / 2


@pytest.mark.parametrize(
    ("pattern", "zeros"), [("1:2", 1 / 8), ("2:4", 3 / 32), ("2:8", 0.058399), ("1:4", 0.079102)]
)
def test_double_pruning_imposes_what_the_lemma_says(pattern, zeros):
    """The standard deviation over n x n random masks is below 0.3 / n (2:4: 0.19)."""
    found, _ = slope_parts.of_imposed_zeros(quick(width=1024, pattern=pattern), print)
    assert found["closed_form"] == pytest.approx(zeros, abs=1e-6)
    for kind in ("random", "magnitude"):
        assert found[kind] == pytest.approx(zeros, abs=5 * 0.3 / 1024)
        n, m = map(int, pattern.split(":"))
        assert found[kind] + found[f"{kind}_density"] == pytest.approx(n / m)
