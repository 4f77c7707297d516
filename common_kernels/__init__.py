"""Tensor operators for 2:4 sparse training, which know nothing of modules, models or loops."""

from common_kernels.compressed import (
    compress_nm,
    double_prune_bits,
    expand_nm,
    pack_mask,
    unpack_mask,
)
from common_kernels.decay import masked_decay_
from common_kernels.decode import Fragments24, few_tokens24, fragments24
from common_kernels.fp8 import fake_fp8, quantize_fp8
from common_kernels.glu import geglu, swiglu
from common_kernels.lowrank import lowrank_addmm
from common_kernels.masks import (
    check24,
    check_nm,
    double_prune_mask,
    flip_rate,
    nm_mask,
    transposable_mask24,
)
from common_kernels.matmul import matmul24
from common_kernels.mvue import mvue24
from common_kernels.pack import Packed24, convert24, pack24, unpack24
from common_kernels.pack.interop import to_semi_structured
from common_kernels.pack.quantized import Quantized24, dequantize24, quantize24
from common_kernels.philox import philox4x32
from common_kernels.relu24 import relu24
from common_kernels.soft_threshold import soft_threshold24

__all__ = [
    "Fragments24",
    "Packed24",
    "Quantized24",
    "check24",
    "check_nm",
    "compress_nm",
    "convert24",
    "dequantize24",
    "double_prune_bits",
    "double_prune_mask",
    "expand_nm",
    "fake_fp8",
    "few_tokens24",
    "flip_rate",
    "fragments24",
    "geglu",
    "lowrank_addmm",
    "masked_decay_",
    "matmul24",
    "mvue24",
    "nm_mask",
    "pack24",
    "pack_mask",
    "philox4x32",
    "quantize24",
    "quantize_fp8",
    "relu24",
    "soft_threshold24",
    "swiglu",
    "to_semi_structured",
    "transposable_mask24",
    "unpack24",
    "unpack_mask",
]
