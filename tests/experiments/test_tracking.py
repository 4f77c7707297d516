"""The chart of a run at Weights & Biases."""

import sys
from types import SimpleNamespace

import pytest

from experiments.tracking import MetricsLog


@pytest.fixture
def wandb(monkeypatch):
    """What `wandb.init` and the run's `log` were called with, in a list."""
    calls = []
    log = SimpleNamespace(log=lambda *a, **k: calls.append((a, k)), finish=lambda: None)
    module = SimpleNamespace(init=lambda **keywords: calls.append(keywords) or log)
    monkeypatch.setitem(sys.modules, "wandb", module)
    return calls


def open_log(directory):
    directory.mkdir(parents=True, exist_ok=True)
    log = MetricsLog(directory, 0, ("wandb",))
    log.write({"step": 3, "loss": 0.5, "task": "rte"})
    log.close()


def test_every_directory_has_a_chart_of_its_own(wandb, tmp_path, monkeypatch):
    """Two fine-tunings of different runs have the same last parts of their paths."""
    ends = [f"{run}/seed0/finetune/rte-01234567/seed0" for run in ("gpt2-a", "gpt2-b")]
    for end in ends:
        open_log(tmp_path / end)
    monkeypatch.chdir(tmp_path / "gpt2-a")
    open_log(tmp_path / "gpt2-b" / ".." / ends[0])  # the first again, by another way
    made, logged = wandb[::2], wandb[1::2]
    assert [call["id"] for call in made] == [made[0]["id"], made[1]["id"], made[0]["id"]]
    assert made[0]["id"] != made[1]["id"]
    assert {call["name"] for call in made} == {"finetune-rte-01234567-seed0"}
    assert all(call["resume"] == "allow" for call in made)
    assert logged == [(({"loss": 0.5},), {"step": 3})] * 3
