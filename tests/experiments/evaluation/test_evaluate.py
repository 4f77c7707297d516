"""The evaluation of runs and folders: which weights, what is said of them, what comes out. lm-eval
offline, on a task of this project's own against scores by hand."""

import dataclasses
import json
import shutil
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from PIL import Image

from experiments import evaluate
from experiments.evaluation import zero_shot
from experiments.evaluation.perplexity import perplexity, windows
from experiments.exporting import export
from experiments.images.dataset import ImageConfig
from experiments.images.source import ImageSource
from experiments.support.checkpoint import read_sealed
from experiments.support.errors import UserError
from experiments.training.routine import save_model
from models.vit import ViT, ViTConfig
from tests.experiments.conftest import CPU, quiet


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "held out.txt"
    path.write_text("the mask keeps two of four weights and drops others " * 12)
    return path


def configure(*overrides):
    return evaluate.load([*CPU, *overrides])


def test_perplexity_and_legality_of_a_run(trained, text):
    said = []
    config = configure(f"run={trained.directory}", f"ppl='{text}'", "block_size=8")
    result = evaluate.run(config, said.append)
    tokens = trained.tokenizer().encode_ordinary(text.read_text())
    expected = perplexity(trained.model(), windows(tokens, 8), batch=3)
    assert result["metrics"]["ppl_windows"] == len(tokens) // 8
    assert result["metrics"]["ppl"] == pytest.approx(expected["ppl"], rel=1e-6)
    assert result["weights"] == "sparse"
    assert result["sparsity"] == {"density": 0.5, "illegal_groups": 0, "groups": 512}
    assert [row["shape"] for row in result["linears"]] == [[64, 16], [16, 64]]
    assert said[0].startswith(f"WEIGHTS: sparse, as the method of {trained.directory} ended")
    stored = read_sealed(config.directory() / "result.json")
    assert stored == json.loads(json.dumps(result))
    assert config.directory().parent == trained.directory / "evaluate"


def test_the_directory_is_a_function_of_what_is_evaluated(trained, text):
    run, copy = f"run={trained.directory}", text.with_name("copy.txt")
    others = ("tier=mini", "weights=dense", "ppl=wikitext2", "dtype=bf16")
    seen = {configure(run, more).directory() for more in others}
    seen |= {configure(run, f"ppl='{text}'", *more).directory() for more in ([], ["block_size=8"])}
    assert len(seen) == 6
    copy.write_bytes(text.read_bytes())
    assert configure(run, f"ppl={copy}").directory() in seen
    copy.write_text("something else")
    assert configure(run, f"ppl={copy}").directory() not in seen


def test_replaced_weights_are_evaluated_anew(trained, tmp_path, made_again):
    run = shutil.copytree(trained.directory, tmp_path / "run")
    config = configure(f"run={run}")
    evaluate.run(config, quiet)
    said = []
    evaluate.run(configure(f"run={run}"), said.append)
    assert said[0] == f"done already: {config.directory()}"
    made_again(run, lambda state: state | {"transformer.h.0.mlp.c_fc.weight": torch.ones(64, 16)})
    again = evaluate.run(configure(f"run={run}"), quiet)
    assert again["sparsity"]["illegal_groups"] == 256


def test_an_exported_folder_gives_what_its_run_gives(trained, text, tmp_path):
    """It is known by its content, tokenizer included, and not by its place."""
    folder = export.export(trained, to=tmp_path / "exported", report=quiet)

    def at(place):
        return configure(f"model.path={place}", f"runs={tmp_path}", f"ppl='{text}'")

    config = at(folder)
    found = evaluate.run(config, quiet)
    expected = evaluate.run(configure(f"run={trained.directory}", f"ppl='{text}'"), quiet)
    assert found["metrics"]["ppl"] == pytest.approx(expected["metrics"]["ppl"], rel=1e-6)
    assert found["metrics"]["ppl_windows"] == expected["metrics"]["ppl_windows"]
    assert found["sparsity"] == expected["sparsity"]
    assert config.directory().parent == tmp_path / "evaluate"
    folder = folder.rename(tmp_path / "elsewhere")
    assert at(folder).digest() == config.digest()
    with (folder / "tokenizer.json").open("a") as file:
        file.write("\n")
    assert at(folder).digest() != config.digest()


def test_images_of_a_run_and_of_a_folder(tmp_path):
    """Top-1 and top-5 over all validation images, by hand and whatever the batch, of an untrained
    ViT."""
    torch.manual_seed(0)
    shape = {"width": 24, "depth": 1, "heads": 2, "patch_size": 8, "image_size": 16}
    model = ViT(ViTConfig(**shape, n_classes=10))
    data = {"name": "digits", "source": "digits", "image_size": 16}
    config = {
        "model": {"name": "vit", **dataclasses.asdict(model.config)},
        "data": data,
        "method": {"name": "dense"},
    }
    run = tmp_path / "run"
    save_model(model, run / "model.safetensors")
    content = {"schema": 1, "config_hash": "0", "config": config, "seed": 0, "converted": []}
    content["corpus"] = {"classes": [str(digit) for digit in range(10)]}
    (run / "result.json").write_text(json.dumps(content))

    def images(*more):
        return configure(f"run={run}", "images=val", *more)

    metrics = evaluate.run(images(), quiet)["metrics"]
    model.eval()
    source = ImageSource(ImageConfig(**data), model.config, 0, 2)
    [batch] = source.eval_batches(400, 400)
    with torch.no_grad():
        logits = model(batch["input"])[0]
    of_class = batch["target"][:, None]
    ahead = (logits - logits.gather(1, of_class)).scatter(1, of_class, -torch.inf)
    assert metrics["val_images"] == 400
    # Sums of 24 to 96 fp32 products of numbers below 10 round by far less than 1e-4.
    for k in (1, 5):
        least, most = (int(((ahead > edge).sum(1) < k).sum()) for edge in (-1e-4, 1e-4))
        assert least <= round(4 * metrics[f"val_top{k}"]) <= most <= least + 8
    folder = tmp_path / "folder"
    for label in range(10):
        (folder / "val" / str(label)).mkdir(parents=True)
        for n in range(2):
            Image.new("RGB", (20, 20), (25 * label, 10 * n, 0)).save(
                folder / f"val/{label}/{n}.png"
            )
    other = images(f"data.source={folder}")  # it needs no train
    assert evaluate.run(other, quiet)["metrics"]["val_images"] == 20


TASK = Path(__file__).parent / "lm_eval_task"


@pytest.fixture
def local(monkeypatch, tmp_path):
    """The task's folder as the working directory; caches elsewhere, nothing downloaded."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(TASK)


def by_hand(run):
    """Per question, whether the right choice has the highest log likelihood behind the question."""
    model, encoding = run.model().eval(), run.tokenizer()
    right = []
    for line in (TASK / "colours.jsonl").read_text().splitlines():
        question = json.loads(line)
        context = encoding.encode_ordinary(question["question"])
        scores = []
        for choice in question["choices"]:
            ids = encoding.encode_ordinary(f"{question['question']} {choice}")
            assert ids[: len(context)] == context
            with torch.no_grad():
                logits = model(torch.tensor([ids]))[0].log_softmax(-1)[0]
            places = range(len(context), len(ids))
            scores.append(sum(float(logits[i - 1, ids[i]]) for i in places))
        right.append(scores.index(max(scores)) == question["answer"])
    return right


def options(*more):
    return ["tasks=[colours]", "task_folder=.", *CPU, *more]


def test_a_local_task_on_an_exported_model(trained, local, tmp_path):
    folder = export.export(trained, to=tmp_path / "exported", report=quiet)
    config = evaluate.load(options(f"model.path={folder}", f"runs={tmp_path}"))
    result = evaluate.run(config, quiet)
    right = by_hand(trained)
    assert result["metrics"] == {"colours_acc": sum(right) / 4}
    task = result["tasks"]["colours"]
    assert (task["version"], task["n"], task["num_fewshot"]) == (1.0, 4, 0)
    assert task["stderr"]["acc"] == pytest.approx(
        (sum(right) / 4 * (1 - sum(right) / 4) / 3) ** 0.5
    )
    assert result["identity"]["zero_shot"]["lm_eval"] == version("lm_eval")
    assert result["sparsity"]["density"] == 0.5 and result["sparsity"]["illegal_groups"] == 0


def test_every_option_is_passed_and_part_of_the_identity(trained, local, monkeypatch):
    """... as are the files of the folder. lm-eval answers with one task."""
    import lm_eval
    import lm_eval.models.huggingface

    asked = {}
    answer = {"results": {"colours": {"acc,none": 0.5}}, "n-samples": {}, "versions": {}}
    answer["n-shot"] = {}
    monkeypatch.setattr(lm_eval.models.huggingface, "HFLM", lambda **given: asked.update(given))
    monkeypatch.setattr(
        lm_eval, "simple_evaluate", lambda _, **given: asked.update(given) or answer
    )
    run = f"run={trained.directory}"
    given = "num_fewshot=2", "limit=2", "seed=5", "dtype=bf16"
    digests = {evaluate.load(options(run, *more)).digest() for more in ([], *([g] for g in given))}
    assert len(digests) == 5
    evaluate.run(evaluate.load(options(run, *given)), quiet)
    assert asked.items() >= {
        "num_fewshot": 2, "limit": 2, "fewshot_random_seed": 5, "tasks": ["colours"],
        "mixed_precision_dtype": torch.bfloat16, "max_length": 32,
    }.items()  # fmt: skip


def test_task_files_are_known_by_content_and_name_no_code_without_a_flag(tmp_path):
    """... also in a file outside the folder that one of its files includes."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "x.yaml").write_text("task: x\ninclude: ../base\n")
    seen = []
    for content in ("one", "two", "one"):
        (folder / "data.jsonl").write_text(content)
        (tmp_path / "base").write_text("doc_to_text: text\n")
        seen.append(zero_shot.identity(["x"], str(folder))["task_files"])
    assert seen[0] == seen[2] != seen[1]
    for tag in ("!function u.f", "!%66unction u.f"):
        (tmp_path / "base").write_text(f"doc_to_text: {tag}\n")
        message = r"base has the tag !function u\.f, with which lm-eval runs Python .* allow_code="
        with pytest.raises(UserError, match=message):
            zero_shot.identity(["x"], str(folder))
        assert zero_shot.identity(["x"], str(folder), allow_code=True)["task_files"]
