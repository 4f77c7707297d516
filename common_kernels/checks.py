"""Argument checks shared by the operators: they run before any work and name the culprit."""

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def float_tensor(x: torch.Tensor, name: str = "x") -> None:
    """TypeError unless `x` is fp32, bf16 or fp16."""
    if x.dtype not in FLOATS:
        raise TypeError(f"{name} must be float32, bfloat16 or float16, not {x.dtype}")


def group_dim(x: torch.Tensor, m: int, dim: int) -> int:
    """`dim` as a non-negative index. IndexError if x has no such dim, ValueError if it is no
    multiple of m.
    """
    if not -x.ndim <= dim < x.ndim:
        raise IndexError(f"dim {dim} is out of range for shape {tuple(x.shape)}")
    dim %= x.ndim
    if x.shape[dim] % m:
        raise ValueError(
            f"dim {dim} of shape {tuple(x.shape)}: {x.shape[dim]} entries are no multiple of {m}"
        )
    return dim


def same_shape(a: torch.Tensor, b: torch.Tensor, names: str) -> None:
    """ValueError unless the two tensors have one shape; `names` says which they are."""
    if a.shape != b.shape:
        raise ValueError(f"{names} must have one shape, not {tuple(a.shape)} and {tuple(b.shape)}")
