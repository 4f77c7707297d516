"""The benchmarks of linears and training steps: what they compare, and their gates."""

import importlib.util
import json
import sys
import types
from contextlib import nullcontext
from itertools import product

import pytest
import torch
from torch._dynamo.utils import counters

import methods
from experiments.bench import dense_fp8, jobs, linear, profile, train, variants
from experiments.bench import step as steps
from experiments.bench.variants import VARIANTS
from experiments.support.errors import UserError
from models.gpt2 import GPTConfig
from tests.experiments.conftest import bench
from tests.lifetimes import Reads

CPU = torch.device("cpu")
SHAPE = (64, 16, 32)  # tokens, in, out; FP8 products take multiples of 16
HERE = [
    name for name in VARIANTS if name != variants.TORCHAO or importlib.util.find_spec("torchao")
]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(linear, "CPU_SHAPES", (SHAPE,))
    monkeypatch.setattr(jobs, "CPU_JOBS", {"tiny": jobs.gpt2("nano", 2, 8)})


def run(benchmark, tmp_path, *arguments):
    """The rows by name."""
    out = tmp_path / "cpu.json"
    assert bench(benchmark, out, *arguments) == 0
    rows = json.loads(out.read_text())["benchmarks"][benchmark]["rows"]
    return {row["name"]: row for row in rows}


def test_linear_has_every_variant_with_its_parts(tmp_path):
    rows = run("linear", tmp_path)
    assert list(rows) == HERE
    for name, row in rows.items():
        network = name in variants.NETWORKS
        shape = "64 x 16 -> 32 -> 16" if network else "64 x 16 -> 32"
        assert (row["shape"], row["dtype"]) == (shape, "float32") and row["limit_ms"] > 0
        peers = {variants.RELU2, variants.RELU2_FP8} if network else {"dense"}
        assert row["peers"].keys() == peers
        searching = {"hooks, masks chosen ms"} if name.startswith("fst") else set()
        held = {f"{part} MiB" for part in ("weights", "masks", "packed", "operands")}
        assert row["figures"].keys() == {"products ms", "hooks ms"} | searching | held
    backends = {"dense fp8": "scaled_mm", "s_ste, fp8": "simulated", "s_ste": "dense"}
    assert {name: rows[name]["backend"] for name in backends} == backends


def test_linear_measures_other_shapes(tmp_path):
    rows = run("linear", tmp_path, "--only", "dense", "--shapes", "32,16,48")
    assert rows["dense"]["shape"] == "48 x 32 -> 16"


def test_train_has_times_memory_and_a_profile(tmp_path):
    rows = run("train", tmp_path, "--only", "dense", "fst", "--fused", "--profile")
    assert list(rows) == ["dense", "fst"]
    assert rows["dense"]["figures"]["tokens/s"] == pytest.approx(16e3 / rows["dense"]["ms"])
    parts = ("weights", "optimizer", "masks", "packed", "operands", "trained", "held")
    names = {"tokens/s", "first step s", "trained over dense", "held over dense", "kernels"}
    names |= {f"{part} MiB" for part in parts}
    found = {name: row["figures"].keys() for name, row in rows.items()}
    assert names <= found["dense"] & found["fst"]
    searching = {"step, masks chosen ms", "step with its share of that ms"}
    assert searching <= found["fst"] - found["dense"]
    assert rows["fst"]["peers"].keys() == {"dense"}
    assert rows["fst"]["backend"] == "dense; FusedAdamW"
    own = rows["fst"]["figures"]
    kinds = [f"{kind} ms" for kind in profile.KINDS if f"{kind} ms" in own]
    assert {"dense product ms", "sampling ms", "elementwise ms"} <= {*kinds}
    assert own["kernels ms"] == pytest.approx(sum(own[kind] for kind in kinds))
    listed = json.loads((tmp_path / "cpu_kernels.json").read_text())["tiny"]["fst"]
    assert sum(kernel["ms"] for kernel in listed) == pytest.approx(own["kernels ms"])
    (mm,) = [kernel for kernel in listed if kernel["name"] == "aten::mm"]
    # Per block two linears with three products each under the method; dense, qkv and the
    # projection; and the head.
    layers = GPTConfig.of_size("nano").n_layer
    assert (mm["kind"], mm["calls"]) == ("dense product", 12 * layers + 3)
    # 511,000 tokens of 124 million parameters in a second
    assert train.share_of_peak(6 * 124e6 * 511e3, 1000) == pytest.approx(48.1, abs=0.1)


def test_what_is_wrong_is_left_out_and_the_rest_is_measured(tmp_path, monkeypatch, capsys):
    """Also torchao's FP8, here with what stands for it: it converts the linears of the variant."""

    def convert(model, *, module_filter_fn):
        names = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
        dense_fp8.convert(model.get_submodule(n) for n in names if module_filter_fn(None, n))

    module, package = types.ModuleType("torchao.float8"), types.ModuleType("torchao")
    module.convert_to_float8_training, package.float8 = convert, module
    monkeypatch.setitem(sys.modules, "torchao", package)
    monkeypatch.setitem(sys.modules, "torchao.float8", module)
    original = linear.gate

    def gate(name, *rest):
        if name == "slope":
            raise UserError("slope is off")
        original(name, *rest)

    monkeypatch.setattr(linear, "gate", gate)
    out = tmp_path / "cpu.json"
    assert bench("train", out, "--only", "slope", variants.TORCHAO) == 1
    record = json.loads(out.read_text())["benchmarks"]["train"]
    (row,) = record["rows"]
    assert (row["name"], row["backend"]) == (variants.TORCHAO, "torchao")
    assert row["peers"].keys() == {"dense", "dense fp8", variants.TORCHAO}
    assert record["left_out"][1:] == ["tiny, slope: UserError: slope is off"]
    assert "error: tiny, slope: UserError: slope is off" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.delitem(sys.modules, "torchao.float8")
    run("linear", tmp_path, "--only", "dense", variants.TORCHAO)
    (reason,) = json.loads(out.read_text())["benchmarks"]["linear"]["left_out"][:1]
    assert reason.startswith(f"{variants.TORCHAO}: ")


def test_replayed_steps_and_launched_ones_take_turns(monkeypatch):
    """Without a GPU a replay is a call. Twice the same steps, with replays among them."""

    def trained(replays):
        step = steps.Step("fst", jobs.gpt2("nano", 2, 8), CPU, "dense")
        step.ordinary(0)
        monkeypatch.setattr(steps, "capture", lambda part, _: (part, None))
        monkeypatch.setattr(step, "gradients", lambda: [None] * len(step.parameters))
        replay = step.capture(None)
        for call in (replay, step.ordinary, step.searching, replay):
            call = call if replays or call is not replay else lambda _: step.run(0)
            call(0)
            step.optimizer.zero_grad()
        return step.parameters

    monkeypatch.setattr(variants, "check_same", lambda *_: None)
    for replayed, launched in zip(trained(True), trained(False), strict=True):
        assert torch.equal(replayed, launched)


def test_blocks_share_one_compilation_and_the_gate_sees_a_wrong_one(monkeypatch):
    """A graph for the blocks and one for the loss; a matrix whose gradient is lost is a small part
    of the model's whole gradient."""
    step = steps.Step("fst", jobs.gpt2("nano", 2, 8), CPU, "dense")
    torch.compiler.reset()
    counters.clear()
    step.compile("aot_eager")
    step.ordinary(0)
    steps.check_compiled(step)
    step.searching(0)
    assert counters["stats"]["unique_graphs"] == 2
    original = step.results

    def wrong(block, args, forward):
        found = original(block, args, forward)
        return [*found[:-1], found[-1] * 0] if block is step.blocks[0] is forward else found

    monkeypatch.setattr(step, "results", wrong)
    with pytest.raises(UserError, match="off by 1 "):
        steps.check_compiled(step)
    with pytest.raises(UserError, match="only compiled or only uncompiled"):
        variants.check_same("x", [None], [torch.ones(4)])
    step.close()


def test_a_job_says_how_wide_the_linears_are_that_it_converts():
    for job in (*jobs.QUICK_JOBS.values(), *jobs.GPU_JOBS.values()):
        with torch.device("meta"):
            model, _, blocks = job.build()
        converted = methods.build("dense", include=job.include).matching_linears(model)
        assert {(m.in_features, m.out_features) for m in converted.values()} == set(job.linears)
        assert all(any(m is block for m in model.modules()) for block in blocks[:-1])


def test_what_calls_read_stays_where_graphs_of_them_read_it(monkeypatch):
    """No call replaces what itself or another one has read while it is captured."""
    monkeypatch.setattr(methods.nn.linear, "_capturing", lambda _: True)
    for name in set(HERE) - {variants.TORCHAO}:
        built = linear.build(name, SHAPE, torch.float32, CPU, "dense", 2)
        seen = {}
        for measured in (False, True):
            for part, call in built.calls().items():
                with Reads() if measured else nullcontext() as seen[part]:
                    call(0)
        assert {part: reads.lost() for part, reads in seen.items()} == {part: [] for part in seen}


def test_the_gate_sees_each_product(monkeypatch):
    """One that is off by a percent, with FP8, too: what that rounds is part of what is expected.
    A method without a setup has its default options."""
    expected, wrong = variants.expected, ""
    monkeypatch.setattr(variants, "expected",
        lambda *a: {k: v * (1.01 if k == wrong else 1) for k, v in expected(*a).items()},
    )  # fmt: skip
    for name in ("dense", "fst", "slope", "dense fp8", "s_ste, fp8", variants.SIMULATED, "sr_ste"):
        for wrong in variants.PRODUCTS:
            with pytest.raises(UserError, match=f"gives {wrong} for tokens"):
                linear.gate(name, SHAPE, torch.float32, CPU, "dense")
    for name, (wrong, what) in product(variants.NETWORKS, enumerate(("dX", "dW1", "dW2"))):
        built = linear.build(name, SHAPE, torch.float32, CPU, "dense", 1)
        found = built.found
        built.found = lambda wrong=wrong, found=found: [
            g * (1.5 if i == wrong else 1) for i, g in enumerate(found())
        ]
        with pytest.raises(UserError, match=f"gives {what} off"):
            variants.check_network(name, built)


def test_packed_products_pass_the_gate_and_are_named(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # emulated products, on a CPU
    shape = (64, 64, 128)
    for name, used in {
        "ste": "cusparselt fprop",
        "fst, no mvue": "cusparselt fprop dgrad",
        "fst": "cusparselt fprop dgrad wgrad",
        "s_ste": "cusparselt fprop wgrad",
        "s_ste, fp8": "cusparselt fprop wgrad, fp8 dgrad",
        "act24": "cusparselt dgrad; cusparselt fprop",
        "act24, fp8": "cusparselt dgrad, fp8 fprop wgrad; cusparselt fprop, fp8 dgrad wgrad",
    }.items():
        built = linear.build(name, shape, torch.bfloat16, CPU, "cusparselt", 1)
        assert built.converted.used == used
        packed = variants.bytes_held(built.converted)["packed"]
        assert (packed > 0) == (name not in variants.NETWORKS)  # which pack activations alone
        linear.gate(name, shape, torch.bfloat16, CPU, "cusparselt")


def test_kernels_are_told_by_their_names():
    cutlass, torch_ = "void cutlass::device_kernel<", "void at::native::"
    for name, kind in {
        "sm90_xmma_sparse_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x256x64": "2:4 product",
        f"{cutlass}cutlass_80_tensorop_bf16_s16832spgemm_bf16_128x128_64x3_tn>": "2:4 product",
        f"{cutlass}cutlass::gemm::MainloopSm90TmaGmmaWarpSpecializedSparse<4, 2>>": "2:4 product",
        f"{cutlass}at::cuda::detail::enable_3x_kernel_for_sm90<gemm>>": "dense product",
        "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTN": "dense product",
        "triton_tem_fused_mm_3": "dense product",
        "quantize_and_sample_kernel": "sampling",
        "sparse24::mvue24": "sampling",
        "pack_both_kernel": "packing, decay, masks",
        "quantize_both_kernel": "quantising",
        "triton_poi_fused__scaled_dot_product_flash_attention_embedding_1": "elementwise",
        f"{torch_}vectorized_elementwise_kernel<4, {torch_}FillFunctor<float>>": "elementwise",
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128>>": "attention",
        "void multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>": "optimizer",
        "adamw_kernel": "optimizer",
        "Memcpy DtoD (Device -> Device)": "other",
    }.items():
        assert profile.kind(name) == kind, name


def test_dense_fp8_is_exact_where_eight_bits_suffice():
    """Small integers and the format's largest number: the scales are 1."""
    generator = torch.Generator().manual_seed(0)
    x, w, dy = (
        torch.randint(-2, 3, shape, generator=generator).float()
        for shape in ((32, 16), (48, 16), (32, 48))
    )
    x[0, 0] = w[0, 0] = 448
    dy[0, 0] = 57344
    layer = torch.nn.Linear(16, 48, bias=False)
    layer.weight.data = w
    dense_fp8.convert([layer])
    x.requires_grad_()
    y = layer(x)
    y.backward(dy)
    assert torch.equal(y, x @ w.t())
    assert torch.equal(x.grad, dy @ w)
    assert torch.equal(layer.weight.grad, dy.t() @ x)
