import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

from common_kernels import chunks


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Uninitialised memory holds NaN (or the largest integer): an entry nobody wrote shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(params=[None, 48], ids=["one-piece", "many-pieces"])
def pieces(request, monkeypatch):
    """Runs a test on whole tensors and again with small tensors cut into many pieces."""
    if request.param:
        monkeypatch.setattr(chunks, "SIZE", request.param)


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)
