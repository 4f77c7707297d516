"""lm-eval offline: a task of this project's own on a nano model, against scores by hand."""

import functools
import json
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from experiments import evaluate
from experiments.evaluation import zero_shot
from experiments.exporting import export
from experiments.support.errors import UserError
from tests.experiments.conftest import quiet

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
    return ["tasks=[colours]", "task_folder=.", "impl.device=cpu", "impl.threads=1", *more]


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
    digests = {evaluate.load(options(run)).digest()}
    for name, override, passed in (
        ("num_fewshot", "num_fewshot=2", 2),
        ("limit", "limit=2", 2),
        ("fewshot_random_seed", "seed=5", 5),
        ("mixed_precision_dtype", "dtype=bf16", torch.bfloat16),
    ):
        config = evaluate.load(options(run, override))
        evaluate.run(config, quiet)
        assert asked[name] == passed, override
        assert asked["tasks"] == ["colours"] and asked["max_length"] == 32
        assert config.digest() not in digests, override
        digests.add(config.digest())
    assert asked["num_fewshot"] is None and asked["limit"] is None  # where not asked for


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


def test_an_unknown_task_is_one_line(trained, local, monkeypatch):
    """lm-eval is without its own 14,000 tasks, which take a while to list."""
    import lm_eval.tasks

    manager = functools.partial(lm_eval.tasks.TaskManager, include_defaults=False)
    monkeypatch.setattr(
        lm_eval.tasks, "TaskManager", lambda include_path, **_: manager(include_path=include_path)
    )
    config = evaluate.load(options("tasks=[colours,smells]", f"run={trained.directory}"))
    with pytest.raises(UserError, match=r"lm-eval \S+ has no task smells, nor has \.$"):
        evaluate.run(config, quiet)
