"""The log of a run, and its chart at Weights & Biases."""

import sys
from types import SimpleNamespace

import pytest

from experiments.errors import UserError
from experiments.tracking import MetricsLog, read_metrics


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
    log = MetricsLog(directory, [], ("wandb",))
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


def test_a_full_disk_is_one_line_and_cuts_no_record_but_the_last(tmp_path, full_disk):
    log = MetricsLog(tmp_path, [], ())
    record = {"step": 0, "text": "x" * 300}
    with full_disk(1000), pytest.raises(UserError, match=r"metrics\.jsonl cannot be written: File"):
        for step in range(4):
            log.write({**record, "step": step})
    assert [r["step"] for r in read_metrics(log.path)] == [0, 1, 2]
    MetricsLog(tmp_path, log.lines, ()).close()
    assert [r["step"] for r in read_metrics(log.path)] == [0, 1, 2, 3]


def test_a_damaged_line_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n\x00\xff\n{"step": 2}\n')
    with pytest.raises(UserError, match=r"line 2 of .*metrics\.jsonl is damaged; remove"):
        read_metrics(path)
