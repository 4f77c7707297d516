"""Argument checks shared by the operators. They run before any work and name the bad argument."""

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def float_tensor(x: torch.Tensor, name: str = "x") -> None:
    """Raise TypeError unless `x` is fp32, bf16 or fp16."""
    if x.dtype not in FLOATS:
        raise TypeError(f"{name} must be float32, bfloat16 or float16, not {x.dtype}")


def group_dim(x: torch.Tensor, m: int, dim: int) -> int:
    """`dim` as a non-negative index. Raises IndexError if x has no such dim, and ValueError if its
    size is no multiple of m.
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
    """The device that all operands share; those that are None do not count. Raises ValueError if
    there are several.

    This also catches a `meta` tensor beside a real one, which would give uninitialised results.
    """
    device = None
    for name, x in operands.items():  # no list of devices: this runs before every product
        if x is None:
            continue
        if device is None:
            first, device = name, x.device
        elif x.device != device:
            raise ValueError(
                f"{first} is on {device} and {name} on {x.device}: move them to one device"
            )
    assert device is not None
    return device


def same_shape(a: torch.Tensor, b: torch.Tensor, names: str) -> None:
    """Raise ValueError unless two tensors, named by `names`, have the same shape."""
    if a.shape != b.shape:
        raise ValueError(f"{names} must have one shape, not {tuple(a.shape)} and {tuple(b.shape)}")
