"""Tests of an export: plain transformers gives the same outputs, and the files say what is in
them."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from common_kernels import check_nm
from experiments.data.corpus import load_tokens
from experiments.data.manifest import DataConfig
from experiments.data.tokenizer import folder_tokenizer
from experiments.exporting import export, files
from experiments.exporting.export import Form
from experiments.runs.finished import FinishedRun
from experiments.support.errors import UserError
from experiments.training import legality
from models.gpt2 import GPT, GPTConfig
from models.sparse import sha256_of
from tests.experiments.conftest import quiet
from tests.experiments.exporting.conftest import TEXT

# Tensor of the exported file -> dim of its inputs. Query, key and value lie in one tensor of ours.
BERT_LAYER = "bert.encoder.layer.0"
EXPECTED = {
    "gpt2": dict.fromkeys(
        (f"transformer.h.0.{name}.weight" for name in ("attn.c_attn", "mlp.c_fc", "mlp.c_proj")), 0
    ),
    "bert": dict.fromkeys(
        (
            *(f"{BERT_LAYER}.attention.self.{name}.weight" for name in ("query", "key", "value")),
            *(f"{BERT_LAYER}.{name}.dense.weight" for name in ("intermediate", "output")),
        ),
        1,
    ),
}


def masks_of(folder):
    """(the masks as bool tensors, what is told of them), both by the name of the tensor."""
    told = export.read_record(folder)["tensors"]
    stored = load_file(folder / "model.safetensors")
    return {name: stored[name] != 0 for name in told}, told


def test_plain_transformers_gives_the_same_outputs(exported):
    import transformers

    family, run, folder, _ = exported
    head = {"gpt2": "CausalLM", "bert": "MaskedLM", "vit": "ImageClassification"}[family]
    theirs = getattr(transformers, f"AutoModelFor{head}").from_pretrained(folder).eval()
    ours = run.model().eval()
    inputs = torch.randn(3, 3, 16, 16) if family == "vit" else torch.randint(0, 100, (3, 12))
    with torch.no_grad():
        expected = ours(inputs)[0]
        named = {"pixel_values" if family == "vit" else "input_ids": inputs}
        torch.testing.assert_close(theirs(**named).logits, expected, rtol=0, atol=1e-5)


def test_the_zeros_and_the_masks_are_those_of_the_run(exported):
    family, run, folder, _ = exported
    stored = load_file(folder / "model.safetensors")
    masks, told = masks_of(folder)
    if family in EXPECTED:
        assert {name: found["axis"] for name, found in told.items()} == EXPECTED[family]
    assert len(masks) == {"gpt2": 3, "bert": 5, "vit": 5}[family]
    assert export.read_patterns(folder) == dict.fromkeys(masks, (2, 4))
    kept = 0
    for name, mask in masks.items():
        found = stored[name]
        assert int(check_nm(found, 2, 4, dim=told[name]["axis"])) == 0
        assert not found.masked_select(~mask).view(torch.uint8).any(), "a zero that is not +0"
        assert told[name]["sha256"] == sha256_of(found)
        assert (told[name]["density"], told[name]["illegal_groups"]) == (0.5, 0)
        kept += int(mask.sum())
    weights = [run.model().get_parameter(f"{name}.weight") for name in run.converted]
    assert kept == sum(int(w.count_nonzero()) for w in weights)
    assert kept == sum(w.numel() for w in weights) // 2
    # The other matrices are dense: no mask was found for them by chance.
    others = {n for n, t in stored.items() if t.ndim == 2} - masks.keys()
    assert others and all(stored[n].count_nonzero() > stored[n].numel() / 2 for n in others)


def test_the_masks_of_a_square_conv1d_are_along_its_inputs(finished):
    """[in, out] of 16 x 16: the shape does not tell which dim the groups run along."""
    run = finished("gpt2", GPT(GPTConfig(**TEXT, n_inner=16)))
    folder = export.export(run, report=quiet)
    stored, (_, told) = load_file(folder / "model.safetensors"), masks_of(folder)
    name = "transformer.h.0.mlp.c_fc.weight"
    assert told[name]["axis"] == 0
    assert torch.equal(stored[name], run.model().get_parameter(name).t())
    assert int(check_nm(stored[name], 2, 4, dim=1)) > 0


def test_dense_weights_are_asked_for_and_go_elsewhere(trained, tmp_path):
    run = FinishedRun.open(shutil.copytree(trained.directory, tmp_path / "run"))
    sparse, dense = (export.export(run, Form(weights=w), report=quiet) for w in ("sparse", "dense"))
    assert (sparse.name, dense.name) == ("export", "export-dense")
    thin, full = (load_file(folder / "model.safetensors") for folder in (sparse, dense))
    for name, mask in masks_of(sparse)[0].items():
        assert bool((full[name] != 0).all())
        assert torch.equal(full[name][mask], thin[name][mask])  # STE masks its master weights


def test_the_tokenizer_is_the_run_s(exported, data):
    from transformers import AutoTokenizer

    family, run, folder, _ = exported
    if family == "vit":
        assert not list(folder.glob("tokenizer*"))
        return
    tokenizer, encoding = AutoTokenizer.from_pretrained(folder), run.tokenizer()
    text = "the mask  keeps two of four;\n\tweights' Überschuß 12 drops 四 \U0001f600 others "
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids == encoding.encode_ordinary_batch([text])[0] and len(ids) > 10
    assert tokenizer.model_max_length == 16
    if family == "gpt2":
        assert tokenizer.eos_token_id == encoding.eot_token
        assert tokenizer.decode(ids) == text
        manifest = load_tokens(DataConfig(**data["gpt2"]), 0).directory / "tokenizer.json"
        own = json.loads(manifest.read_text())["model"]["merges"]
        written = json.loads((folder / "tokenizer.json").read_text())["model"]["merges"]
        assert written == own  # as they were learnt
        converted = files._converted(encoding)  # as GPT-2's own, which has no such file
        assert converted.encode(text).ids == ids and converted.decode(ids) == text
        assert converted.encode("<|endoftext|>").ids == [encoding.eot_token]
    else:
        assert tokenizer.mask_token == "[MASK]" and tokenizer.eos_token is None
        ends = tokenizer.cls_token_id, tokenizer.sep_token_id
        assert tokenizer(text)["input_ids"] == [ends[0], *ids, ends[1]]
    assert folder_tokenizer(str(folder)).encode_ordinary_batch([text])[0] == ids


def test_legality_by_hand():
    model = nn.Sequential(nn.Linear(8, 2, bias=False), nn.Linear(2, 4))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1, 1, 1, 0, 0, 0, 0, 1], [1, 0, 1, 0, 1, 1, 1, 1.0]]))
    rows = legality.measure(model, {"0": (2, 4)})
    found = [rows[0][key] for key in ("density", "groups", "illegal_groups")]
    assert found == [10 / 16, 4, 2]
    assert legality.total([*rows, *legality.measure(model, {"0": (4, 8)})]) == {
        "density": 20 / 32,
        "illegal_groups": 2 + 1,  # 4 and 6 non-zeros in eight
        "groups": 6,
    }


def test_an_export_is_repeated_unless_it_is_whole_and_of_these_weights(finished, tmp_path):
    heard = []

    def again(run):
        assert export.export(run, to=tmp_path / "out", report=heard.append) == tmp_path / "out"
        return heard[-1].split(":")[0]

    run, folder = finished("gpt2"), tmp_path / "out"
    assert [again(run), again(run)] == ["exported", "exported already"]
    record = export.read_record(folder)
    found = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    assert {*record["files"], "sparse24.json"} == found
    assert again(finished("gpt2")) == "exported already"  # written later, and the same
    for name in record["files"]:
        content = (folder / name).read_bytes()
        for damage in ((folder / name).unlink, lambda: (folder / name).write_bytes(b"x")):  # noqa: B023
            damage()
            assert again(run) == "exported" and (folder / name).read_bytes() == content, name
    path = run.directory / "model.safetensors"
    save_file({name: 2 * tensor for name, tensor in load_file(path).items()}, path)
    assert again(run) == "exported"
    name = "transformer.ln_f.weight"
    assert torch.equal(load_file(folder / "model.safetensors")[name], load_file(path)[name])
    assert {path.name for path in tmp_path.iterdir()} == {"out", "run"}


def test_files_of_others_are_not_lost(finished, tmp_path):
    run, folder = finished("gpt2"), tmp_path / "out"
    export.export(run, to=folder, report=quiet)
    (folder / "notes.txt").write_text("mine")
    export.export(run, to=folder, report=quiet)  # it is whole, so nothing is written
    (folder / "config.json").unlink()
    with pytest.raises(UserError, match=r"out must be written anew, and holds notes\.txt; move"):
        export.export(run, to=folder, report=quiet)
    (folder / "notes.txt").unlink()
    export.export(run, to=folder, report=quiet)
    assert (folder / "config.json").is_file()


def test_an_exported_vit_prepares_images_as_validation_does(exported):
    from PIL import Image
    from transformers import CLIPImageProcessor

    from experiments.images.source import eval_transform

    family, run, folder, _ = exported
    if family != "vit":
        return
    pixels = np.random.default_rng(0).integers(0, 256, (36, 52, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    theirs = CLIPImageProcessor.from_pretrained(folder)(image, return_tensors="pt")["pixel_values"]
    # Both resize with their own bicubic filter: a few grey levels of 256, by a std of 0.35.
    assert (theirs[0] - eval_transform(run.data)(image)).abs().mean() < 4 / 256 / 0.35
