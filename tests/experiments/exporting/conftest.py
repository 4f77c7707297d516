"""Finished runs of tiny models with random weights, and their exports."""

import dataclasses
import json

import pytest
import torch

from common_kernels import nm_mask
from experiments.data.manifest import read_manifest
from experiments.data.mlm import MLMConfig
from experiments.data.prepare import prepare
from experiments.exporting.export import Form, export
from experiments.images.dataset import ImageConfig
from experiments.runs.finished import FinishedRun
from experiments.training import pretraining
from experiments.training.routine import save_model
from models.bert import BertConfig, BertLM
from models.gpt2 import GPT, GPTConfig
from models.vit import ViT, ViTConfig
from tests.experiments.conftest import quiet

TEXT = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 320, "block_size": 16}
IMAGE = {"width": 24, "depth": 1, "heads": 2, "patch_size": 8, "image_size": 16, "n_classes": 10}
FAMILIES = {
    "gpt2": (lambda: GPT(GPTConfig(**TEXT)), ("*mlp.*", "*attn.c_attn")),
    "bert": (lambda: BertLM(BertConfig(**TEXT)), ("*mlp.*", "*attention.self.*")),
    "vit": (lambda: ViT(ViTConfig(**IMAGE)), ("*mlp.*", "*attn.qkv")),
}


@pytest.fixture(scope="session")
def data(corpus_dir):
    """The data of a run by the family of its model, as plain values."""
    source = str(corpus_dir / "text")
    text = {"name": "words", "source": source, "root": str(corpus_dir)}
    pieces = {**text, "tokenizer": "wordpiece", "vocab_size": 120}
    prepare(MLMConfig(**pieces))
    return {
        "gpt2": {**text, "tokenizer": "bpe", "vocab_size": 300},
        "bert": pieces,
        "vit": dataclasses.asdict(ImageConfig("digits", "digits", image_size=16)),
    }


def write_run(directory, family, model, data):
    """The files of a finished run of `model`, made 2:4 in the linears chosen above."""
    config = {
        "model": {"name": f"{family}_tiny", **dataclasses.asdict(model.config)},
        "data": data,
        "method": {"name": "ste", "include": list(FAMILIES[family][1])},
    }
    chosen = FinishedRun(directory, {"config": config}).trained_with.matching_linears(model)
    with torch.no_grad():
        for layer in chosen.values():
            layer.weight *= nm_mask(layer.weight)
    save_model(model, directory / "model.safetensors")
    result = {"schema": 1, "config_hash": "0123456789abcdef", "config": config, "seed": 3,
              "tier": "smoke", "converted": list(chosen)}  # fmt: skip
    if family != "vit":
        corpus = FinishedRun(directory, result).data
        result["corpus"] = read_manifest(corpus)
        pretraining.keep_tokenizer(result["corpus"], corpus.directory, directory)
    (directory / "result.json").write_text(json.dumps(result))
    return FinishedRun.open(directory)


@pytest.fixture
def finished(data, tmp_path):
    """finished("bert") -> FinishedRun of a model with random weights."""

    def write(family, model=None):
        torch.manual_seed(0)
        return write_run(tmp_path / "run", family, model or FAMILIES[family][0](), data[family])

    return write


@pytest.fixture(scope="session", params=list(FAMILIES))
def exported(request, data, tmp_path_factory):
    """(family, run, folder of its export, folder of its compressed export), made once: a test that
    changes a file copies the folder."""
    torch.manual_seed(0)
    family = request.param
    directory = tmp_path_factory.mktemp("finished") / family
    run = write_run(directory, family, FAMILIES[family][0](), data[family])
    return family, run, export(run, report=quiet), export(run, Form(compressed=True), report=quiet)
