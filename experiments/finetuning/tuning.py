"""Fine-tuning on one task: GLUE and SQuAD as sequences with targets, heads and metrics."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common_kernels import backend
from experiments.config.initial import damage
from experiments.config.settings import EpochConfig
from experiments.data.pairs import padded
from experiments.data.source import Batch, Request
from experiments.data.tokenizer import Encoding, Frame, check_vocabulary, encode
from experiments.finetuning import glue, squad
from experiments.finetuning.config import SQUAD, FinetuneConfig
from experiments.support import checkpoint
from experiments.support.errors import UserError
from experiments.training.distributed import World
from experiments.training.optimization import DTYPES
from experiments.training.routine import Finalized, Training
from experiments.training.sharding import check_shardable
from experiments.training.trainer import Built, Trainer
from methods import dense
from models.bert import BertLM
from models.gpt2 import GPT
from models.heads import Classifier, Head, SpanPredictor
from models.hf import CausalLM

EVAL_BATCH = 64  # sequences per forward pass, unless impl.micro_batch says


@dataclass(frozen=True)
class Encoded:
    """A sequence. ids: [T] int32. second: first token of type 1. target: as the head takes it."""

    ids: Any
    second: int
    target: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", np.array(self.ids, dtype=np.int32))


Logits = dict[str, list[np.ndarray]]  # the logits of each sequence, by split


@dataclass(frozen=True)
class Problem:
    """A task: its sequences, its metrics and its head.

    examples: number of examples by split (SQuAD has more sequences, its windows).
    score: (metrics, texts of files by name) of the dev splits' logits, [..., outputs] per sequence.
    head: function that adds the task's head to a pretrained model.
    labels: the names of the head's outputs, if they are classes.
    """

    train: list[Encoded]
    dev: dict[str, list[Encoded]]
    examples: dict[str, int]
    pad: int
    score: Callable[[Logits], tuple[dict[str, float], dict[str, str]]]
    head: Callable[[Any], Head]
    labels: tuple[str, ...] = ()


def _classification(config: FinetuneConfig, encoding: Encoding, frame: Frame) -> Problem:
    """A task of GLUE: a class for each example, or a number."""
    task, recipe = config.task, config.recipe
    splits, labels = glue.load(task, config.data), glue.TASKS[task].labels
    sequences = {}
    for split, each in splits.items():
        encoded = encode(encoding, frame, each.texts, recipe.max_length)
        targets = each.labels.tolist()
        sequences[split] = [Encoded(*e, t) for e, t in zip(encoded, targets, strict=True)]

    def score(logits: Logits) -> tuple[dict[str, float], dict[str, str]]:
        stacked = {split: np.stack(rows) for split, rows in logits.items()}
        predicted = {s: x.argmax(1) if labels else x[:, 0] for s, x in stacked.items()}
        texts = {}
        for split, values in predicted.items():
            pairs = zip(values.tolist(), splits[split].labels.tolist(), strict=True)
            named = [[labels[x] if labels else x for x in pair] for pair in pairs]
            rows = [{"prediction": value, "label": label} for value, label in named]
            texts[f"{split}.csv"] = checkpoint.csv_text(rows)
        return glue.metrics(task, predicted, splits), texts

    return Problem(
        train=sequences.pop("train"),
        dev=sequences,
        examples={split: len(examples) for split, examples in splits.items()},
        pad=frame.pad,
        score=score,
        head=lambda model: Classifier(model, len(labels) or 1, recipe.dropout),
        labels=labels,
    )


def _squad(config: FinetuneConfig, encoding: Encoding, frame: Frame) -> Problem:
    recipe, questions = config.recipe, squad.load(config.data)
    lengths = recipe.max_length, recipe.stride, recipe.stride_is
    windows = {
        split: squad.windows(encoding, frame, asked, *lengths) for split, asked in questions.items()
    }
    train, dev = ([Encoded(w.ids, w.second, w.answer) for w in own] for own in windows.values())

    def score(logits: Logits) -> tuple[dict[str, float], dict[str, str]]:
        answers = squad.best_answers(questions["dev"], windows["dev"], logits["dev"])
        text = json.dumps(answers, indent=1) + "\n"
        return squad.metrics(questions["dev"], answers), {"dev.json": text}

    return Problem(
        train=train,
        dev={"dev": dev},
        examples={split: len(asked) for split, asked in questions.items()},
        pad=frame.pad,
        score=score,
        head=SpanPredictor,
    )


def collate(sequences: list[Encoded], pad: int) -> dict[str, Tensor]:
    """A batch padded on the right to its longest sequence."""
    ids = padded([s.ids for s in sequences], pad)
    positions = torch.arange(ids.shape[1])
    mask = positions < torch.tensor([[len(s.ids)] for s in sequences])
    types = (positions >= torch.tensor([[s.second] for s in sequences])) & mask
    return {
        "input": ids,
        "token_types": types.long(),
        "attention_mask": mask,
        "target": torch.tensor([s.target for s in sequences]),
    }


class TaskSource:
    """The training sequences of a task, in an order that depends on the seed and the epoch.
    data_hash: of the files in a folder `data`; None for an id on the hub."""

    unit, one_shape = "tokens", False

    def __init__(
        self, problem: Problem, train: EpochConfig, seed: int, data: str, data_hash: str | None
    ) -> None:
        self.problem, self.train, self.seed = problem, train, seed
        self.directory, self.fingerprint = Path(data), data_hash or data

    @property
    def tokens_per_sample(self) -> int:
        """The mean number of tokens of a sequence without padding."""
        return round(sum(len(s.ids) for s in self.problem.train) / len(self.problem.train))

    def batches(self, requests: Iterable[Request]) -> Iterator[Batch]:
        """One batch for each request, in order."""
        sequences, size = self.problem.train, self.train.batch_size
        for step, indices in requests:
            epoch, within = divmod(step, self.train.epoch_steps)
            order = _order(self.seed, epoch + 1, len(sequences))
            chosen = [sequences[order[within * size + index]] for index in indices]
            yield collate(chosen, self.problem.pad)


@lru_cache(maxsize=1)
def _order(seed: int, epoch: int, count: int) -> np.ndarray:
    """The order of `count` sequences in an epoch, the first 1."""
    return np.random.default_rng([seed, epoch]).permutation(count)


class TaskMetrics:
    """The metrics of a task on its dev splits, as a trainer's `evaluation`; ranks share the work.
    `losses` (by split) and `files` (texts of predictions) are those of the last evaluation."""

    def __init__(self, problem: Problem, batch: int | None) -> None:
        self.problem, self.batch = problem, batch or EVAL_BATCH
        self.losses: dict[str, float] = {}
        self.files: dict[str, str] = {}

    @torch.no_grad()
    def __call__(self, trainer: Trainer) -> dict[str, float]:
        """The metrics of the trainer's model, equal on all ranks."""
        logits: Logits = {}
        for split, sequences in self.problem.dev.items():
            logits[split], self.losses[split] = self._run(trainer, split, sequences)
        metrics, self.files = self.problem.score(logits)
        return metrics

    def _run(
        self, trainer: Trainer, split: str, sequences: list[Encoded]
    ) -> tuple[list[np.ndarray], float]:
        """(logits of each sequence, mean loss)."""
        parts = [sequences[i : i + self.batch] for i in range(0, len(sequences), self.batch)]
        here = trainer.world
        turns = -(-len(parts) // here.size)
        # Every rank runs the model equally often; batches that are run twice count once.
        mine = [min(turn * here.size + here.rank, len(parts) - 1) for turn in range(turns)]
        found: dict[int, tuple[list[np.ndarray], float]] = {}
        for index in mine:
            batch = collate(parts[index], self.problem.pad)
            output, loss, _ = trainer.forward(batch)
            if output.isnan().any():
                raise UserError(
                    f"the model's logits on {split} are NaN after step {trainer.step}; lower "
                    "recipe.learning_rate, or choose recipe.dtype=fp32"
                )
            logits = list(output.float().cpu().numpy())
            found[index] = logits, float(loss) * len(parts[index])
        found = {i: each for own in here.all_gather(found) for i, each in own.items()}
        ordered = [found[index] for index in range(len(parts))]
        total = sum(loss for _, loss in ordered)
        return [row for logits, _ in ordered for row in logits], total / max(1, len(sequences))


PREDICTIONS = "predictions"


def metrics_text(metrics: dict[str, float]) -> str:
    """The metrics of a task in one line, without `score`, which repeats one of them."""
    return ", ".join(f"{name} {value:.1f}" for name, value in metrics.items() if name != "score")


class Finetuning(Training):
    """A training of a `FinetuneConfig` with one task."""

    config: FinetuneConfig
    reseeds = False

    def outdated(self, result: dict[str, Any]) -> str | None:
        if result["pretrained"]["weights_hash"] != self.config.weights_hash():
            return f"{self.config.source} has other weights than {self.directory} began with"
        # Results of older versions did not record their files.
        return damage(self.directory, result) if "files" in result else None

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
                f"recipe.max_length={asked} does not fit the model of "
                f"{getattr(config.source, 'path', config.source)}: it is {longest} here"
            )
        encoding, lowered = source.tokenizer(), replace(config, recipe=recipe)
        make, frame = _squad if config.task == SQUAD else _classification, Frame.of(encoding)
        self.problem = problem = here.rank0_first(lambda: make(lowered, encoding, frame))
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
            check_shardable(method, config.impl, here)
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


finished, run = Finetuning.finished, Finetuning.run
