"""The one place where the backend of an operator is chosen.

`naive` is plain PyTorch, runs on any device and is the specification. `triton` and `cuda` are names
that are recognised; asking for one that cannot serve is an error, never a silent fallback.
"""

import os

import torch

BACKENDS = ("naive", "triton", "cuda")
ENVIRONMENT_VARIABLE = "SPARSE24_BACKEND"


def resolve(device: torch.device | str, backend: str | None = None) -> str:
    """Name of the backend that serves `device`: the argument, else the environment, else `naive`.

    Raises ValueError on an unknown name and RuntimeError, with the reason, on one that cannot
    serve.
    """
    name = backend or os.environ.get(ENVIRONMENT_VARIABLE) or "naive"
    if name not in BACKENDS:
        raise ValueError(f"unknown backend {name!r}: choose one of {', '.join(BACKENDS)}")
    if name != "naive":
        raise RuntimeError(
            f"backend {name!r} cannot serve device {str(device)!r}: no {name} kernels are built "
            f"into this version; unset {ENVIRONMENT_VARIABLE} or choose 'naive'"
        )
    return name
