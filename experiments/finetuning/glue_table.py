"""Several tasks of GLUE, one after the other, in one table."""

from __future__ import annotations

import csv
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.finetuning import glue, tuning
from experiments.finetuning.config import FinetuneConfig
from experiments.support import checkpoint, results
from experiments.support.progress import say


def finished(config: FinetuneConfig) -> dict[str, Any] | None:
    """The result of all tasks of this config, if it is made of the results that they have now.

    Raises:
        UserError: there are no such data, or a result cannot be read.
    """
    shape = {"metrics": dict, "tasks": dict}
    result = results.read_finished(config.directory(), config.digest(), shape)
    if result is None:
        return None
    parts = {task: tuning.finished(config.single(task)) for task in config.recipes}
    found = {task: None if part is None else part["metrics"] for task, part in parts.items()}
    return result if found == result["tasks"] else None  # one may have been done again


def run(config: FinetuneConfig, report: Callable[[str], None] = say) -> dict[str, Any]:
    """Fine-tune each task that is not done; returns the content of the table's `result.json`.

    Raises:
        UserError: before anything is written, if run, data and recipe do not fit together.
    """
    directory = config.directory()
    if (done := finished(config)) is not None:
        report(f"done already: {directory}")
        return done
    tuning.open_model(config, config.open())
    identity = {"config_hash": config.digest(), "config": config.as_dict()}
    for task in config.recipes:  # a file that is bad is found before hours of training
        glue.load(task, config.data)
    parts = {task: tuning.run(config.single(task), report) for task in config.recipes}
    scores = {task: part["metrics"]["score"] for task, part in parts.items()}
    metrics = {**scores, "score": sum(scores.values()) / len(scores)}
    with checkpoint.exclusive(directory):
        checkpoint.write_atomic(directory / "glue.csv", functools.partial(_write_csv, parts))
        result = {
            **identity,
            "seed": config.seed,
            "tier": config.tier,
            "task": config.task,
            "mode": config.mode,
            "metrics": metrics,
            "tasks": {task: part["metrics"] for task, part in parts.items()},
            "directories": {task: str(config.single(task).directory()) for task in parts},
            # The same linears in each task; the worst of each figure.
            "sparsity": {
                key: max(part["sparsity"][key] for part in parts.values())
                for key in ("density", "illegal_groups", "groups")
            },
            "converted": next(iter(parts.values()))["converted"],
        }
        result = results.write_result(directory, result)
    for line in _table(parts, metrics):
        report(line)
    report(f"written to {directory}")
    return result


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
