"""The profile of a step by kinds of kernels."""

import json
import re
from pathlib import Path

import pytest

import common_kernels
from experiments.bench import jobs, kernels
from experiments.bench.__main__ import main

NAMES = {
    "2:4 product": [
        "sm90_xmma_sparse_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x256x64",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16832spgemm_bf16_128x128_64x3_tn_align8>",
        "cutlass3x_sm90_sptensorop_s64x256x32spgemm_bf16_bf16_f32_void_bf16_128x256x64",
        "void cutlass::device_kernel<cutlass::gemm::collective::CollectiveMma<cutlass::gemm::"
        "MainloopSm90TmaGmmaWarpSpecializedSparse<4, 2>>>",
        "sparse24::matmul24",
    ],
    "dense product": [
        "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTN",
        "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm90<cutlass::gemm>>",
        "void splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float>",
        "triton_tem_fused_mm_3",
        "aten::addmm",
    ],
    "sampling": ["sample_kernel", "quantize_and_sample_kernel", "sparse24::mvue24"],
    "packing, decay, masks": ["pack_both_kernel", "decay_kernel", "sparse24::masked_decay_"],
    "quantising": ["quantize_both_kernel", "rescale_kernel"],
    "elementwise": [
        "triton_poi_fused__scaled_dot_product_flash_attention_embedding_1",
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>",
        "glu_kernel",
    ],
    "attention": [
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>>",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7_64x128x64_4x1x1",
        "fmha_cutlassB_bf16_aligned_64x64_k64_sm80(PyTorchMemEffAttention::AttentionBackward)",
    ],
    "optimizer": [
        "void multi_tensor_apply_kernel<at::native::FusedAdamMathFunctor<float, 4>>",
        "void multi_tensor_apply_kernel<at::native::LpNormFunctor<float, 2>>",
        "adamw_kernel",
    ],
    "other": ["Memcpy DtoD (Device -> Device)", "Memset (Device)", "ncclDevKernel_AllReduce"],
}


def test_kernels_are_told_by_their_names():
    found = {kind: {kernels.kind(name) for name in names} for kind, names in NAMES.items()}
    assert found == {kind: {kind} for kind in kernels.KINDS}


def test_every_kernel_of_this_project_has_a_kind():
    jitted = re.compile(r"^@triton\.jit[^\n]*\n(?:@[^\n]*\n)*def (\w+_kernel)\(", re.M)
    files = Path(common_kernels.__file__).parent.rglob("*.py")
    found = {name for path in files for name in jitted.findall(path.read_text(encoding="utf-8"))}
    assert len(found) > 20
    ours = {f"{name}_kernel" for names in kernels.OURS.values() for name in names}
    assert found == ours, f"experiments/bench/kernels.py: {found ^ ours}"


def test_a_profile_is_a_row_of_kinds_and_a_file_of_kernels(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(jobs, "QUICK_JOBS", {"tiny": jobs.stack(1, 2, (16, 32), 2, 8)})
    out = tmp_path / "cpu.json"
    asked = ["--only", "fst", "--repeats", "2", "--threads", "1", "--out", str(out)]
    assert main(["profile", "--quick", "--device", "cpu", *asked]) == 0
    (row,) = json.loads(out.read_text())["benchmarks"]["profile"]["rows"]
    figures, kinds = row["figures"], {f"{kind} ms" for kind in kernels.KINDS}
    assert row["name"] == "fst" and row["peers"].keys() == {"dense"}
    seen = {"dense product ms", "sampling ms", "packing, decay, masks ms", "optimizer ms"}
    assert seen <= figures.keys() <= kinds | {"kernels ms", "kernels"}
    assert f"{figures['dense product ms']:.2f}" in capsys.readouterr().out
    total = sum(ms for name, ms in figures.items() if name in kinds)
    assert figures["kernels ms"] == pytest.approx(total)
    listed = json.loads((tmp_path / "cpu_kernels.json").read_text())["tiny"]["fst"]
    assert sum(kernel["ms"] for kernel in listed) == pytest.approx(total)
    (mm,) = [kernel for kernel in listed if kernel["name"] == "aten::mm"]
    # Two linears with three products each under the method; dense, qkv and the projection.
    assert (mm["kind"], mm["calls"]) == ("dense product", 12)
