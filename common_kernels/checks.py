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


def one_device(**operands: torch.Tensor | None) -> torch.device:
    """The device of all operands; None is none. ValueError if they lie on several.

    Beside a real tensor one on `meta` would make every result uninitialised memory.
    """
    devices = {name: x.device for name, x in operands.items() if x is not None}
    (first, device), *others = devices.items()
    for name, other in others:
        if other != device:
            raise ValueError(
                f"{first} is on {device} and {name} on {other}: move them to one device"
            )
    return device


def integer(value: object, name: str) -> None:
    """TypeError unless `value` is a Python integer, and no bool."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name} must be an int or a 0-dim int64 tensor, not {value!r}")


def same_shape(a: torch.Tensor, b: torch.Tensor, names: str) -> None:
    """ValueError unless the two tensors have one shape; `names` says which they are."""
    if a.shape != b.shape:
        raise ValueError(f"{names} must have one shape, not {tuple(a.shape)} and {tuple(b.shape)}")
