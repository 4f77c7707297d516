"""Measures: what is counted is counted right, and a result is known by its device."""

import dataclasses

import pytest
import torch

from experiments.bench import gates
from experiments.bench.timing import Time
from experiments.support.errors import UserError
from models.gpt2 import Block
from reproduce import measure
from reproduce.measure import adapters, base, layers
from reproduce.measure.adapters import Adapters
from reproduce.measure.base import Base
from tests.lifetimes import Operators

TINY = {"repeats": 2, "threads": 1, "batch": 1, "length": 16, "width": 32, "heads": 2}


def quick(what, **changed):
    """Tiny settings of a measure; it takes those of `TINY` that it has."""
    cls = measure.MEASURES[what]
    names = {field.name for field in dataclasses.fields(cls)}
    given = {**TINY, "method": "fst"}
    return cls(**{key: value for key, value in given.items() if key in names} | changed)


def metrics(what, tmp_path, **changed):
    settings = quick(what, runs=str(tmp_path), **changed)
    return measure.run(settings, lambda message: None)["metrics"]


def fake_times(monkeypatch, ms, *, call=True):
    """`in_turns` calls everything once and gives it the time `ms(name)`; the names are returned."""
    asked = []

    def in_turns(calls, *_, **__):
        asked.extend(calls)
        for one in calls.values() if call else ():
            one(0)
        return {name: Time(ms(name), ms(name), ms(name), "host") for name in calls}

    monkeypatch.setattr(base, "in_turns", in_turns)
    return asked


def test_overrides(tmp_path):
    settings = measure.load([
        "what=decoder", "method=slope", "ranks=[1.56,6.25]", "width=2560", "inner=10240",
        "shrink=16", "tier=smoke", "seed=0", f"runs='{tmp_path}'",
    ])  # fmt: skip
    assert (settings.width, settings.ffn, settings.ranks) == (160, 640, (1.56, 6.25))
    assert settings.directory().is_relative_to(tmp_path / "bench")
    for wrong, message in {
        "speed=1": "linear has no key speed",
        "width=wide": "width",
    }.items():
        with pytest.raises(UserError, match=message):
            measure.load(["what=linear", "method=slope", wrong])


def test_a_result_is_kept_and_known_by_its_device(tmp_path, monkeypatch, recwarn):
    settings = quick("linear", runs=str(tmp_path))
    assert measure.finished(settings) is None
    found = measure.run(settings, lambda message: None)["metrics"]
    assert not [w for w in recwarn if "on_step_begin" in str(w.message)]
    assert found["speedup"] == found["dense_ms"] / found["sparse_ms"]
    assert measure.finished(settings)["metrics"] == found
    monkeypatch.setattr(layers.Linear, "measure", None)  # would fail: nothing is measured again
    assert measure.run(settings)["metrics"] == found
    monkeypatch.setattr(measure.results, "cpu_name", lambda: "another machine")
    assert measure.finished(settings) is None


@pytest.mark.filterwarnings("ignore:on_step_begin")
def test_products_are_checked_once_and_wrong_ones_are_not_timed(monkeypatch, tmp_path):
    monkeypatch.setattr(gates, "tolerance", lambda *_: -1.0)
    base.gate.cache_clear()
    settings = quick("linear", runs=str(tmp_path))
    with pytest.raises(UserError, match="no time is reported"):
        measure.run(settings)
    assert measure.finished(settings) is None
    monkeypatch.undo()
    fake_times(monkeypatch, lambda name: 1.0)
    for seed in range(2):
        for method in ("fst", "s_ste"):
            quick("gpt2", method=method, seed=seed).measure(print)
    assert base.gate.cache_info().currsize == 4  # two linears of two methods


# Operators that wait for a GPU, which CUDA graphs cannot capture.
WAITING = ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.lift_fresh")
LLAMA = {"kv_heads": 1, "inner": 96, "width": 64}
SAM = {"model": "samvit_large_patch16", "image": 32, "width": 32, "heads": 2}


@pytest.mark.filterwarnings("ignore:on_step_begin")
def test_no_timed_call_waits_for_the_gpu(monkeypatch):
    """Such a call would be launched from Python, and its time would be that of the launches."""
    operators = Operators()

    def once(calls, *_, **__):
        for call in calls.values():
            call(0)
            with operators:
                call(0)
        return {name: Time(1.0, 1.0, 1.0, "graph") for name in calls}

    monkeypatch.setattr(base, "in_turns", once)
    for settings in (
        quick("gpt2"),
        quick("gpt2", method="s_ste"),
        quick("decoder", method="slope", width=64, ranks=(6.25,)),
        quick("decoder", method="slope", **LLAMA),
        quick("decoder", **LLAMA),
        quick("linear", method="semi_sparse"),
        quick("sam", method="semi_sparse", **SAM),
    ):
        _, used = settings.measure(print)
        assert used == "dense, in a CUDA graph"
    assert not [name for name, _ in operators.found if name.startswith(WAITING)]


def test_a_llama_layer_is_that_of_transformers():
    layer = base.LlamaLayer(quick("decoder", **LLAMA))
    x = torch.randn(2, 16, 64)
    want = layer.model(inputs_embeds=x, use_cache=False).last_hidden_state
    torch.testing.assert_close(layer(x), want, rtol=0, atol=0)


def test_memory_of_a_decoder_layer(tmp_path, monkeypatch):
    """In fp32, width C, 12 C^2 weights, all 2:4 for SLoPe: 8.1875 of 16 bytes in training (values,
    gradient, moments; a bit a weight, a bit a value) and 2.125 of 4 stored; norms stay dense. In
    bf16 2 + 2 + 8 bytes of a dense weight: the moments stay in fp32."""
    found = metrics("decoder", tmp_path, method="slope", width=64, ranks=(6.25,))
    linears, norms = 12 * 64**2, 2 * 64
    trained = (8.1875 * linears + 16 * norms) / (16 * (linears + norms))
    stored = (2.125 * linears + 4 * norms) / (4 * (linears + norms))
    assert found["train_memory"] == pytest.approx(trained, rel=1e-6)
    assert found["inference_memory"] == pytest.approx(stored, rel=1e-6)
    ends = 2 * (64 + 256) + (64 + 192) + (64 + 64)  # inputs and outputs of the four linears
    adapters = 4 * 4 * ends / (4 * (linears + norms))  # rank 4 = 6.25 % of 64
    assert found["inference_memory_6_25"] == pytest.approx(stored + adapters, rel=1e-6)

    monkeypatch.setattr(Base, "dtype", torch.bfloat16)
    settings = quick("decoder", method="slope", width=64)
    dense, slope = (
        layers.training_bytes(base.bench(settings, name, lambda: Block(settings.block), ("*",)))
        for name in ("dense", "slope")
    )
    assert dense == 12 * (linears + norms)
    assert slope == 12 * (linears // 2 + norms) + linears // 8 + linears // 16


def test_network_and_block_are_measured_in_turns(tmp_path, monkeypatch):
    for method in ("fst", "s_ste"):
        calls = fake_times(monkeypatch, lambda name: 2.0 + ("dense" in name))
        found = metrics("gpt2", tmp_path, method=method)
        for part in ("ffn", "block"):
            assert {f"{part} dense", f"{part} whole", f"{part} products"} <= set(calls)
            assert found[f"{part}_dense_ms"] == 64 * 3 and found[f"{part}_speedup"] == 3 / 2
            dense = method == "fst"  # it ends dense: there is nothing to measure
            assert (f"{part} inference sparse" not in calls) is dense
            assert found[f"{part}_inference_speedup"] == (1.0 if dense else 3 / 2)


def test_rates_of_operators_are_those_of_their_times(tmp_path):
    found = metrics("search", tmp_path, inner=64)
    assert found["exact_gbs"] == pytest.approx(4 * 64 * 32 / found["exact_ms"] / 1e6)
    ratio = found["two_approx_fp32_ms"] / found["exact_fp32_ms"]
    assert found["over_two_approx_fp32"] == pytest.approx(ratio)
    found = metrics("geglu", tmp_path, inner=64)  # 16 tokens of 2 x 64 features in fp32
    assert found["ours_row_gbs"] == pytest.approx(4 * 16 * 128 * 4 / found["ours_row_ms"] / 1e6)
    assert found["over_torch"] == found["torch_column_ms"] / found["ours_column_ms"]
    found = metrics("product", tmp_path, method="s_ste")
    assert found["tflops"] == pytest.approx(2 * 32**3 / found["ms"] / 1e9)


def test_a_step_has_all_its_micro_batches_and_a_share_of_the_search(monkeypatch):
    for method in ("fst", "s_ste"):
        ms = {"dense": 5.0, "dense, micro-batch": 3.0, method: 9.0, f"{method}, micro-batch": 4.0}
        ms[f"{method}, masks chosen"] = 49.0
        calls = fake_times(monkeypatch, ms.get)
        settings = quick("train", method=method, model="nano", accumulate=8, steps=3600)
        found, used = settings.measure(print)
        share = 1.0 if method == "fst" else 0.0  # a fortieth of 40 ms
        assert (f"{method}, masks chosen" in calls) is (method == "fst")
        assert found["dense_ms"] == 5 + 7 * 3 and found["sparse_ms"] == 9 + share + 7 * 4
        assert found["dense_hours"] == pytest.approx(0.026)
        over_a_run = found["dense_ms"] / (found["sparse_ms"] * 5 / 6 + found["dense_ms"] / 6)
        assert (found["run_speedup"], used) == (pytest.approx(over_a_run), "dense")


def test_the_search_of_bi_mask_is_counted_once_in_its_period(tmp_path, monkeypatch):
    ms = {"dense": 2.0, "step": 6.0, "step with a search": 206.0}
    fake_times(monkeypatch, ms.get, call=False)
    found = metrics("slow_down", tmp_path)
    assert found["search_ms"] == 200.0 and found["slow_down"] == (6 + 200 / 100) / 2


def test_similarity_is_that_of_the_step_to_the_end(monkeypatch):
    """Two layers, four steps: L stays, R is halfway at cosines of 0 and 0.6 to its end."""
    ends = [torch.tensor([[0.0, 1.0]]), torch.tensor([[3.0, 4.0]])]
    still, turned = [torch.ones(1, 2)] * 2, [torch.tensor([[1.0, 0.0]])] * 2
    states = [[*zip(still, right, strict=True)] for right in (turned, turned, ends, ends)]
    monkeypatch.setattr(adapters, "trained", lambda config: states)
    config = Adapters(model="gpt2_nano", adapter_rank=4, after=50)
    found, _ = config.measure(print)
    up = (0 + 0.6) / 2
    assert found == pytest.approx({"down": 1.0, "up": up, "both": up, "steps": 4})
    after = Adapters(model="gpt2_nano", adapter_rank=4, after=75)
    assert after.measure(print)[0]["up"] == pytest.approx(1.0)
