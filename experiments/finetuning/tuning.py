"""Fine-tuning on one task."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from common_kernels import backend
from experiments.config.initial import damage
from experiments.config.run import resolve
from experiments.data.tokenizer import check_vocabulary
from experiments.finetuning.config import FinetuneConfig
from experiments.finetuning.tasks import TaskMetrics, TaskSource, load_problem
from experiments.runs.finished import FinishedRun
from experiments.support import checkpoint, results
from experiments.support.errors import UserError
from experiments.support.progress import say
from experiments.training import routine
from experiments.training.distributed import World
from experiments.training.optimization import DTYPES
from experiments.training.routine import Finalized, Training
from experiments.training.sharding import check_shardable
from experiments.training.trainer import Built, Trainer
from methods import dense
from models.bert import BertLM
from models.gpt2 import GPT
from models.heads import Head
from models.hf import CausalLM

PREDICTIONS = "predictions"


def finished(config: FinetuneConfig) -> dict[str, Any] | None:
    """The result of this very config on this very data and these weights, if run to the end."""
    result, why = Finetuning(resolve(config)).find()
    return result if why is None else None


def run(config: FinetuneConfig, report: Callable[[str], None] = say) -> FinishedRun:
    """Fine-tune, or do nothing if it is done."""
    return routine.run(config, Finetuning, report)


def metrics_text(metrics: dict[str, float]) -> str:
    """The metrics of a task in one line, without `score`, which repeats one of them."""
    return ", ".join(f"{name} {value:.1f}" for name, value in metrics.items() if name != "score")


class Finetuning(Training):
    """A training of a `FinetuneConfig` with one task."""

    config: FinetuneConfig
    group = "recipe"
    reseeds = False

    def find(self) -> tuple[dict[str, Any] | None, str | None]:
        result = results.read_finished(self.directory, self.id)
        if result is None:
            return None, None
        if result["pretrained"]["weights_hash"] != self.config.weights_hash():
            return (
                result,
                f"{self.config.source} has other weights than {self.directory} began with",
            )
        # Results of older versions did not record their files.
        return result, damage(self.directory, result) if "files" in result else None

    def inputs(self) -> tuple[Any, Any]:
        return self.config.weights_hash(), self.config.data_hash()

    def build(self, here: World) -> Built:
        config = self.config
        self.source = source = config.open()
        pretrained: Any = source.model(config.weights)
        if not isinstance(pretrained, GPT | BertLM | CausalLM):
            raise UserError(
                f"run={config.source} holds a {type(pretrained).__name__}; fine-tuning needs a "
                "model of text: GPT-2 or BERT"
            )
        asked, takes = config.recipe.max_length, Head(pretrained).block_size
        longest = min(asked, takes, source.longest or takes)
        recipe = replace(config.recipe, max_length=longest)
        if longest < asked:
            self.report(
                f"recipe.max_length={asked} does not fit the model of {config.source}: it is "
                f"{longest} here"
            )
        encoding, lowered = source.tokenizer(), replace(config, recipe=recipe)
        self.problem = problem = here.rank0_first(lambda: load_problem(lowered, encoding))
        splits = (problem.train, *problem.dev.values())
        vocabulary: Any = getattr(pretrained, "config", pretrained).vocab_size
        check_vocabulary(max(max(s.ids) for split in splits for s in split), vocabulary)
        torch.manual_seed(config.seed)
        model = problem.head(pretrained)
        model.to(here.device)
        train = recipe.train(len(problem.train))
        try:
            backend.resolve(here.device)
            dtype = DTYPES[recipe.dtype]
            method = source.method_for(model, config.mode, train.steps, config.seed, dtype)
            check_shardable(method, config.impl, train, here)
        except (ValueError, RuntimeError) as error:
            raise UserError(str(error)) from error
        self.kind = "dense" if isinstance(method, dense.Method) else "sparse"
        share = -(-recipe.batch_size // here.size)
        micro_batch = min(config.impl.micro_batch or share, share)
        self.evaluation = TaskMetrics(problem, config.impl.micro_batch)
        return Built(
            model=model,
            method=method,
            source=TaskSource(problem, train, config.seed, config.data, self.hashes[1]),
            evaluation=self.evaluation,
            train=train,
            micro_batch=micro_batch,
            # The products are measured for the longest batches; shorter ones run sparse, too.
            tokens=micro_batch * recipe.max_length,
        )

    def begin(self, trainer: Trainer) -> None:
        config = self.config
        self.report(f"{config.task}, {self.kind}, seed {config.seed} -> {self.directory}")

    def entries(self, trainer: Trainer, metrics: dict[str, float]) -> dict[str, Any]:
        source, problem, method = self.source, self.problem, trainer.method
        return {
            "data_hash": self.hashes[1],
            "pretrained": {
                "method": source.method,
                "config_hash": source.config_hash,
                "weights_hash": self.hashes[0],
            },
            "task": self.config.task,
            "mode": self.config.mode,
            "tuned": self.kind,
            "skipped_steps": trainer.optimization.skipped,
            "labels": problem.labels,
            "examples": problem.examples,
            "sequences": {
                "train": len(problem.train),
                **{split: len(own) for split, own in problem.dev.items()},
            },
            "losses": self.evaluation.losses,
            "acceleration": method.acceleration.as_dict() if method.acceleration else None,
        }

    def write(self, trainer: Trainer, done: Finalized, result: dict[str, Any]) -> list[str]:
        for name, text in self.evaluation.files.items():
            checkpoint.write_text(self.directory / PREDICTIONS / name, text)
        self.report(f"{self.config.task}: {metrics_text(done.metrics)}")
        return [f"{PREDICTIONS}/{name}" for name in self.evaluation.files]
