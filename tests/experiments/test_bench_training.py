"""The benchmarks of linears and training steps: what they compare, and their gates."""

import importlib.util
import json
import sys
from itertools import product

import pytest
import torch
from torch._dynamo.utils import counters

from experiments.bench import gates, jobs, linear, profile, train, variants
from experiments.bench import step as steps
from experiments.bench.variants import VARIANTS
from experiments.support.errors import UserError
from models.gpt2 import GPTConfig
from tests.experiments.conftest import bench

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
    other = run("linear", tmp_path / "other", "--only", "dense", "--shapes", "32,16,48")
    assert other["dense"]["shape"] == "48 x 32 -> 16"
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


def test_train_has_times_memory_and_a_profile(tmp_path):
    rows = run("train", tmp_path, "--only", "dense", "fst", "--fused", "--profile")
    assert list(rows) == ["dense", "fst"]
    assert rows["dense"]["figures"]["tokens/s"] == pytest.approx(16e3 / rows["dense"]["ms"])
    names = {"tokens/s", "held over dense", "weights MiB", "optimizer MiB", "held MiB", "kernels"}
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


def test_what_is_wrong_or_missing_is_left_out_and_the_rest_is_measured(
    tmp_path, monkeypatch, capsys
):
    original = linear.gate

    def gate(name, *rest):
        if name == "slope":
            raise UserError("slope is off")
        original(name, *rest)

    monkeypatch.setattr(linear, "gate", gate)
    monkeypatch.setitem(sys.modules, "torchao", None)
    out = tmp_path / "cpu.json"
    assert bench("train", out, "--only", "slope", "ste", variants.TORCHAO) == 1
    record = json.loads(out.read_text())["benchmarks"]["train"]
    assert [row["name"] for row in record["rows"]] == ["ste"]
    left_out = " ".join(record["left_out"])
    assert "tiny, slope: UserError: slope is off" in left_out and variants.TORCHAO in left_out
    assert "error: tiny, slope: UserError: slope is off" in capsys.readouterr().err


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
        gates.check_same("x", [None], [torch.ones(4)])
    step.close()


def test_the_gate_sees_each_product(monkeypatch):
    """One that is off by a percent, with FP8, too: what that rounds is part of what is expected.
    A method without a setup has its default options."""
    expected, wrong = gates.expected, ""
    monkeypatch.setattr(gates, "expected",
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
            gates.check_network(name, built)


def test_kernels_are_told_by_their_names():
    cutlass = "void cutlass::device_kernel<"
    for kind, names in {
        "2:4 product": ("sm90_xmma_sparse_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x256x64",
                        f"{cutlass}cutlass::gemm::MainloopSm90TmaGmmaWarpSpecializedSparse<4, 2>>"),
        "dense product": (f"{cutlass}at::cuda::detail::enable_3x_kernel_for_sm90<gemm>>",
                          "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTN"),
        "sampling": ("quantize_and_sample_kernel",),
        "packing, decay, masks": ("pack_both_kernel",),
        "quantising": ("quantize_both_kernel",),
        "attention": ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128>>",),
        "elementwise": ("triton_poi_fused__scaled_dot_product_flash_attention_embedding_1",),
        "optimizer": ("void multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>",),
        "other": ("Memcpy DtoD (Device -> Device)",),
    }.items():  # fmt: skip
        assert {profile.kind(name) for name in names} == {kind}


def test_packed_products_pass_the_gate_and_are_named(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # emulated products, on a CPU
    shape = (64, 64, 128)
    for name, used in {
        "fst": "cusparselt fprop dgrad wgrad",
        "s_ste, fp8": "cusparselt fprop wgrad, fp8 dgrad",
        "act24": "cusparselt dgrad; cusparselt fprop",
        "act24, fp8": "cusparselt dgrad, fp8 fprop wgrad; cusparselt fprop, fp8 dgrad wgrad",
    }.items():
        built = linear.build(name, shape, torch.bfloat16, CPU, "cusparselt", 1)
        assert built.converted.used == used
        packed = variants.bytes_held(built.converted)["packed"]
        assert (packed > 0) == (name not in variants.NETWORKS)  # which pack activations alone
        linear.gate(name, shape, torch.bfloat16, CPU, "cusparselt")
