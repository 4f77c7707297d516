"""The one place where the backend of an operator is chosen, and its GPU made the current one.

`cpu` is plain PyTorch, `cpu.py` of each family, and runs on any device. `triton` serves GPUs, and
any device under Triton's interpreter; what has no Triton kernel (the baselines `two_approx` and
`sequential`, groups of more than 32) then runs as plain PyTorch. Asking for a backend that cannot
serve a device is an error.
"""

import importlib.util
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

BACKENDS = ("cpu", "triton")
ENVIRONMENT_VARIABLE = "SPARSE24_BACKEND"
HAS_TRITON = importlib.util.find_spec("triton") is not None
_NOTHING: AbstractContextManager[Any] = nullcontext()


def resolve(device: torch.device | str, backend: str | None = None) -> str:
    """Name of the backend that serves `device`: the argument, else the environment, else `triton`
    on a GPU and `cpu` elsewhere. On `meta`, where nothing is launched, it is always `cpu`.

    Raises ValueError on an unknown name and RuntimeError, with the reason, on one that cannot
    serve.
    """
    kind = torch.device(device).type
    name = backend or os.environ.get(ENVIRONMENT_VARIABLE)
    if not name:
        return "triton" if kind == "cuda" and HAS_TRITON else "cpu"
    if name not in BACKENDS:
        raise ValueError(f"unknown backend {name!r}: choose one of {', '.join(BACKENDS)}")
    if kind == "meta":
        return "cpu"
    reason = None
    if name == "triton" and not HAS_TRITON:
        reason = "triton is not installed"
    elif name == "triton" and kind == "cpu" and not interpreted():
        reason = "on a CPU Triton needs its interpreter, TRITON_INTERPRET=1 from the start"
    if reason:
        raise RuntimeError(
            f"backend {name!r} cannot serve device {str(device)!r}: {reason}; "
            f"unset {ENVIRONMENT_VARIABLE} or choose 'cpu'"
        )
    return name


def current(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which kernels are launched on `device`; the same one, which does nothing, where
    they are already: to enter and leave another takes as long as a launch."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(device)


def interpreted() -> bool:
    """True if Triton's kernels run in Python, on any device."""
    return os.environ.get("TRITON_INTERPRET") == "1"
