"""Cells of speed tables: what is counted is counted right, and a result is known by its device."""

import contextlib
import gc
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from experiments.bench.timing import Time, in_turns
from experiments.support.errors import UserError
from reproduce import bench, operator_speed, sam, speed, speed_setup, step_speed
from reproduce.bench import Config, load


def quick(**changed):
    fields = {"repeats": 2, "threads": 1, "batch": 1, "length": 16, "width": 32, "heads": 2}
    return Config(**fields | {"method": "fst"} | changed)


def test_overrides(tmp_path):
    config = load([
        "what=decoder", "method=slope", "ranks=[1.56,6.25]", "width=2560", "inner=10240",
        "shrink=16", "tier=smoke", "seed=0", f"runs='{tmp_path}'",
    ])  # fmt: skip
    assert (config.width, config.inner, config.ffn, config.ranks) == (160, 640, 640, (1.56, 6.25))
    assert config.directory().is_relative_to(tmp_path / "bench")
    for wrong, message in {
        "speed=1": "bench has no key speed",
        "width=wide": "width",
        "method=magic": "method=magic; choose of dense",
    }.items():
        with pytest.raises(UserError, match=message):
            load(["what=linear", "method=slope", wrong])


def test_a_result_is_kept_and_known_by_its_device(tmp_path, monkeypatch, recwarn):
    config = quick(what="linear", runs=str(tmp_path))
    assert bench.finished(config) is None
    result = bench.run(config, lambda message: None)
    assert not [w for w in recwarn if "on_step_begin" in str(w.message)]
    metrics = result["metrics"]
    assert metrics["speedup"] == metrics["dense_ms"] / metrics["sparse_ms"]
    assert bench.finished(config)["metrics"] == metrics
    monkeypatch.setattr(bench, "speed", None)  # would fail: nothing is measured again
    assert bench.run(config)["metrics"] == metrics
    monkeypatch.setattr(bench.results, "cpu_name", lambda: "another machine")
    assert bench.finished(config) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_is_asked_for_in_vain():
    with pytest.raises(UserError, match="torch sees no GPU here; tier=smoke runs on a CPU"):
        bench.run(quick(what="linear", device="cuda"))


def test_wrong_products_stop_the_measurement(monkeypatch, tmp_path):
    monkeypatch.setattr(speed_setup.arms, "relative_error", lambda value, truth: 1.0)
    speed_setup.check_once.cache_clear()
    config = quick(what="linear", runs=str(tmp_path))
    with pytest.raises(UserError, match="no time is reported"):
        bench.run(config)
    assert bench.finished(config) is None


def test_products_are_checked_once_for_all_repeats(monkeypatch):
    checked = []
    monkeypatch.setattr(speed_setup.linear, "gate", lambda *of: checked.append(of))
    speed_setup.check_once.cache_clear()
    for seed in range(2):
        for method in ("fst", "s_ste"):
            speed_setup.check_ffn(quick(what="gpt2", method=method, seed=seed))
    once = [(16, 32, 128), (16, 128, 32)]
    assert [of[:2] for of in checked] == [(m, s) for m in ("fst", "s_ste") for s in once]
    speed_setup.check_once.cache_clear()


def test_no_mask_of_a_timed_layer_is_drawn_on_the_cpu(monkeypatch):
    """Drawing the random masks of OPT-66B's layer takes longer than timing the layer."""
    config = quick(what="decoder", method="slope", width=64)
    monkeypatch.setattr(torch, "rand", None)
    arm = speed_setup.bench(config, "slope", speed_setup.gpt2(config), ("*",), adapter_rank=4,
                            adapter_fraction=1.0, total_steps=1)  # fmt: skip
    layers = arm.converted.layers.values()
    assert all(2 * layer.current_mask().sum() == layer.current_mask().numel() for layer in layers)


class Waits(TorchDispatchMode):
    """Collects the operators that would wait for a GPU, which CUDA graphs cannot capture."""

    KINDS = ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.lift_fresh")

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if str(operator).startswith(self.KINDS):
            self.found.append(str(operator))
        return operator(*args, **(kwargs or {}))


LLAMA = {"kv_heads": 1, "inner": 96, "width": 64}
SAM = {"model": "samvit_large_patch16", "image": 32, "width": 32, "heads": 2}


@pytest.mark.filterwarnings("ignore:on_step_begin")
@pytest.mark.parametrize(
    "changed",
    [
        {"what": "gpt2"},
        {"what": "gpt2", "method": "s_ste"},
        {"what": "decoder", "method": "slope", "width": 64, "ranks": (6.25,)},
        {"what": "decoder", "method": "slope", **LLAMA},
        {"what": "decoder", **LLAMA},
        {"what": "linear", "method": "semi_sparse"},
        {"what": "sam", "method": "semi_sparse", **SAM},
    ],
)
def test_no_timed_call_waits_for_the_gpu(changed, monkeypatch):
    """Such a call would be launched from Python, and its time would be that of the launches."""
    waits = Waits()

    def once(calls, *_, **__):
        for call in calls.values():
            call(0)
            with waits:
                call(0)
        return {name: Time(1.0, 1.0, 1.0, "graph") for name in calls}

    for module in (speed, sam):
        monkeypatch.setattr(module, "in_turns", once)
    config = quick(**changed)
    _, used = bench.MEASURES[config.what](config, print)
    assert used == "dense, in a CUDA graph"
    assert waits.found == []


def test_a_llama_layer_is_that_of_transformers():
    layer = speed_setup.llama_layer(quick(what="decoder", **LLAMA))()
    x = torch.randn(2, 16, 64)
    want = layer.model(inputs_embeds=x, use_cache=False).last_hidden_state
    torch.testing.assert_close(layer(x), want, rtol=0, atol=0)


def test_memory_of_a_failed_measurement_is_freed_before_the_next(monkeypatch, tmp_path):
    """The failed one's traceback still holds its tensors when it ends."""
    held = []

    class Big:
        def __init__(self):
            self.itself = self
            held.append(weakref.ref(self))

    def fails(*_):
        big = Big()
        raise RuntimeError(f"out of memory with {big}")

    def works(*_):
        assert held[0]() is None
        return {}, "dense"

    for name, measure in {"linear": fails, "gpt2": works}.items():
        monkeypatch.setitem(bench.MEASURES, name, measure)
    gc.disable()  # so that only a measurement collects
    try:
        with contextlib.suppress(RuntimeError):
            bench.run(quick(what="linear", runs=str(tmp_path)))
        bench.run(quick(what="gpt2", runs=str(tmp_path)), print)
    finally:
        gc.enable()


def test_memory_of_a_decoder_layer(tmp_path):
    """In fp32, width C, 12 C^2 weights, all 2:4 for SLoPe: 8.1875 of 16 bytes in training (values,
    gradient, moments; a bit a weight, a bit a value) and 2.125 of 4 stored; norms stay dense."""
    config = quick(what="decoder", method="slope", width=64, ranks=(6.25,), runs=str(tmp_path))
    found = bench.run(config, lambda message: None)["metrics"]
    linears, norms = 12 * 64**2, 2 * 64
    train = (8.1875 * linears + 16 * norms) / (16 * (linears + norms))
    stored = (2.125 * linears + 4 * norms) / (4 * (linears + norms))
    assert found["train_memory"] == pytest.approx(train, rel=1e-6)
    assert found["inference_memory"] == pytest.approx(stored, rel=1e-6)
    ends = 2 * (64 + 256) + (64 + 192) + (64 + 64)  # inputs and outputs of the four linears
    adapters = 4 * 4 * ends / (4 * (linears + norms))  # rank 4 = 6.25 % of 64
    assert found["inference_memory_6_25"] == pytest.approx(stored + adapters, rel=1e-6)


def test_moments_are_in_fp32_whatever_the_weights_are_in(monkeypatch):
    """In bf16: 2 + 2 + 8 bytes of a dense weight; for SLoPe half of that, a bit a weight and a bit
    a value."""
    monkeypatch.setattr(Config, "dtype", torch.bfloat16)
    config = quick(what="decoder", method="slope", width=64)
    linears, norms = 12 * 64**2, 2 * 64
    dense, slope = (
        speed.training_bytes(speed_setup.bench(config, name, speed_setup.gpt2(config), ("*",)))
        for name in ("dense", "slope")
    )
    assert dense == 12 * (linears + norms)
    assert slope == 12 * (linears // 2 + norms) + linears // 8 + linears // 16


def test_fst_ends_dense(tmp_path):
    config = quick(what="decoder", ranks=(1.56,), runs=str(tmp_path))
    found = bench.run(config, lambda message: None)["metrics"]
    for name in ("speedup", "memory", "speedup_1_56", "memory_1_56"):
        assert found[f"inference_{name}"] == 1.0
    assert found["train_memory"] > 1.0  # masks and operands stand beside the dense weights


@pytest.mark.parametrize("method", ["fst", "s_ste"])
def test_network_and_block_are_measured_in_turns(method, tmp_path, monkeypatch):
    asked = []

    def spy(calls, *rest, **options):
        asked.append(list(calls))
        return in_turns(calls, *rest, **options)

    monkeypatch.setattr(speed, "in_turns", spy)
    config = quick(what="gpt2", method=method, runs=str(tmp_path))
    found = bench.run(config, lambda message: None)["metrics"]
    (calls,) = asked
    for part in ("ffn", "block"):
        assert {f"{part} dense", f"{part} whole", f"{part} products"} <= set(calls)
        speedup = found[f"{part}_dense_ms"] / found[f"{part}_sparse_ms"]
        assert found[f"{part}_speedup"] == pytest.approx(speedup)
        dense = method == "fst"  # FST ends dense: there is nothing to measure
        assert (f"{part} inference" not in calls) is dense
        assert (found[f"{part}_inference_speedup"] == 1.0) is dense


@pytest.mark.parametrize("what", operator_speed.MEASURES)
def test_rates_of_operators_are_those_of_their_times(what, tmp_path):
    config = quick(what=what, method="s_ste", inner=64, runs=str(tmp_path))
    found = bench.run(config, lambda message: None)["metrics"]
    if what == "search":
        assert found["exact_gbs"] == pytest.approx(4 * 64 * 32 / found["exact_ms"] / 1e6)
        ratio = found["two_approx_fp32_ms"] / found["exact_fp32_ms"]
        assert found["over_two_approx_fp32"] == pytest.approx(ratio)
    elif what == "geglu":  # 16 tokens of 2 x 64 features in fp32
        assert found["ours_row_gbs"] == pytest.approx(4 * 16 * 128 * 4 / found["ours_row_ms"] / 1e6)
        assert found["over_torch"] == found["torch_column_ms"] / found["ours_column_ms"]
    else:
        assert found["tflops"] == pytest.approx(2 * 32**3 / found["ms"] / 1e9)


def test_a_wrong_operator_is_not_timed(monkeypatch):
    monkeypatch.setattr(operator_speed, "nm_mask", lambda w: torch.zeros_like(w, dtype=torch.bool))
    config = quick(what="product", method="s_ste")
    monkeypatch.setattr(operator_speed, "multiply", lambda x, w, dtype, i: x[i])
    with pytest.raises(UserError, match="the product of s_ste is off by"):
        operator_speed.of_product(config, print)
    approximate = operator_speed.transposable_mask24
    monkeypatch.setattr(
        operator_speed,
        "transposable_mask24",
        lambda w, algorithm: approximate(w) & (algorithm == "exact"),
    )
    with pytest.raises(UserError, match="the 2-approximation are wrong on"):
        operator_speed.check_two_approx(torch.randn(8, 8))


@pytest.mark.parametrize("method", ["fst", "s_ste"])
def test_a_step_has_all_its_micro_batches_and_a_share_of_the_search(method, monkeypatch):
    asked = []

    def given(calls, *_, **__):
        asked.append(list(calls))
        for call in calls.values():
            call(0)
        ms = {"dense": 5.0, "dense, micro-batch": 3.0, method: 9.0, f"{method}, micro-batch": 4.0}
        ms[f"{method}, masks chosen"] = 49.0
        return {name: Time(ms[name], 0.0, 0.0, "host") for name in calls}

    monkeypatch.setattr(step_speed, "in_turns", given)
    config = quick(what="train", method=method, model="nano", accumulate=8, steps=3600)
    found, used = step_speed.of_train(config, print)
    share = 1.0 if method == "fst" else 0.0  # a fortieth of 40 ms
    assert (f"{method}, masks chosen" in asked[0]) is (method == "fst")
    assert found["dense_ms"] == 5 + 7 * 3 and found["sparse_ms"] == 9 + share + 7 * 4
    assert found["dense_hours"] == pytest.approx(0.026)
    over_a_run = found["dense_ms"] / (found["sparse_ms"] * 5 / 6 + found["dense_ms"] / 6)
    assert (found["run_speedup"], used) == (pytest.approx(over_a_run), "dense")


def test_workloads_of_whole_steps():
    job = step_speed.workload(quick(what="train", model="transformer_nano"))
    assert (job.tokens, job.linears) == (16, ((128, 512), (512, 128)))
    _, loss, blocks = job.build()
    assert len(blocks) == 4 and loss().isfinite()
    assert step_speed.workload(quick(what="train", model="deit_base")).tokens == 197
    with pytest.raises(UserError, match="model=bert; choose of nano, 124M"):
        step_speed.workload(quick(what="train", model="bert"))


def test_the_search_of_bi_mask_is_counted_once_in_its_period(tmp_path, monkeypatch):
    ms = {"dense": 2.0, "step": 6.0, "step with a search": 206.0}
    times = {name: Time(value, value, value, "host") for name, value in ms.items()}
    monkeypatch.setattr(step_speed, "in_turns", lambda *_: times)
    config = quick(what="slow_down", method="bi_mask", runs=str(tmp_path))
    found = bench.run(config, lambda message: None)["metrics"]
    assert found["search_ms"] == 200.0 and found["slow_down"] == (6 + 200 / 100) / 2


def test_the_parts_of_a_layer_add_up(tmp_path):
    config = quick(what="parts", inner=64, accumulate=4, runs=str(tmp_path))
    found = bench.run(config, lambda message: None)["metrics"]
    products = sum(found[f"{name}_ms"] for name in ("fprop", "dgrad", "wgrad", "sample"))
    once = found["decay_ms"] + found["pack_ms"] + found["search_ms"] / 40
    assert found["step_ms"] == pytest.approx(4 * products + once)
    dense = sum(found[f"dense_{name}_ms"] for name in ("fprop", "dgrad", "wgrad"))
    assert found["speedup"] == pytest.approx(4 * dense / found["step_ms"])
