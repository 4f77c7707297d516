"""The log of a run, its chart at Weights & Biases and its event file."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from experiments.support.errors import UserError
from experiments.training import pretraining, routine
from experiments.training.tracking import MetricsLog, read_metrics


@pytest.fixture
def wandb(monkeypatch):
    """The list of arguments with which `wandb.init` and the run's `log` were called."""
    calls = []
    log = SimpleNamespace(log=lambda *a, **k: calls.append((a, k)), finish=lambda: None)
    module = SimpleNamespace(init=lambda **keywords: calls.append(keywords) or log)
    monkeypatch.setitem(sys.modules, "wandb", module)
    return calls


@pytest.fixture
def tensorboard(monkeypatch):
    """Scalars by event file, as `SummaryWriter` writes one for each that is opened."""
    files = {}

    class SummaryWriter:
        def __init__(self, directory):
            self.path = Path(directory) / f"events.out.tfevents.{len(files)}"
            self.path.touch()
            self.scalars = files[self.path] = {}

        def add_scalar(self, name, value, step):
            assert (name, step) not in self.scalars
            self.scalars[name, step] = value

        def add_text(self, name, text):
            self.scalars[name] = text

        def close(self):
            """Nothing is open."""

    module = SimpleNamespace(SummaryWriter=SummaryWriter)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    return files


def test_a_run_that_was_stopped_has_one_chart_and_one_event_file(
    tiny, wandb, tensorboard, monkeypatch, interrupted
):
    """With all of its records and its config, and those before the stop but once."""
    monkeypatch.setattr(routine, "check_installed", lambda *viewer: None)
    config = tiny("method=ste", "impl.loggers=[wandb,tensorboard]")
    with interrupted(5):
        pretraining.run(config, lambda message: None)
    pretraining.run(config, lambda message: None)
    directory = config.directory()
    opened = [call for call in wandb if isinstance(call, dict)]
    assert len(opened) == 2 and opened[0] == opened[1]
    assert opened[0]["config"] == config.as_dict()
    [events] = directory.glob("events.out.tfevents.*")
    scalars = tensorboard[events]
    assert '"name": "ste"' in scalars.pop("config")
    assert scalars == {
        (name, record["step"]): value
        for record in read_metrics(directory / "metrics.jsonl")
        for name, value in record.items()
        if name != "step" and isinstance(value, int | float)
    }


def test_a_full_disk_and_a_damaged_line_are_one_line(tmp_path, full_disk):
    """The disk cuts no record but the last."""
    log = MetricsLog(tmp_path, [], (), {})
    record = {"step": 0, "text": "x" * 300}
    with full_disk(1000), pytest.raises(UserError, match=r"metrics\.jsonl cannot be written: File"):
        for step in range(4):
            log.write({**record, "step": step})
    assert [r["step"] for r in read_metrics(log.path)] == [0, 1, 2]
    MetricsLog(tmp_path, log.lines, (), {}).close()
    assert [r["step"] for r in read_metrics(log.path)] == [0, 1, 2, 3]
    log.path.write_bytes(b'{"step": 0}\n\x00\xff\n{"step": 2}\n')
    with pytest.raises(UserError, match=r"line 2 of .*metrics\.jsonl is damaged; remove"):
        read_metrics(log.path)
