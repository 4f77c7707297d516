"""One file of tensors, or several with an index."""

import json

import pytest
import torch

from experiments.config.initial import check_run_files
from experiments.runs.finished import FinishedRun
from experiments.support import tensor_files
from experiments.support.errors import UserError
from experiments.training import pretraining

CPU = torch.device("cpu")


@pytest.fixture
def small(monkeypatch):
    """`small(n)`: from now on no file has more than n bytes of tensors."""
    return lambda size: monkeypatch.setattr(tensor_files, "LARGEST", size)


def test_tensors_come_back_from_several_files(tmp_path, small):
    path = tmp_path / "model.safetensors"
    tensors = {"a": torch.arange(6.0).view(3, 2).t(), "b": torch.ones(1000), "c": torch.ones(())}
    tensors["d"] = torch.zeros(3, dtype=torch.bool)
    assert tensor_files.save(tensors, path) == [path.name]
    assert tensor_files.files(path) == [path]
    small(100)
    names = tensor_files.save(tensors, path)  # one tensor alone is larger
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    assert names == ["model.safetensors.index.json", *shards]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(names)  # the one file is gone
    assert [p.name for p in tensor_files.files(path)] == names
    found, shapes = tensor_files.load(path, CPU), tensor_files.load(path, torch.device("meta"))
    assert found.keys() == shapes.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor)
        assert shapes[name].is_meta and shapes[name].shape == tensor.shape
    index = json.loads((tmp_path / names[0]).read_text())
    assert index["metadata"] == {"total_size": 24 + 4000 + 4 + 3}
    where = {"a": shards[1], "b": shards[0], "c": shards[1], "d": shards[1]}
    assert index["weight_map"] == where
    small(10**6)
    assert tensor_files.save(tensors, path) == [path.name]
    assert list(tmp_path.iterdir()) == [path]


def test_a_run_in_several_files_is_read_as_one(tiny, tmp_path, small):
    options = ["method=s_ste", "train.steps=2", "train.warmup_steps=0", "train.ema=0.5"]
    one, several = (tiny(*options, f"runs={tmp_path / name}") for name in ("one", "several"))
    for config, size in ((one, 10**9), (several, 4000)):
        small(size)
        pretraining.run(config, lambda line: None)
    first, second = (FinishedRun.open(config.directory()) for config in (one, several))
    files = second.result["files"]
    for name in ("model", "latent", "ema"):
        assert f"{name}.safetensors.index.json" in files and f"{name}.safetensors" not in files
    for read in (FinishedRun.model, lambda run: run.model("dense"), FinishedRun.averaged):
        found, expected = (read(run).state_dict() for run in (second, first))
        assert all(torch.equal(found[key], value) for key, value in expected.items())
    assert second.latent.keys() == first.latent.keys() != set()
    shards = [name for name in files if name.startswith("model-0000")]
    assert pretraining.finished(several) is not None
    (second.directory / shards[-1]).unlink()
    with pytest.raises(UserError, match=f"{shards[-1]} is missing; make the run again"):
        check_run_files(second.directory, second.result, "model.safetensors")
    assert pretraining.finished(several) is None
