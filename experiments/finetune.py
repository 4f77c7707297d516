"""Fine-tune a pre-trained GPT-2 or BERT: `python -m experiments.finetune run=DIR task=cola`.

`task` is one of the nine of GLUE, `squad`, or `glue`: the nine, one after the other, in one table.
`model.path=FOLDER` takes a checkpoint of transformers instead of a run; it is fine-tuned densely.

Writes into `<run>/finetune/<task>-<mode>-<hash>/seed<n>`: `metrics.jsonl`, with the metrics on the
dev split after each epoch, and at the end `result.json`; for `glue` also `glue.csv`. The result is
that of the last epoch, never the best one, as in the papers. A finished run is recognised and not
repeated; one that was stopped begins anew. One process, one device.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from common_kernels import backend
from experiments import checkpoint, glue, legality, results, squad
from experiments.config import digest, driver, one_line_errors, typed
from experiments.distributed import World, world
from experiments.errors import UserError
from experiments.finished import MODES, WEIGHTS_OF, FinishedRun
from experiments.initial import HFConfig
from experiments.pretrain import process_settings
from experiments.progress import Progress
from experiments.schedules import learning_rate
from experiments.settings import ImplConfig, TrainConfig
from experiments.tokenizer import folder_tokenizer
from experiments.tracking import MetricsLog
from experiments.trainer import DTYPES, MAX_SKIPPED_IN_A_ROW, make_optimizer
from methods import Method, dense
from models.bert import BertLM
from models.gpt2 import GPT
from models.heads import Classifier, Head, SpanPredictor
from models.hf import CausalLM

GLUE, SQUAD = "glue", "squad"
TASKS = (*glue.TASKS, SQUAD)
EVAL_BATCH = 64  # sequences per forward pass; no result depends on it


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a task is fine-tuned. Batches are in sequences; of SQuAD these are windows.

    learning_rate: peak; it rises from 0 over `warmup_fraction` of the steps and falls to 0.
    grad_clip: global norm; 0 = off. dropout: before the classifier; the trunk keeps its own.
    max_length: tokens of a sequence. stride: tokens that two windows of a SQuAD context share.
    padding: up to the `longest` sequence of a batch, or always to `max_length`.
    """

    epochs: int
    batch_size: int
    learning_rate: float
    warmup_fraction: float
    schedule: str
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    grad_clip: float
    dropout: float
    max_length: int
    stride: int
    padding: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))
        for name, least in {"epochs": 1, "batch_size": 1, "max_length": 8, "stride": 0}.items():
            if getattr(self, name) < least:
                raise ValueError(
                    f"recipe.{name}={getattr(self, name)}; it must be at least {least}"
                )
        for name in ("learning_rate", "eps", "weight_decay", "grad_clip"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"recipe.{name}={getattr(self, name)}; it must not be negative")
        if not 0 <= self.warmup_fraction <= 1:
            raise ValueError(
                f"recipe.warmup_fraction={self.warmup_fraction}; it must lie in [0, 1]"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"recipe.dropout={self.dropout}; it must lie in [0, 1)")
        for name, choices in {
            "schedule": ("cosine", "linear"),
            "padding": ("longest", "max_length"),
        }.items():
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"recipe.{name}={getattr(self, name)}; choose one of {', '.join(choices)}"
                )

    def train(self, steps: int) -> TrainConfig:
        """The settings of the optimizer for so many steps."""
        return TrainConfig(
            steps=steps,
            batch_size=self.batch_size,
            learning_rate=self.learning_rate,
            warmup_steps=int(self.warmup_fraction * steps),
            schedule=self.schedule,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
            grad_clip=self.grad_clip,
        )


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of transformers, with what is asked of a `FinishedRun`."""

    config: HFConfig
    method: str = "dense"

    @property
    def config_hash(self) -> str:
        return self.config.fingerprint

    def model(self, weights: str = "sparse") -> CausalLM:
        return self.config.build()  # there is one kind of weights

    def tokenizer(self) -> glue.Encoding:
        return folder_tokenizer(str(self.config.folder))

    def method_for(self, model: nn.Module, mode: str, total_steps: int, seed: int) -> Method:
        if mode == "sparse":
            raise UserError(
                f"model.path={self.config.path} knows no sparse method: set mode=dense, or train "
                "it with a method (`python -m experiments.distill`) and give that run"
            )
        include = ("*.h.*", "*.layers.*")  # the blocks, by the names of transformers
        method = dense.Method(dense.Config(include=include, total_steps=total_steps, seed=seed))
        method.convert(model)
        return method


@dataclass(frozen=True)
class FinetuneConfig:
    """One fine-tuning, or with `task="glue"` the nine.

    source: directory of a finished run, or a checkpoint of transformers. weights: those of it that
    are fine-tuned. recipes: by task.
    data: a folder, of which only the name is part of the identity, or an id on the hub.
    """

    seed: int
    tier: str
    runs: Path
    source: Path | HFConfig
    task: str
    mode: str
    weights: str
    data: str
    recipes: dict[str, Recipe]
    impl: ImplConfig

    @property
    def recipe(self) -> Recipe:
        return self.recipes[self.task]

    def single(self, task: str) -> FinetuneConfig:
        """This config for one of its tasks."""
        return dataclasses.replace(self, task=task, recipes={task: self.recipes[task]})

    def open(self) -> FinishedRun | Checkpoint:
        """What is fine-tuned.

        Raises:
            UserError: the run is not finished, or there is no such checkpoint.
        """
        if isinstance(self.source, HFConfig):
            return Checkpoint(self.source)
        return FinishedRun.open(self.source)

    def _settings(self) -> dict[str, Any]:
        return {
            "task": self.task,
            "mode": self.mode,
            "weights": self.weights,
            "data": self.data if self.data in (glue.HUB, squad.HUB) else Path(self.data).name,
            "recipe": {task: dataclasses.asdict(r) for task, r in self.recipes.items()},
        }

    def identity(self) -> dict[str, Any]:
        """Everything that the result depends on, but for the content of the data."""
        return {"seed": self.seed, "source": self.open().config_hash, **self._settings()}

    def digest(self) -> str:
        """Hash of `identity()`, 16 hex digits."""
        return digest(self.identity())

    def directory(self) -> Path:
        """`<directory of the run>/finetune/<task>-<mode>-<hash without the seed>/seed<seed>`; of a
        checkpoint, `<runs>/<its name>` stands for the run."""
        settings = self._settings()
        if isinstance(self.source, HFConfig):
            home = self.runs / Path(self.source.path).name
            settings["source"] = self.source.fingerprint
        else:
            home = self.source
        name = f"{self.task}-{self.mode}-{digest(settings)[:8]}"
        return home / "finetune" / name / f"seed{self.seed}"

    def as_dict(self) -> dict[str, Any]:
        """The whole resolved config as plain values."""
        hf = isinstance(self.source, HFConfig)
        return {
            **self.identity(),
            "run": None if hf else str(self.source),
            "model": {"path": getattr(self.source, "path", None)},
            "data": {"source": self.data},
            "tier": self.tier,
            "runs": str(self.runs),
            "impl": dataclasses.asdict(self.impl),
        }


# ------------------------------------------------------------------ configuration


@dataclass(frozen=True, kw_only=True)
class _Top:
    seed: int
    tier: str
    runs: str
    run: str | None
    task: str
    mode: str
    weights: str

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ValueError(f"seed={self.seed}; it must not be negative")
        known = {"task": (*TASKS, GLUE), "mode": MODES, "weights": WEIGHTS_OF}
        for name, choices in known.items():
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{name}={getattr(self, name)}; choose one of {', '.join(choices)}"
                )
        if self.weights == "dense" and self.mode != "dense":
            raise ValueError(
                f"weights=dense with mode={self.mode}: the dense weights under the masks can only "
                "be fine-tuned densely; set mode=dense"
            )


@dataclass(frozen=True, kw_only=True)
class _Data:
    source: str | None


def load(overrides: list[str] | None = None) -> FinetuneConfig:
    """Compose `experiments/conf/finetune.yaml` with hydra overrides.

    Raises:
        UserError: an override that does not fit, in one line.
    """
    from hydra import compose, initialize_config_module

    with one_line_errors(), initialize_config_module("experiments.conf", version_base="1.3"):
        return freeze(compose("finetune", overrides=overrides or []))


def freeze(composed: Any) -> FinetuneConfig:
    """The typed form of a composed `DictConfig`."""
    from omegaconf import OmegaConf

    groups: Any = OmegaConf.to_container(composed, resolve=True)
    fields = [f.name for f in dataclasses.fields(_Top)]
    top = typed(_Top, "the config", {key: groups[key] for key in fields})
    path, data = groups["model"]["path"], typed(_Data, "data", groups["data"])
    if (top.run is None) == (path is None):
        raise UserError(
            "give either run=DIR, the directory of a finished run, or model.path=FOLDER, a "
            "checkpoint of transformers"
        )
    names = tuple(glue.TASKS) if top.task == GLUE else (top.task,)
    values = {task: _for_task(groups["recipe"], task) for task in names}
    return FinetuneConfig(
        seed=top.seed,
        tier=top.tier,
        runs=Path(top.runs),
        source=Path(top.run) if path is None else typed(HFConfig, "model", groups["model"]),
        task=top.task,
        mode=top.mode,
        weights=top.weights,
        data=data.source or (squad.HUB if top.task == SQUAD else glue.HUB),
        recipes={task: typed(Recipe, "recipe", own) for task, own in values.items()},
        impl=typed(ImplConfig, "impl", groups["impl"]),
    )


def _for_task(recipe: dict[str, Any], task: str) -> dict[str, Any]:
    """The recipe with the values of this task where they differ by task."""
    for key, value in recipe.items():
        unknown = set(value) - {*TASKS, "default"} if isinstance(value, dict) else set()
        if unknown or (isinstance(value, dict) and not value.keys() & {task, "default"}):
            raise UserError(
                f"recipe.{key} differs by task, but has {', '.join(map(str, value))}; it takes "
                f"default and {', '.join(TASKS)}"
            )
    return {
        key: value.get(task, value.get("default")) if isinstance(value, dict) else value
        for key, value in recipe.items()
    }


# ------------------------------------------------------------------ tasks


@dataclass(frozen=True)
class Encoded:
    """ids [T]: int32. second: where tokens of type 1 begin. target: as the head takes it."""

    ids: np.ndarray
    second: int
    target: Any


def _encoded(ids: list[int], second: int, target: Any) -> Encoded:
    return Encoded(np.array(ids, dtype=np.int32), second, target)


@dataclass(frozen=True)
class Problem:
    """A task as sequences.

    examples: their numbers by split, which for SQuAD are not those of the windows. metrics: of the
    logits [..., outputs] of each sequence, by dev split. head: makes the model of a pretrained one.
    """

    train: list[Encoded]
    dev: dict[str, list[Encoded]]
    examples: dict[str, int]
    pad: int
    metrics: Callable[[dict[str, list[np.ndarray]]], dict[str, float]]
    head: Callable[[Any], Head]


def load_problem(config: FinetuneConfig, encoding: glue.Encoding) -> Problem:
    """Read and encode the data of one task.

    Raises:
        UserError: files are missing or wrong.
    """
    make = _squad if config.task == SQUAD else _glue
    return make(config, encoding, glue.Frame.of(encoding))


def _glue(config: FinetuneConfig, encoding: glue.Encoding, frame: glue.Frame) -> Problem:
    task, recipe = config.task, config.recipe
    splits = glue.load(task, config.data)
    sequences = {}
    for split, own in splits.items():
        encoded = glue.encode(encoding, frame, own.texts, recipe.max_length)
        labels = own.labels.tolist()
        sequences[split] = [_encoded(*e, y) for e, y in zip(encoded, labels, strict=True)]

    def metrics(logits: dict[str, list[np.ndarray]]) -> dict[str, float]:
        predicted = {k: glue.predictions(task, np.stack(rows)) for k, rows in logits.items()}
        return glue.metrics(task, predicted, splits)

    return Problem(
        train=sequences.pop("train"),
        dev=sequences,
        examples={split: len(examples) for split, examples in splits.items()},
        pad=frame.pad,
        metrics=metrics,
        head=lambda model: Classifier(model, glue.TASKS[task].n_labels, recipe.dropout),
    )


def _squad(config: FinetuneConfig, encoding: glue.Encoding, frame: glue.Frame) -> Problem:
    recipe, questions = config.recipe, squad.load(config.data)

    def windows(split: str) -> list[squad.Window]:
        return squad.windows(encoding, frame, questions[split], recipe.max_length, recipe.stride)

    dev = windows("dev")

    def metrics(logits: dict[str, list[np.ndarray]]) -> dict[str, float]:
        return squad.metrics(
            questions["dev"], squad.best_answers(questions["dev"], dev, logits["dev"])
        )

    return Problem(
        train=[_encoded(w.ids, w.second, w.answer) for w in windows("train")],
        dev={"dev": [_encoded(w.ids, w.second, w.answer) for w in dev]},
        examples={split: len(asked) for split, asked in questions.items()},
        pad=frame.pad,
        metrics=metrics,
        head=SpanPredictor,
    )


def collate(sequences: list[Encoded], pad: int, length: int | None) -> dict[str, Tensor]:
    """A batch of the longest sequence's length, or of `length`, padded on the right."""
    length = length or max(len(s.ids) for s in sequences)
    ids = np.full((len(sequences), length), pad)
    for row, sequence in zip(ids, sequences, strict=True):
        row[: len(sequence.ids)] = sequence.ids
    positions = np.arange(length)
    mask = positions < np.array([[len(s.ids)] for s in sequences])
    types = (positions >= np.array([[s.second] for s in sequences])) & mask
    return {
        "input": torch.from_numpy(ids),
        "token_types": torch.from_numpy(types.astype(np.int64)),
        "attention_mask": torch.from_numpy(mask),
        "target": torch.tensor([s.target for s in sequences]),
    }


# ------------------------------------------------------------------ running


def finished(config: FinetuneConfig) -> dict[str, Any] | None:
    """The result of this very config on this very data, if it was run to the end."""
    path = config.directory() / results.FILE
    if not path.exists():
        return None
    result = json.loads(path.read_text(encoding="utf-8"))
    if result["schema"] != results.SCHEMA or result["config_hash"] != config.digest():
        return None
    if config.task == GLUE:
        parts = [finished(config.single(task)) for task in config.recipes]
        return result if None not in parts else None
    found = data_hash(config)
    return result if found in (None, result["data_hash"]) else None


def data_hash(config: FinetuneConfig) -> str | None:
    """Hash of the task's files in a folder; None for data of the hub."""
    if not Path(config.data).is_dir():
        return None
    files = (
        squad.files(config.data) if config.task == SQUAD else glue.files(config.task, config.data)
    )
    return glue.fingerprint(files)


def run(config: FinetuneConfig, report: Callable[[str], None] = print) -> dict[str, Any]:
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
        source = config.open()
        pretrained = open_model(config, source)
        problem = load_problem(config, source.tokenizer())
        model, method, train = _prepare(config, source, pretrained, problem, here)
        directory = config.directory()
        with checkpoint.exclusive(directory):
            report(f"{config.task}, {config.mode}, seed {config.seed} -> {directory}")
            tuning = Tuning(config, problem, model, method, train, here, report)
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
    for task, recipe in config.recipes.items():
        if recipe.max_length > longest:
            raise UserError(
                f"recipe.max_length={recipe.max_length} for {task}, but the model takes {longest} "
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
    torch.manual_seed(config.seed)
    model = problem.head(pretrained)
    model.to(here.device)
    train = recipe.train(recipe.epochs * math.ceil(len(problem.train) / recipe.batch_size))
    try:
        backend.resolve(here.device)
        method = source.method_for(model, config.mode, train.steps, config.seed)
    except (ValueError, RuntimeError) as error:
        raise UserError(str(error)) from error
    return model, method, train


class Tuning:
    """The epochs of one fine-tuning, in the order of calls of `methods.base`.

    The sequences of an epoch come in an order by the seed and the epoch; the last batch may be
    smaller.
    """

    def __init__(
        self,
        config: FinetuneConfig,
        problem: Problem,
        model: Head,
        method: Method,
        train: TrainConfig,
        here: World,
        report: Callable[[str], None],
    ) -> None:
        self.config, self.problem, self.model, self.method = config, problem, model, method
        self.train, self.here, self.report = train, here, report
        self.dtype = DTYPES[config.impl.dtype]
        self.optimizer = make_optimizer(method, model, train)
        self.scaler = torch.amp.GradScaler(here.device.type, enabled=self.dtype is torch.float16)
        self.runner: Any = torch.compile(model) if config.impl.compile else model
        self.step = self.skipped_in_a_row = 0

    def result(self, source: FinishedRun | Checkpoint) -> dict[str, Any]:
        """Train, evaluate after each epoch, and write `result.json`."""
        started, config = time.time(), self.config
        if self.here.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        patterns = {name: self.method.pattern(name) for name in self.method.layers}
        metrics = self.fit()
        result = {
            "config_hash": config.digest(),
            "config": config.as_dict(),
            "data_hash": data_hash(config),
            "pretrained": {"method": source.method, "config_hash": source.config_hash},
            "seed": config.seed,
            "tier": config.tier,
            "task": config.task,
            "mode": config.mode,
            "steps": self.step,
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
        self.report(f"{config.task}: {_metrics_text(metrics)}")
        return results.write_result(config.directory(), result)

    def fit(self) -> dict[str, float]:
        """All epochs; the metrics after the last one are those of the finalized model."""
        recipe, metrics = self.config.recipe, {}
        log = MetricsLog(self.config.directory(), 0, ())
        tokens = sum(len(s.ids) for s in self.problem.train) / len(self.problem.train)
        with Progress(
            self.train.steps, 0, round(tokens * recipe.batch_size), enabled=True
        ) as progress:
            for epoch in range(1, recipe.epochs + 1):
                losses = []
                self.model.train()
                for batch in self._batches(epoch):
                    losses.append(self._train_step(batch))
                    self.step += 1
                    progress.update(self.step, {"loss": float(losses[-1])})
                if epoch == recipe.epochs:
                    self.method.finalize(self.model)
                metrics = self.evaluate()
                loss = float(torch.stack(losses).mean())
                log.write({"step": self.step, "epoch": epoch, "loss": loss, **metrics})
        log.close()
        return metrics

    def _batches(self, epoch: int) -> Iterator[list[Encoded]]:
        data, size = self.problem.train, self.config.recipe.batch_size
        order = np.random.default_rng([self.config.seed, epoch]).permutation(len(data))
        for first in range(0, len(order), size):
            yield [data[i] for i in order[first : first + size]]

    def _train_step(self, sequences: list[Encoded]) -> Tensor:
        """One optimizer step; returns the mean loss of the batch."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.train, self.step)
        self.method.on_step_begin(self.step)
        size = self.config.impl.micro_batch or len(sequences)
        total = torch.zeros((), device=self.here.device)
        for first in range(0, len(sequences), size):
            part = sequences[first : first + size]
            with self._autocast():
                loss = self.method.loss(self.runner, self._batch(part))
                loss = loss * (len(part) / len(sequences))
            self.scaler.scale(loss).backward()
            total += loss.detach()
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(
            self.model.parameters(), self.train.grad_clip or math.inf
        )
        finite = bool(torch.isfinite(norm))
        self._check(finite, float(total))
        if finite:
            self.method.on_gradients(self.step, self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.method.on_step_end(self.step)
        return total

    def _check(self, finite: bool, loss: float) -> None:
        """Stop where the gradient is not finite and no scaler will help."""
        self.skipped_in_a_row = 0 if finite else self.skipped_in_a_row + 1
        allowed = MAX_SKIPPED_IN_A_ROW if self.scaler.is_enabled() else 0
        if self.skipped_in_a_row > allowed:
            raise UserError(
                f"the gradient of step {self.step} is not finite (loss {loss:.4g}); lower "
                "recipe.learning_rate, set recipe.grad_clip=1, or choose impl.dtype=fp32"
            )

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """The metrics on the dev splits."""
        self.model.eval()
        logits: dict[str, list[np.ndarray]] = {}
        for split, sequences in self.problem.dev.items():
            logits[split] = []
            for first in range(0, len(sequences), EVAL_BATCH):
                batch = self._batch(sequences[first : first + EVAL_BATCH])
                del batch["target"]
                with self._autocast():
                    output, _ = self.model(**batch)
                logits[split].extend(output.float().cpu().numpy())
        return self.problem.metrics(logits)

    def _batch(self, sequences: list[Encoded]) -> dict[str, Tensor]:
        recipe = self.config.recipe
        length = recipe.max_length if recipe.padding == "max_length" else None
        batch = collate(sequences, self.problem.pad, length)
        return {k: v.to(self.here.device, non_blocking=True) for k, v in batch.items()}

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.here.device.type, self.dtype, enabled=self.dtype is not None)


# ------------------------------------------------------------------ the nine in one table


def _run_glue(config: FinetuneConfig, report: Callable[[str], None]) -> dict[str, Any]:
    parts = {task: run(config.single(task), report) for task in config.recipes}
    scores = {task: part["metrics"]["score"] for task, part in parts.items()}
    eight = [score for task, score in scores.items() if task != "wnli"]
    metrics = {
        **scores,
        # FST's BERT and SLoPe's tables are means of eight tasks.
        "mean_without_wnli": sum(eight) / len(eight),
        "score": sum(scores.values()) / len(scores),
    }
    directory = config.directory()
    with checkpoint.exclusive(directory):
        checkpoint.write_atomic(directory / "glue.csv", functools.partial(_write_csv, parts))
        result = {
            "config_hash": config.digest(),
            "config": config.as_dict(),
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
            "converted": parts["cola"]["converted"],
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
    rows.append(("mean of 9", f"{metrics['score']:.1f}", ""))
    rows.append(("mean of 8", f"{metrics['mean_without_wnli']:.1f}", "without WNLI"))
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
