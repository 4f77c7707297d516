import pytest
import torch

from common_kernels import backend, nm_mask


def test_default_is_the_cpu(monkeypatch):
    monkeypatch.delenv("SPARSE24_BACKEND", raising=False)
    assert backend.resolve("cpu") == "cpu"


def test_argument_beats_the_environment(monkeypatch):
    monkeypatch.setenv("SPARSE24_BACKEND", "triton")
    assert backend.resolve("cpu", "cpu") == "cpu"
    assert nm_mask(torch.ones(4), backend="cpu").sum() == 2


def test_nothing_is_launched_on_meta(monkeypatch):
    monkeypatch.setenv("SPARSE24_BACKEND", "triton")
    assert backend.resolve("meta") == backend.resolve("meta", "triton") == "cpu"


@pytest.mark.parametrize(("name", "reason"), [("triton", "TRITON_INTERPRET=1")])
def test_unavailable_backend_by_name_says_why(monkeypatch, name, reason):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(RuntimeError, match=f"{name}.*'cpu'.*{reason}"):
        backend.resolve("cpu", name)
    monkeypatch.setenv("SPARSE24_BACKEND", name)
    with pytest.raises(RuntimeError, match=name):
        nm_mask(torch.ones(4))


def test_unknown_backend_lists_the_choices():
    with pytest.raises(ValueError, match=r"'cutlass'.*cpu, triton"):
        nm_mask(torch.ones(4), backend="cutlass")
