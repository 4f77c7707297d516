"""Runs zero-shot tasks through EleutherAI's lm-eval, as a library.

Tasks are named. They are lm-eval's own, whose data come from the hub, or those of a local folder of
task files, for which nothing is downloaded. A name of `TASK_SETS` stands for a paper's tasks. Code
from data sets is never run, and Python code that a local task file names only if it is allowed.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from experiments.support.errors import UserError, check_installed

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


# The tasks of AST's Table 2 and SLoPe's Table 3, which report plain `acc`, and of SLoPe's Table
# B.5.
TASK_SETS = {
    "ast": (
        *("boolq", "rte", "hellaswag", "winogrande"),
        *("arc_easy", "arc_challenge", "openbookqa"),
    ),
    "slope": (
        *("mmlu", "arc_challenge", "openbookqa", "winogrande"),
        *("hellaswag", "mathqa", "piqa", "race"),
    ),
    "slope_glue": ("cola", "mnli", "mnli_mismatch", "mrpc", "qnli", "qqp", "rte", "sst2"),
}


def expand(tasks: Sequence[str]) -> tuple[str, ...]:
    """The names of tasks, each once, with those of `TASK_SETS` replaced by that paper's tasks."""
    return tuple(dict.fromkeys(name for task in tasks for name in TASK_SETS.get(task, (task,))))


def identity(
    tasks: Sequence[str], task_folder: str | None, allow_code: bool = False
) -> dict[str, Any]:
    """Plain values that, besides the model, determine the scores: tasks, lm-eval's version, and the
    hash of the files in a folder of local tasks."""
    check_installed("lm_eval", "tasks need lm-eval", "hf")
    found: dict[str, Any] = {"tasks": list(tasks), "lm_eval": version("lm_eval")}
    if task_folder is not None:
        folder = Path(task_folder)
        if not folder.is_dir():
            raise UserError(f"task_folder={task_folder} is no folder")
        digest = hashlib.sha256()
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        for path in files:
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0")
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        found["task_files"] = digest.hexdigest()
        if not allow_code:
            _check_code([path for path in files if path.suffix in (".yaml", ".yml")])
    return found


def _check_code(tasks: list[Path]) -> None:
    """Raise a UserError if one of these task files, or one that they include, names Python code."""
    import yaml

    class Loader(yaml.SafeLoader):
        """Calls `tag` for lm-eval's own tags, which name functions."""

    def tag(loader: Any, suffix: str, node: Any) -> None:
        raise UserError(
            f"{task} has the tag {suffix} {node.value}, with which lm-eval runs Python code; if "
            "you trust it, add allow_code=true"
        )

    Loader.add_multi_constructor("", tag)
    for task in tasks:  # the list grows by the files that are included
        try:
            content = yaml.load(task.read_text(encoding="utf-8"), Loader)
        except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
            raise UserError(f"{task} is no task file: {error}") from error
        included = content.get("include", []) if isinstance(content, dict) else []
        for name in [included] if isinstance(included, str) else included:
            path = Path(name) if Path(name).is_file() else task.parent / name
            tasks += [path] if path not in tasks else []


def evaluate(
    config: Any,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    batch: int,
    dtype: torch.dtype | None,
) -> dict[str, dict[str, Any]]:
    """Results by task or group of tasks: `metrics`, `stderr`, `version`, `n` and `num_fewshot`.
    Task files of `config.task_folder` take precedence over lm-eval's own; paths in them are
    relative to the working directory. dtype: of autocast; None computes in that of the weights."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    tasks, task_folder, seed = config.tasks, config.task_folder, config.seed
    manager = TaskManager(include_path=task_folder, include_defaults=False)
    if not set(tasks) <= set(manager.all_tasks):  # loading lm-eval's own takes some seconds
        manager = TaskManager(include_path=task_folder)
    unknown = sorted(set(tasks) - set(manager.all_tasks))
    if unknown:
        where = "" if task_folder is None else f", nor has {task_folder}"
        raise UserError(f"lm-eval {version('lm_eval')} has no task {', '.join(unknown)}{where}")
    model.eval()
    lm = HFLM(
        pretrained=model,
        tokenizer=tokenizer,
        batch_size=batch,
        max_length=max_length,
        mixed_precision_dtype=dtype,
        trust_remote_code=False,
    )
    try:
        found = simple_evaluate(
            lm,
            tasks=list(tasks),
            num_fewshot=config.num_fewshot,
            limit=config.limit,
            task_manager=manager,
            bootstrap_iters=1000,  # for metrics whose standard error has no closed form
            log_samples=False,
            random_seed=seed,
            numpy_random_seed=seed,
            torch_random_seed=seed,
            fewshot_random_seed=seed,
        )
    except (ConnectionError, FileNotFoundError) as error:  # raised by datasets and the hub's client
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"the data of {', '.join(tasks)} could not be loaded: {reason}") from error
    assert found is not None  # None only on ranks other than 0
    return {name: _summary(found, name) for name in found["results"]}


def _summary(found: Any, task: str) -> dict[str, Any]:
    """The result of one task from lm-eval's answer, whose keys are `metric,filter`."""
    values = {k: v for k, v in found["results"][task].items() if isinstance(v, int | float)}
    by_metric: dict[str, float] = {}
    stderr: dict[str, float] = {}
    for key, value in values.items():
        metric, comma, chosen = key.partition(",")
        if not comma:
            continue
        name = metric if chosen == "none" else f"{metric}_{chosen}"
        into = stderr if metric.endswith("_stderr") else by_metric
        into[name.replace("_stderr", "")] = float(value)
    samples = found["n-samples"].get(task, {})
    return {
        "metrics": by_metric,
        "stderr": stderr,
        "version": found["versions"].get(task),
        "n": samples.get("effective"),
        "num_fewshot": found["n-shot"].get(task),
    }
