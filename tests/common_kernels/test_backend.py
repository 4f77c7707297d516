import pytest
import torch

from common_kernels import backend, nm_mask

CUDA = torch.cuda.is_available()


def test_the_device_the_argument_and_the_environment_choose(monkeypatch):
    monkeypatch.delenv("SPARSE24_BACKEND", raising=False)
    assert backend.resolve("cpu") == "cpu"
    assert not CUDA or backend.resolve("cuda") == "triton"
    monkeypatch.setenv("SPARSE24_BACKEND", "triton")
    assert backend.resolve("cpu", "cpu") == "cpu"
    assert nm_mask(torch.ones(4), backend="cpu").sum() == 2
    # Nothing is launched on meta.
    assert backend.resolve("meta") == backend.resolve("meta", "triton") == "cpu"


def test_a_backend_that_cannot_serve_says_why(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("SPARSE24_BACKEND", "triton")
    for call in (lambda: backend.resolve("cpu", "triton"), lambda: nm_mask(torch.ones(4))):
        with pytest.raises(RuntimeError, match=r"triton.*'cpu'.*TRITON_INTERPRET=1"):
            call()
    with pytest.raises(ValueError, match=r"'cutlass'.*cpu, triton"):
        nm_mask(torch.ones(4), backend="cutlass")
