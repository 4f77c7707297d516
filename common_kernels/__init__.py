"""Operators on tensors for 2:4 sparse training, ignorant of modules, models and training."""

from common_kernels.compressed import compress_nm, expand_nm, pack_mask, unpack_mask
from common_kernels.decay import masked_decay_
from common_kernels.fp8 import fake_fp8, quantize_fp8
from common_kernels.lowrank import lowrank_addmm
from common_kernels.masks import (
    check24,
    check_nm,
    double_prune_mask,
    flip_rate,
    nm_mask,
    transposable_mask24,
)
from common_kernels.mvue import mvue24
from common_kernels.philox import philox4x32
from common_kernels.soft_threshold import soft_threshold24

__all__ = [
    "check24",
    "check_nm",
    "compress_nm",
    "double_prune_mask",
    "expand_nm",
    "fake_fp8",
    "flip_rate",
    "lowrank_addmm",
    "masked_decay_",
    "mvue24",
    "nm_mask",
    "pack_mask",
    "philox4x32",
    "quantize_fp8",
    "soft_threshold24",
    "transposable_mask24",
    "unpack_mask",
]
