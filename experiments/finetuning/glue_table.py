"""Several tasks of GLUE, one after the other, in one table."""

from __future__ import annotations

import csv
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from experiments.finetuning import glue, tuning
from experiments.finetuning.config import FinetuneConfig
from experiments.support import checkpoint, results
from experiments.support.progress import say, silent
from experiments.training.distributed import world

SUBMISSION = "submission.zip"  # for GLUE's server


def finished(config: FinetuneConfig) -> dict[str, Any] | None:
    """The result of all tasks of this config, if it still agrees with the results of the tasks.

    Raises:
        UserError: there are no such data, or a result cannot be read.
    """
    shape = {"metrics": dict, "tasks": dict}
    result = results.read_finished(config.directory(), config.digest(), shape)
    if result is None:
        return None
    parts = {task: tuning.finished(config.single(task)) for task in config.recipes}
    found = {task: None if part is None else part["metrics"] for task, part in parts.items()}
    return result if found == result["tasks"] else None  # a task may have been repeated


def run(config: FinetuneConfig, report: Callable[[str], None] = say) -> dict[str, Any]:
    """Fine-tune on each task that is not done; return the content of the table's `result.json`.

    Raises:
        UserError: before anything is written, if run, data and recipe do not fit together.
    """
    with world(config.impl.device, config.impl.offload) as here:
        report = report if here.is_main else silent
        if (done := here.of_main(lambda: finished(config))) is not None:
            report(f"done already: {config.directory()}")
            return done
        tuning.open_model(config, config.open())
        for task in config.recipes:  # to find bad files before hours of training
            for load in (glue.load, glue.load_tests):
                here.main_first(partial(load, task, config.data))
        parts = {task: tuning.run(config.single(task), report) for task in config.recipes}
        result = _result(config, parts)
        result = here.of_main(partial(_write, config, parts, result))
        for line in _table(parts, result["metrics"]):
            report(line)
        report(f"written to {config.directory()}")
        return result


def _result(config: FinetuneConfig, parts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    scores = {task: part["metrics"]["score"] for task, part in parts.items()}
    return {
        "config_hash": config.digest(),
        "config": config.as_dict(),
        "seed": config.seed,
        "tier": config.tier,
        "task": config.task,
        "mode": config.mode,
        "metrics": {**scores, "score": sum(scores.values()) / len(scores)},
        "tasks": {task: part["metrics"] for task, part in parts.items()},
        "directories": {task: str(config.single(task).directory()) for task in parts},
        # All tasks have the same linears; take the worst of each number.
        "sparsity": {
            key: max(part["sparsity"][key] for part in parts.values())
            for key in ("density", "illegal_groups", "groups")
        },
        "converted": next(iter(parts.values()))["converted"],
    }


def _write(
    config: FinetuneConfig, parts: dict[str, dict[str, Any]], result: dict[str, Any]
) -> dict[str, Any]:
    directory = config.directory()
    with checkpoint.exclusive(directory):
        checkpoint.write_atomic(directory / "glue.csv", partial(_write_csv, parts))
        predictions = {
            f"{name}.tsv": Path(result["directories"][task]) / tuning.PREDICTIONS / f"{name}.tsv"
            for task in parts
            for name in glue.TASKS[task].tests
        }
        if there := {name: path for name, path in predictions.items() if path.is_file()}:
            checkpoint.write_atomic(directory / SUBMISSION, partial(_write_zip, there))
        return results.write_result(directory, result)


def _write_zip(files: dict[str, Path], path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, file in files.items():
            archive.write(file, name)


def _table(parts: dict[str, dict[str, Any]], metrics: dict[str, float]) -> list[str]:
    rows = [
        (task, f"{part['metrics']['score']:.1f}", tuning.metrics_text(part["metrics"]))
        for task, part in parts.items()
    ]
    rows.append((f"mean of {len(parts)}", f"{metrics['score']:.1f}", ""))
    return [f"{name:<10} {score:>5}  {text}".rstrip() for name, score, text in rows]


def _write_csv(parts: dict[str, dict[str, Any]], path: Path) -> None:
    """One row for each task and metric."""
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["task", "metric", "value", "dev_examples"])
        for task, part in parts.items():
            for name, value in part["metrics"].items():
                rows.writerow([task, name, value, part["examples"]["dev"]])
