"""Fine-tune a pre-trained GPT-2 or BERT: `python -m experiments.finetune run=DIR task=cola`.

`task` is one of the nine of GLUE, `squad`, or `glue`: those that the recipe lists, one after the
other, in one table.
`model.path=FOLDER` takes a checkpoint of transformers (a causal model or BERT) instead of a run; it
is fine-tuned densely.

Writes into `<run>/finetune/<task>-<mode>-<hash>/seed<n>`: `metrics.jsonl`, with the metrics on the
dev split after each epoch, and at the end `result.json`; for `glue` also `glue.csv`. The result is
that of the last epoch, never the best one, as in the papers. A finished run is recognised and not
repeated; one that was stopped goes on from its last checkpoint. One process, one device.
"""

from __future__ import annotations

import csv
import functools
import math
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common_kernels import backend
from experiments.config.driver import driver
from experiments.config.settings import TrainConfig
from experiments.data.source import Batch
from experiments.data.tokenizer import check_vocabulary
from experiments.finetuning import glue
from experiments.finetuning.config import GLUE, Checkpoint, FinetuneConfig, freeze
from experiments.finetuning.config import load as load
from experiments.finetuning.tasks import Encoded, Problem, collate, load_problem
from experiments.runs.finished import FinishedRun
from experiments.support import checkpoint, results
from experiments.support.errors import UserError, deferred_stop
from experiments.support.progress import Progress, say
from experiments.training import legality
from experiments.training.distributed import World, world
from experiments.training.optimization import (
    DTYPES,
    NonFiniteGradient,
    Optimization,
    generators,
    set_generators,
)
from experiments.training.pretraining import process_settings
from experiments.training.tracking import MetricsLog, check_viewers
from methods import Method, dense
from models.bert import BertLM
from models.gpt2 import GPT
from models.heads import Head
from models.hf import CausalLM

EVAL_BATCH = 64  # sequences per forward pass, unless impl.micro_batch says


def finished(config: FinetuneConfig) -> dict[str, Any] | None:
    """The result of this very config on this very data and these weights, if run to the end.

    Raises:
        UserError: there are no such data, or the result cannot be read.
    """
    own = {"tasks": dict} if config.task == GLUE else {"pretrained": {"weights_hash": str}}
    shape = {"metrics": dict, **own}
    result = results.read_finished(config.directory(), config.digest(), shape)
    if result is None:
        return None
    if config.task == GLUE:
        parts = {task: finished(config.single(task)) for task in config.recipes}
        found = {task: None if part is None else part["metrics"] for task, part in parts.items()}
        return result if found == result["tasks"] else None  # one may have been done again
    return result if result["pretrained"]["weights_hash"] == config.weights_hash() else None


def run(config: FinetuneConfig, report: Callable[[str], None] = say) -> dict[str, Any]:
    """Fine-tune, or do nothing if it is done; returns the content of `result.json`.

    Raises:
        UserError: before anything is written, if run, data and recipe do not fit together.
    """
    done = finished(config)
    if done is not None:
        report(f"done already: {config.directory()}")
        return done
    if config.task == GLUE:
        return _run_glue(config, report)
    with process_settings(config.impl), world(config.impl.device) as here:
        if here.size > 1:
            raise UserError("fine-tuning takes one process; start it without torchrun")
        check_viewers(config.impl.loggers)
        source, hashes = config.open(), Hashes.of(config)
        pretrained = open_model(config, source)
        problem = load_problem(config, source.tokenizer())
        if Hashes.of(config) != hashes:
            raise UserError(f"{config.source} or {config.data} was changed while it was read")
        model, method, train = _prepare(config, source, pretrained, problem, here)
        directory = config.directory()
        with checkpoint.exclusive(directory):
            done = finished(config)  # by another process, since it was asked above
            if done is not None:
                report(f"done already: {directory}")
                return done
            kind = "dense" if isinstance(method, dense.Method) else "sparse"
            report(f"{config.task}, {kind}, seed {config.seed} -> {directory}")
            tuning = Tuning(config, hashes, problem, model, method, train, here, report)
            tuning.resume()
            return tuning.result(source)


def open_model(config: FinetuneConfig, source: FinishedRun | Checkpoint) -> GPT | BertLM | CausalLM:
    """The model that is fine-tuned, on the CPU.

    Raises:
        UserError: it is no model of text, or is made for shorter sequences.
    """
    pretrained = source.model(config.weights)
    if not isinstance(pretrained, GPT | BertLM | CausalLM):
        raise UserError(
            f"run={config.source} holds a {type(pretrained).__name__}; fine-tuning needs a model "
            "of text: GPT-2 or BERT"
        )
    longest = Head(pretrained).block_size
    trained = source.longest or longest
    for task, recipe in config.recipes.items():
        if recipe.max_length > min(longest, trained):
            what = "takes" if longest <= trained else "was trained on sequences of"
            longest = min(longest, trained)
            raise UserError(
                f"recipe.max_length={recipe.max_length} for {task}, but the model {what} {longest} "
                f"tokens; set recipe.max_length={longest}"
            )
    return pretrained


def _prepare(
    config: FinetuneConfig,
    source: FinishedRun | Checkpoint,
    pretrained: GPT | BertLM | CausalLM,
    problem: Problem,
    here: World,
) -> tuple[Head, Method, TrainConfig]:
    """The converted model on its device, and the settings of its training."""
    recipe = config.recipe
    splits = (problem.train, *problem.dev.values())
    vocabulary: Any = getattr(pretrained, "config", pretrained).vocab_size
    check_vocabulary(max(max(s.ids) for split in splits for s in split), vocabulary)
    torch.manual_seed(config.seed)
    model = problem.head(pretrained)
    model.to(here.device)
    train = recipe.train(recipe.epochs * math.ceil(len(problem.train) / recipe.batch_size))
    try:
        backend.resolve(here.device)
        dtype, matmul = DTYPES[recipe.dtype], config.impl.matmul
        method = source.method_for(model, config.mode, train.steps, config.seed, dtype)
        size = min(config.impl.micro_batch or recipe.batch_size, recipe.batch_size)
        # Shorter batches run sparse, too; the products are measured for the longest.
        method.accelerate(size * recipe.max_length, None if matmul == "auto" else matmul)
    except (ValueError, RuntimeError) as error:
        raise UserError(str(error)) from error
    return model, method, train


@dataclass(frozen=True)
class Hashes:
    """Of what a fine-tuning reads: the weights, and the tasks' files (None of those of the hub)."""

    weights: str
    data: str | None

    @classmethod
    def of(cls, config: FinetuneConfig) -> Hashes:
        return cls(config.weights_hash(), config.data_hash())


class Tuning:
    """The epochs of one fine-tuning.

    The sequences of an epoch come in an order by the seed and the epoch; the last batch may be
    smaller.
    """

    def __init__(
        self,
        config: FinetuneConfig,
        hashes: Hashes,
        problem: Problem,
        model: Head,
        method: Method,
        train: TrainConfig,
        here: World,
        report: Callable[[str], None],
    ) -> None:
        self.config, self.problem, self.model, self.method = config, problem, model, method
        self.hashes = hashes
        self.train, self.here, self.report = train, here, report
        self.optimization = Optimization(
            model,
            method,
            train,
            here.device,
            compiled=config.impl.compile,
            rate="recipe.learning_rate",
        )
        self.step = 0
        self.lines: list[str] = []  # of the log
        # Of the steps since the epoch began.
        self.loss_sum, self.loss_count = torch.zeros((), device=here.device), 0

    @property
    def checkpoints(self) -> Path:
        return self.config.directory() / "checkpoints"

    def result(self, source: FinishedRun | Checkpoint) -> dict[str, Any]:
        """Train, evaluate after each epoch, and write `result.json`."""
        started, config = time.time(), self.config
        if self.here.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        identity = {"config_hash": config.digest(), "config": config.as_dict()}
        directory = config.directory()
        patterns = {name: self.method.pattern(name) for name in self.method.layers}
        metrics = self.fit(directory)
        result = {
            **identity,
            "data_hash": self.hashes.data,
            "pretrained": {
                "method": source.method,
                "config_hash": source.config_hash,
                "weights_hash": self.hashes.weights,
            },
            "seed": config.seed,
            "tier": config.tier,
            "task": config.task,
            "mode": config.mode,
            "tuned": "dense" if isinstance(self.method, dense.Method) else "sparse",
            "steps": self.step,
            "skipped_steps": self.optimization.skipped,
            "examples": self.problem.examples,
            "sequences": {
                "train": len(self.problem.train),
                **{split: len(own) for split, own in self.problem.dev.items()},
            },
            "metrics": metrics,
            "sparsity": legality.total(legality.measure(self.model, patterns)),
            "converted": list(patterns),
            "backend": backend.resolve(self.here.device),
            "started": started,
            "ended": time.time(),
        }
        result = results.write_result(directory, result)
        shutil.rmtree(self.checkpoints, ignore_errors=True)
        self.report(f"{config.task}: {_metrics_text(metrics)}")
        return result

    def fit(self, directory: Path) -> dict[str, float]:
        """The epochs that are left, logged there; the metrics after the last are those of the
        finalized model."""
        recipe, metrics = self.config.recipe, {}
        every = self.config.impl.checkpoint_every
        steps = self.train.steps // recipe.epochs  # of an epoch
        loggers, config = self.config.impl.loggers, self.config.as_dict()
        log = MetricsLog(directory, self.lines, loggers, config)
        sequence = sum(len(s.ids) for s in self.problem.train) / len(self.problem.train)
        tokens = 0
        self.model.train()
        with (
            Progress(self.train.steps, self.step, "tokens", enabled=True) as progress,
            deferred_stop() as stop,
        ):
            for epoch in range(self.step // steps + 1, recipe.epochs + 1):
                for sequences in self._batches(epoch):
                    self.loss_sum = self.loss_sum + self._train_step(sequences)
                    self.loss_count += 1
                    self.step += 1
                    loss = float(self.loss_sum) / self.loss_count
                    tokens += round(len(sequences) * sequence)
                    progress.update(self.step, tokens, loss)
                    if self.step == epoch * steps:
                        if epoch == recipe.epochs:
                            self.method.finalize(self.model)
                        metrics = self.evaluate()
                        log.write({"step": self.step, "epoch": epoch, "loss": loss, **metrics})
                        self.loss_sum, self.loss_count = torch.zeros_like(self.loss_sum), 0
                    due = stop.kind is not None or (every and self.step % every == 0)
                    if every and due and self.step < self.train.steps:
                        self.save(log)
                    if stop.kind is not None:
                        raise stop.kind
        log.close()
        return metrics

    def _batches(self, epoch: int) -> Iterator[list[Encoded]]:
        """The sequences of each step of an epoch, the first 1, that is left."""
        data, size = self.problem.train, self.config.recipe.batch_size
        order = np.random.default_rng([self.config.seed, epoch]).permutation(len(data))
        done = self.step % math.ceil(len(data) / size)
        for first in range(done * size, len(data), size):
            yield [data[i] for i in order[first : first + size]]

    def _train_step(self, sequences: list[Encoded]) -> Tensor:
        """One optimizer step; returns the mean loss of the batch."""
        size = self.config.impl.micro_batch or len(sequences)
        parts = [sequences[i : i + size] for i in range(0, len(sequences), size)]
        shares = [len(part) / len(sequences) for part in parts]
        try:
            loss, _ = self.optimization.step(self.step, map(self._batch, parts), shares)
        except NonFiniteGradient as error:
            raise UserError(
                f"the gradient of step {self.step} is not finite ({error}); lower "
                "recipe.learning_rate, set recipe.grad_clip=1, or choose recipe.dtype=fp32"
            ) from error
        return loss

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """The metrics on the dev splits.

        Raises:
            UserError: logits that are NaN.
        """
        was_training = self.model.training
        self.model.eval()
        size = self.config.impl.micro_batch or EVAL_BATCH
        logits: dict[str, list[np.ndarray]] = {}
        for split, sequences in self.problem.dev.items():
            logits[split] = []
            for first in range(0, len(sequences), size):
                batch = self.optimization.to_device(self._batch(sequences[first : first + size]))
                del batch["target"]
                with self.optimization.autocast():
                    output, _ = self.model(**batch)
                if output.isnan().any():
                    raise UserError(
                        f"the model's logits on {split} are NaN after step {self.step}; lower "
                        "recipe.learning_rate, or choose recipe.dtype=fp32"
                    )
                logits[split].extend(output.float().cpu().numpy())
        self.model.train(was_training)
        return self.problem.metrics(logits)

    def _batch(self, sequences: list[Encoded]) -> Batch:
        recipe = self.config.recipe
        length = recipe.max_length if recipe.padding == "max_length" else None
        return collate(sequences, self.problem.pad, length)

    # ------------------------------------------------------------------ state

    def _identity(self) -> dict[str, str | None]:
        """What a checkpoint belongs to."""
        return {
            "identity": self.config.digest(),
            "weights": self.hashes.weights,
            "data": self.hashes.data,
        }

    def save(self, log: MetricsLog) -> None:
        """Checkpoint the state before step `self.step`, and the records so far."""
        log.sync()
        state = {
            **self._identity(),
            **self.optimization.state_dict(),
            "step": self.step,
            "loss_sum": self.loss_sum,
            "loss_count": self.loss_count,
            "generators": generators(self.here.device),
            "log": log.lines,
        }
        checkpoint.save(self.checkpoints, self.step, state)

    def resume(self) -> None:
        """Load the newest whole checkpoint of this very fine-tuning, if there is one."""
        state = checkpoint.load_latest(self.checkpoints, self.report)
        if state is None:
            return
        if self._identity().items() <= state.items():
            self.optimization.load_state_dict(state)
            self.step, self.loss_count = state["step"], state["loss_count"]
            self.lines = state["log"]
            self.loss_sum = state["loss_sum"].to(self.here.device)
            set_generators(state["generators"], self.here.device)
            self.report(f"resumed at step {self.step} of {self.train.steps}")
        else:
            self.report(f"{self.checkpoints} is of other weights or data: begun anew")
            shutil.rmtree(self.checkpoints)


# ------------------------------------------------------------------ GLUE in one table


def _run_glue(config: FinetuneConfig, report: Callable[[str], None]) -> dict[str, Any]:
    open_model(config, config.open())
    directory = config.directory()
    identity = {"config_hash": config.digest(), "config": config.as_dict()}
    for task in config.recipes:  # a file that is bad is found before hours of training
        glue.load(task, config.data)
    parts = {task: run(config.single(task), report) for task in config.recipes}
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
        (task, f"{part['metrics']['score']:.1f}", _metrics_text(part["metrics"]))
        for task, part in parts.items()
    ]
    rows.append((f"mean of {len(parts)}", f"{metrics['score']:.1f}", ""))
    return [f"{name:<10} {score:>5}  {text}".rstrip() for name, score, text in rows]


def _metrics_text(metrics: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.1f}" for name, value in metrics.items() if name != "score")


def _write_csv(parts: dict[str, dict[str, Any]], path: Path) -> None:
    """One row for each task and metric."""
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["task", "metric", "value", "dev_examples"])
        for task, part in parts.items():
            for name, value in part["metrics"].items():
                rows.writerow([task, name, value, part["examples"]["dev"]])


@driver("finetune", freeze)
def main(config: FinetuneConfig) -> None:
    run(config)


if __name__ == "__main__":
    main()
