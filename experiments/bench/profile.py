"""The kernel time of a step by kinds of kernels, for `python -m experiments.bench train --profile`.

Kernels are those of an ordinary step in torch's profiler; on a CPU operators are measured instead.
"""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from experiments.bench.step import Step
from experiments.support.checkpoint import write_json

STEPS = 3  # number of profiled steps
Kernels = list[dict[str, Any]]  # name, kind, ms and calls a step

PRODUCT24, DENSE, ATTENTION = "2:4 product", "dense product", "attention"
SAMPLING, PACKING, QUANTISING = "sampling", "packing, decay, masks", "quantising"
OPTIMIZER, ELEMENTWISE, OTHER = "optimizer", "elementwise", "other"
KINDS = (
    PRODUCT24, DENSE, SAMPLING, PACKING, QUANTISING, ELEMENTWISE, ATTENTION, OPTIMIZER, OTHER,
)  # fmt: skip

# The first pattern found in the name decides. They cover our own kernels, those of libraries, of
# torch and of inductor, and on a CPU torch's operators.
PATTERNS = (
    (PRODUCT24, r"^few_tokens_kernel$"),
    (SAMPLING, r"^((quantize_and_)?sample|lanes|neighbours)_kernel$"),
    (QUANTISING, r"^(amax|fp8|inverse|numbers|quantize_both|rescale)_kernel$"),
    (OPTIMIZER, r"^(adamw|scalars)_kernel$"),
    (ELEMENTWISE, r"^glu(_backward)?_kernel$"),
    (DENSE, r"^lowrank_kernel$"),
    (PACKING, r"^[a-z0-9_]+_kernel$"),
    (DENSE, r"^triton_tem_"),
    (ELEMENTWISE, r"^triton_"),
    (ATTENTION, r"flash|fmha|sdpa|attention|mem_eff"),
    (PRODUCT24, r"spgemm|sptensorop|sparse.*gemm|gemm.*sparse"),
    (PRODUCT24, r"^sparse24::matmul24|sparse_semi_structured"),
    (OPTIMIZER, r"multi_tensor_apply|adam|lpnorm|_foreach_|linalg_vector_norm"),
    (DENSE, r"gemm|gemv|nvjet|cublas|splitkreduce|cutlass"),
    (DENSE, r"^aten::(mm|addmm|bmm|baddbmm|linear|_scaled_mm|mkldnn_linear)$|^mkl"),
    (SAMPLING, r"^sparse24::.*(mvue|sample)"),
    (QUANTISING, r"^sparse24::.*(fp8|quantize|rescale)"),
    (PACKING, r"^sparse24::"),
    (OTHER, r"memcpy|memset|embedding|index|scatter|gather|nccl|philox|distribution|randint"),
    (OTHER, r"^aten::(empty|empty_like|zeros|ones|randint|item|_local_scalar_dense|detach)"),
    (ELEMENTWISE, r"elementwise|reduce|norm|softmax|gelu|copy|cat|fill|nll_loss|convert"),
    (ELEMENTWISE, r"^aten::"),
)


def kind(name: str) -> str:
    """The kind of a kernel or operator of this name: one of KINDS."""
    return next((kind for kind, pattern in PATTERNS if re.search(pattern, name.lower())), OTHER)


def profiled(step: Step, steps: int = STEPS) -> Kernels:
    """The kernels, or on a CPU the operators, of an ordinary step with times, the longest first."""
    on_gpu = step.device.type == "cuda"
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    step.ordinary()
    with torch.profiler.profile(activities=[activity]) as profile:
        for _ in range(steps):
            step.ordinary()
        step.wait()
    where, time = DeviceType.CUDA if on_gpu else DeviceType.CPU, "device" if on_gpu else "cpu"
    rows = [
        {
            "name": event.key,
            "kind": kind(event.key),
            "ms": getattr(event, f"self_{time}_time_total") / 1e3 / steps,
            "calls": event.count / steps,
        }
        for event in profile.key_averages()
        if event.device_type == where and not getattr(event, "is_user_annotation", False)
    ]
    return sorted(rows, key=lambda row: -row["ms"])


def write(out: Path, shape: str, row: str, found: Kernels) -> None:
    """Add the kernels of a row to `<record>_kernels.json`, which lists every kernel."""
    path = out.with_name(f"{out.stem}_kernels.json")
    written = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    written.setdefault(shape, {})[row] = found
    write_json(path, written)


def by_kind(profile: Kernels) -> dict[str, float]:
    """The milliseconds of each kind of kernel and in total, and the number of kernels."""
    spent: Counter[str] = Counter()
    for row in profile:
        spent[row["kind"]] += row["ms"]
    return {
        **{f"{name} ms": spent[name] for name in KINDS if spent[name]},
        "kernels ms": sum(spent.values()),
        "kernels": sum(row["calls"] for row in profile),
    }
