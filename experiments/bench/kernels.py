"""Sorts GPU kernels into kinds by their names."""

from __future__ import annotations

import re

PRODUCT24, DENSE, ATTENTION = "2:4 product", "dense product", "attention"
SAMPLING, PACKING, QUANTISING = "sampling", "packing, decay, masks", "quantising"
OPTIMIZER, ELEMENTWISE, OTHER = "optimizer", "elementwise", "other"
KINDS = (
    PRODUCT24, DENSE, SAMPLING, PACKING, QUANTISING, ELEMENTWISE, ATTENTION, OPTIMIZER, OTHER,
)  # fmt: skip

# The kernels of common_kernels, by their functions' names. One that is missing here would count as
# elementwise; tests/experiments/test_profile.py checks that none is.
OURS = {
    SAMPLING: ("sample", "quantize_and_sample", "lanes", "neighbours"),
    PACKING: (
        "check", "compress", "decay", "double_prune", "exact", "expand", "flips", "greedy", "mask",
        "mask24", "pack", "pack_both", "pack_mask", "pack_transposed", "project", "projected_amax",
        "prune_and_pack", "quantize24", "soft", "unpack_mask", "weight_amax",
    ),
    QUANTISING: ("amax", "fp8", "numbers", "quantize_both", "rescale"),
    OPTIMIZER: ("adamw", "scalars"),
    ELEMENTWISE: ("glu", "glu_backward"),
    DENSE: ("lowrank",),
}  # fmt: skip
_BY_NAME = {f"{name}_kernel": kind for kind, names in OURS.items() for name in names}

# The first pattern found in the name decides. They cover kernels of libraries, of torch and of
# inductor, and on a CPU torch's operators.
PATTERNS = (
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
    if ours := _BY_NAME.get(name):
        return ours
    lower = name.lower()
    for found, pattern in PATTERNS:
        if re.search(pattern, lower):
            return found
    return OTHER
