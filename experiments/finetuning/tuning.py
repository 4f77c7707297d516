"""Fine-tuning on one task, from its config to its result."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common_kernels import backend
from experiments.config.initial import WEIGHTS, damage
from experiments.config.settings import EpochConfig
from experiments.data.tokenizer import check_vocabulary
from experiments.finetuning.config import LORA, Checkpoint, FinetuneConfig
from experiments.finetuning.lora import FILES, FOLDER, Adapters
from experiments.finetuning.tasks import Problem, TaskMetrics, TaskSource, load_problem
from experiments.runs.finished import FinishedRun
from experiments.support import checkpoint, results
from experiments.support.errors import UserError
from experiments.support.progress import say, silent
from experiments.training.blocks import recompute
from experiments.training.delivery import finalize, process_record, save_model, sparsity
from experiments.training.distributed import World, world
from experiments.training.optimization import DTYPES
from experiments.training.pretraining import process_settings
from experiments.training.sharding import Shards, accelerate, check_shared, share, shares_weights
from experiments.training.tracking import check_viewers
from experiments.training.trainer import Trainer
from methods import Method, dense
from methods.nn import sharding
from models.bert import BertLM
from models.gpt2 import GPT
from models.heads import Head
from models.hf import CausalLM

PREDICTIONS = "predictions"
_SHAPE = {"metrics": dict, "pretrained": {"weights_hash": str}}


def finished(config: FinetuneConfig) -> dict[str, Any] | None:
    """The result of this very config on this very data and these weights, if run to the end.

    Raises:
        UserError: there are no such data, or the result cannot be read.
    """
    result = results.read_finished(config.directory(), config.digest(), _SHAPE)
    if result is None or result["pretrained"]["weights_hash"] != config.weights_hash():
        return None
    # Results of older versions did not record their files.
    return None if "files" in result and damage(config.directory(), result) else result


def run(config: FinetuneConfig, report: Callable[[str], None] = say) -> dict[str, Any]:
    """Fine-tune, or do nothing if it is done; return the content of `result.json`.

    Raises:
        UserError: before anything is written, if run, data and recipe do not fit together.
    """
    directory = config.directory()
    with process_settings(config.impl), world(config.impl.device, config.impl.offload) as here:
        report = report if here.is_main else silent
        # Only rank 0 decides: another process may finish it while the ranks look.
        if (done := here.of_main(lambda: finished(config))) is not None:
            report(f"done already: {directory}")
            return done
        check_viewers(config.impl.loggers)
        source, hashes = config.open(), Hashes.of(config)
        pretrained = open_model(config, source)
        asked, longest = config.recipe.max_length, Head(pretrained).block_size
        config = replace(config, longest=min(longest, source.longest or longest))
        if asked > config.recipe.max_length:
            report(
                f"recipe.max_length={asked} does not fit the model of {config.source}: it is "
                f"{config.longest} here"
            )
        encoding = source.tokenizer()
        problem = here.main_first(lambda: load_problem(config, encoding))
        if Hashes.of(config) != hashes:
            raise UserError(f"{config.source} or {config.data} was changed while it was read")
        if config.mode == LORA and shares_weights(config.impl, here):
            raise UserError(
                "impl.shard=fsdp2 with mode=lora: adapters need whole weights; set impl.shard=ddp"
            )
        model, method, train = prepare_model(config, source, pretrained, problem, here)
        adapters = make_adapters(config, source, model) if config.mode == LORA else None
        if config.impl.activation_checkpointing:
            recompute(model)
        shards = share(model, method, config.impl, DTYPES[config.recipe.dtype], here)
        choose_products(config, method, here)
        with ExitStack() as stack:
            here.of_main(lambda: stack.enter_context(checkpoint.exclusive(directory)))
            # Another process may have finished it in the meantime.
            if (done := here.of_main(lambda: finished(config))) is not None:
                report(f"done already: {directory}")
                return done
            kind = _kind(config, method)
            report(f"{config.task}, {kind}, seed {config.seed} -> {directory}")
            if adapters is not None and adapters.notice:
                report(adapters.notice)
            trainer = make_trainer(config, hashes, problem, model, method, train, here, report)
            if here.size > 1:  # the head used the seed itself; dropout must differ by rank
                seeds = np.random.SeedSequence([config.seed, here.rank])
                torch.manual_seed(int(seeds.generate_state(1)[0]))
            trainer.resume()
            result = _train(config, trainer, shards, source, hashes, problem, adapters)
            report(f"{config.task}: {metrics_text(result['metrics'])}")
            return result


def metrics_text(metrics: dict[str, float]) -> str:
    """The metrics of a task in one line, without `score`, which repeats one of them."""
    return ", ".join(f"{name} {value:.1f}" for name, value in metrics.items() if name != "score")


@dataclass(frozen=True)
class Hashes:
    """Hashes of the weights and of the tasks' files (None on the hub) that a fine-tuning reads."""

    weights: str
    data: str | None

    @classmethod
    def of(cls, config: FinetuneConfig) -> Hashes:
        """The hashes of the present files."""
        return cls(config.weights_hash(), config.data_hash())


def open_model(config: FinetuneConfig, source: FinishedRun | Checkpoint) -> GPT | BertLM | CausalLM:
    """The model to fine-tune, on the CPU.

    Raises:
        UserError: it is not a text model.
    """
    pretrained = source.model(config.weights)
    if not isinstance(pretrained, GPT | BertLM | CausalLM):
        raise UserError(
            f"run={config.source} holds a {type(pretrained).__name__}; fine-tuning needs a model "
            "of text: GPT-2 or BERT"
        )
    return pretrained


def prepare_model(
    config: FinetuneConfig,
    source: FinishedRun | Checkpoint,
    pretrained: GPT | BertLM | CausalLM,
    problem: Problem,
    here: World,
) -> tuple[Head, Method, EpochConfig]:
    """The converted model on its device, its method, and the settings of the training."""
    recipe = config.recipe
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
        mode = "dense" if config.mode == LORA else config.mode
        method = source.method_for(model, mode, train.steps, config.seed, dtype)
        check_shared(method, config.impl, train, here)
    except (ValueError, RuntimeError) as error:
        raise UserError(str(error)) from error
    return model, method, train


def choose_products(config: FinetuneConfig, method: Method, here: World) -> None:
    """Choose the products that run sparse; if weights are sharded, call it after that."""
    # The products are measured for the longest batches; shorter ones run sparse, too.
    accelerate(method, _micro_batch(config, here) * config.recipe.max_length, config.impl)


def make_adapters(
    config: FinetuneConfig, source: FinishedRun | Checkpoint, model: Head
) -> Adapters:
    """Add adapters to the model; call it after `prepare_model`, because adapters rename linears."""
    patterns = {}
    if isinstance(source, FinishedRun):
        patterns = {name: source.pattern(name) for name in source.converted}
    return Adapters(model, config.lora, patterns)


def _kind(config: FinetuneConfig, method: Method) -> str:
    if config.mode == LORA:
        return LORA
    return "dense" if isinstance(method, dense.Method) else "sparse"


def _micro_batch(config: FinetuneConfig, here: World) -> int:
    """The number of sequences per rank and forward pass, for a step with a full batch."""
    share = -(-config.recipe.batch_size // here.size)
    return min(config.impl.micro_batch or share, share)


class _Tuner(Trainer):
    """A trainer that checks the zeros before each checkpoint and at the end."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        # The masks from the end of training. S-STE has none, as it keeps choosing.
        self.masks = {
            name: buffer.clone()
            for name, buffer in self.model.named_buffers()
            if name.rpartition(".")[2] in ("mask", "row_mask")
        }

    def save(self, own: dict[str, Tensor] | None = None) -> None:
        self.check_zeros()
        super().save(own)

    def check_zeros(self) -> None:
        """Raise RuntimeError if a group of a sparse layer has too many non-zeros, or if a fixed
        mask has changed."""
        if not self.method.sparse_layers:
            return
        illegal = self.method.metrics()["illegal_groups"]
        now = dict(self.model.named_buffers())
        rows = sharding.rows_of
        changed = [n for n, mask in self.masks.items() if not torch.equal(rows(mask), rows(now[n]))]
        if illegal or changed:
            raise RuntimeError(
                f"after step {self.step} {illegal} groups have too many non-zeros, and "
                f"{len(changed)} masks are not those of the start: {', '.join(changed) or 'none'}"
            )


def make_trainer(
    config: FinetuneConfig,
    hashes: Hashes,
    problem: Problem,
    model: Head,
    method: Method,
    train: EpochConfig,
    here: World,
    report: Callable[[str], None],
) -> _Tuner:
    """The trainer of this fine-tuning, at its first step."""
    length = config.recipe.max_length if config.recipe.padding == "max_length" else None
    return _Tuner(
        model=model,
        method=method,
        source=TaskSource(problem, train, config.seed, config.data, hashes.data, length),
        evaluation=TaskMetrics(problem, config.impl.micro_batch, length),
        train=train,
        identity=f"{config.digest()} {hashes.weights}",
        directory=config.directory(),
        world=here,
        micro_batch=_micro_batch(config, here),
        impl=config.impl,
        config=config.as_dict(),
        report=report,
        group="recipe",
    )


def _train(
    config: FinetuneConfig,
    trainer: _Tuner,
    shards: Shards | None,
    source: FinishedRun | Checkpoint,
    hashes: Hashes,
    problem: Problem,
    adapters: Adapters | None,
) -> dict[str, Any]:
    """Train and write weights, predictions and `result.json`, with the metrics of the finalized
    model."""
    started = time.time()
    method = trainer.method
    if trainer.world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    patterns = {name: method.pattern(name) for name in method.layers}
    trainer.fit()
    trainer.check_zeros()
    evaluation = trainer.evaluation
    assert isinstance(evaluation, TaskMetrics)
    lora: dict[str, Any] = {}

    def measure() -> dict[str, float]:
        if adapters is not None:
            lora["lora"] = _merged(config, trainer, evaluation, adapters)
        return trainer.evaluate()

    done = finalize(trainer, shards, measure)
    predictions = evaluation.files(trainer)
    result = {
        "config_hash": config.digest(),
        "config": config.as_dict(),
        "data_hash": hashes.data,
        "pretrained": {
            "method": source.method,
            "config_hash": source.config_hash,
            "weights_hash": hashes.weights,
        },
        "seed": config.seed,
        "tier": config.tier,
        "task": config.task,
        "mode": config.mode,
        "tuned": _kind(config, method),
        "steps": trainer.step,
        "skipped_steps": trainer.optimization.skipped,
        "labels": problem.labels,
        "examples": problem.examples,
        "sequences": {
            "train": len(problem.train),
            **{split: len(own) for split, own in problem.dev.items()},
        },
        "metrics": done.metrics,
        "losses": evaluation.losses,
        **lora,
        "sparsity": sparsity(trainer, done.model, patterns),
        "converted": list(patterns),
        "acceleration": method.acceleration.as_dict() if method.acceleration else None,
        **process_record(trainer, started),
    }

    def deliver() -> dict[str, Any]:
        wrote = save_model(done.model, trainer.directory / WEIGHTS)
        for name, text in predictions.items():
            checkpoint.write_text(trainer.directory / PREDICTIONS / name, text)
        wrote += [f"{PREDICTIONS}/{name}" for name in predictions]
        wrote += [] if adapters is None else [f"{FOLDER}/{name}" for name in FILES]
        files = {name: checkpoint.sha256(trainer.directory / name) for name in wrote}
        written = results.write_result(trainer.directory, {**result, "files": files})
        shutil.rmtree(trainer.checkpoints, ignore_errors=True)
        return written

    return trainer.world.of_main(deliver)  # so that all ranks learn of an error such as a full disk


def _merged(
    config: FinetuneConfig, trainer: _Tuner, evaluation: TaskMetrics, adapters: Adapters
) -> dict[str, Any]:
    """Save the adapters, merge them into the weights, and return their metrics before the merge."""
    found = {
        "trained_parameters": adapters.parameters,
        "linears": adapters.names,
        "masked": list(adapters.masks) if config.lora.merge == "sparse" else [],
        "metrics_before_merging": trainer.evaluate(),
        "losses_before_merging": dict(evaluation.losses),
    }
    trainer.world.of_main(lambda: adapters.save(trainer.directory / FOLDER))
    adapters.merge()
    return found
