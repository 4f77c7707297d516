"""Checkpoints and tokenizers of the hub, at a commit; the hub itself is a folder here."""

import json
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from experiments.config.initial import HFConfig
from experiments.config.run import load
from experiments.data import parallel
from experiments.data.manifest import DataConfig
from experiments.data.parallel import PairsConfig
from experiments.data.prepare import prepare
from experiments.evaluation.config import load as load_evaluation
from experiments.finetuning.config import load as load_finetuning
from experiments.support import hub

COMMITS = {"main": "a" * 40, "old": "b" * 40}


@pytest.fixture
def hub_calls(tmp_path, monkeypatch, hf_model, corpus_dir):
    """The list of requests to the hub, which has `owner/tiny` with a tokenizer, main and old."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    (text,) = corpus_dir.glob("words-v300/tokenizer.json")
    for commit in COMMITS.values():
        folder = tmp_path / "snapshots" / commit
        hf_model("gpt2").save_pretrained(folder)
        PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_file(str(text)), eos_token="<|endoftext|>"
        ).save_pretrained(folder)
    calls = []

    def snapshot_download(repo_id, *, revision=None, allow_patterns):
        calls.append((repo_id, revision))
        if repo_id != "owner/tiny":
            raise LocalEntryNotFoundError("offline")
        known = COMMITS | {commit: commit for commit in COMMITS.values()}
        return str(tmp_path / "snapshots" / known[revision or "main"])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


@pytest.mark.parametrize(("revision", "name"), [("", "main"), ("@old", "old")])
def test_text_and_pairs_are_of_one_commit_which_is_recorded(tmp_path, monkeypatch, revision, name):
    """Also where the source names none: all its files are then asked for by that commit."""
    datasets = pytest.importorskip("datasets")
    tables = {
        "owner/text": datasets.Dataset.from_dict({"text": ["the mask"] * 4}),
        "owner/pairs": {
            split: datasets.Dataset.from_list([{"translation": {"de": "eins", "en": "one"}}] * 2)
            for split in parallel.SPLITS
        },
    }
    asked = []

    class HfApi:
        def dataset_info(self, hub_id, revision):
            return SimpleNamespace(sha=COMMITS[revision or "main"])

    def load_dataset(builder, data_files, **options):
        asked.append(data_files if isinstance(data_files, str) else data_files["train"])
        return tables[asked[-1].removeprefix("hf://datasets/").partition("@")[0]]

    monkeypatch.setattr(huggingface_hub, "HfApi", HfApi)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for kind, what, path in ((DataConfig, "text", "/*.parquet"), (PairsConfig, "pairs", "/de-en")):
        hub.pinned.cache_clear()
        source = f"hf://datasets/owner/{what}{revision}{path}"
        directory = prepare(kind(what, source, str(tmp_path), "bpe", 300))
        manifest = json.loads((directory / "manifest.json").read_text())
        assert manifest["source"]["revisions"] == [COMMITS[name]]
        pinned = f"hf://datasets/owner/{what}@{COMMITS[name]}{path}"
        assert {url.partition("/train-")[0] for url in asked} == {pinned}
        asked.clear()


@pytest.mark.parametrize(("revision", "name"), [("", "main"), ("@old", "old")])
def test_a_run_names_the_commit_of_its_model(hub_calls, revision, name):
    path = f"owner/tiny{revision}"
    config = load(["model=hf", f"model.path={path}", "method=dense", "train=nano"])
    pinned = f"owner/tiny@{COMMITS[name]}"
    assert config.as_dict()["model"]["path"] == pinned
    assert HFConfig(pinned).folder == HFConfig(path).folder
    assert "path" not in config.identity()["model"]
    assert load_evaluation([f"model.path={path}"]).as_dict()["model"]["path"] == pinned
    tuned = load_finetuning(
        [f"model.path={path}", f"data.source={Path(__file__).parents[1]}/finetuning/glue"]
    )
    assert tuned.source.pinned == pinned
