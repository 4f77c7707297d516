"""Several tasks of GLUE, one after the other, in one table."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from experiments.config.run import Run
from experiments.finetuning import glue, tuning
from experiments.finetuning.config import FinetuneConfig
from experiments.support import checkpoint, results
from experiments.support.progress import say, silent
from experiments.training.distributed import world


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
        this = here.broadcast_from_rank0(config.resolve)
        if (done := here.broadcast_from_rank0(lambda: finished(config))) is not None:
            report(f"done already: {this.directory}")
            return done
        tuning.open_model(config, config.open())
        for task in config.recipes:  # to find bad files before hours of training
            here.rank0_first(partial(glue.load, task, config.data))
        parts = {task: tuning.train(config.single(task), report) for task in config.recipes}
        result = here.broadcast_from_rank0(lambda: _write(this, parts))
        for task, (_, part) in parts.items():
            text = tuning.metrics_text(part["metrics"])
            report(f"{task:<10} {part['metrics']['score']:>5.1f}  {text}")
        report(f"{f'mean of {len(parts)}':<10} {result['metrics']['score']:>5.1f}")
        report(f"written to {this.directory}")
        return result


def _write(
    this: Run[FinetuneConfig], parts: dict[str, tuple[Path, dict[str, Any]]]
) -> dict[str, Any]:
    """Write `result.json`. parts: the directory and the result of each task."""
    config, found = this.config, {task: result for task, (_, result) in parts.items()}
    scores = {task: part["metrics"]["score"] for task, part in found.items()}
    result = {
        "config_hash": this.id,
        "config": config.as_dict(),
        "seed": config.seed,
        "tier": config.tier,
        "task": config.task,
        "mode": config.mode,
        "metrics": {**scores, "score": sum(scores.values()) / len(scores)},
        "tasks": {task: part["metrics"] for task, part in found.items()},
        "directories": {task: str(directory) for task, (directory, _) in parts.items()},
        # All tasks have the same linears; take the worst of each number.
        "sparsity": {
            key: max(part["sparsity"][key] for part in found.values())
            for key in ("density", "illegal_groups", "groups")
        },
        "converted": next(iter(found.values()))["converted"],
    }
    with checkpoint.exclusive(this.directory):
        return results.write_result(this.directory, result)
