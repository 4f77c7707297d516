"""Tests of how soon adapters point where they end."""

import pytest
import torch

from reproduce.measure import adapters


def test_similarity_is_that_of_the_step_to_the_end(monkeypatch):
    """Two layers, four steps: L stays, R is halfway at cosines of 0 and 0.6 to its end."""
    ends = [torch.tensor([[0.0, 1.0]]), torch.tensor([[3.0, 4.0]])]
    still, turned = [torch.ones(1, 2)] * 2, [torch.tensor([[1.0, 0.0]])] * 2
    states = [{"left": still, "right": turned}] * 2 + [{"left": still, "right": ends}] * 2
    monkeypatch.setattr(adapters, "trained", lambda config: states)
    config = adapters.Settings(model="gpt2_nano", adapter_rank=4, after=50)
    found, _ = adapters.measure(config, print)
    assert found == pytest.approx({
        "down": 1.0, "up": (0 + 0.6) / 2, "both": (0 + 0.6) / 2, "steps": 4,
        "sm_mhz": None, "watts": None,
    })  # fmt: skip
    after = adapters.Settings(model="gpt2_nano", adapter_rank=4, after=75)
    assert adapters.measure(after, print)[0]["up"] == pytest.approx(1.0)
    first = adapters.Settings(model="gpt2_nano", adapter_rank=4, after=1)
    assert adapters.measure(first, print)[0]["up"] == found["up"]
