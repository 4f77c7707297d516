"""One training, from its config to its result.

The run directory gets `config.json`, `metrics.jsonl`, `checkpoints/` while it runs, and at the end
`model.safetensors` (plain weights, pruned entries zero; in several files if large) and
`result.json`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from common_kernels import backend
from experiments.config.initial import AVERAGED, LATENT, WEIGHTS, damage
from experiments.config.run import Run, RunConfig
from experiments.config.settings import ImplConfig
from experiments.data.corpus import CALIBRATION
from experiments.data.source import Source, send
from experiments.support import checkpoint, results, tensor_files
from experiments.support.errors import Diverged, UserError
from experiments.support.progress import say, silent
from experiments.training import speed
from experiments.training.blocks import recompute
from experiments.training.delivery import (
    deliverable,
    finalize,
    finalized_averages,
    keep_tokenizer,
    process_record,
    save_model,
    sparsity,
)
from experiments.training.distributed import World, world
from experiments.training.held_out import HeldOut
from experiments.training.optimization import DTYPES, micro_batch_size
from experiments.training.sharding import Shards, accelerate, check_shared, share, shares_weights
from experiments.training.tracking import check_viewers, read_metrics
from experiments.training.trainer import Trainer
from methods import Method, Report
from methods.nn.ranks import alone
from models.base import Model

_SHAPE = {**results.TRAINING, "corpus_hash": str, "corpus": dict, "metrics": dict}
_reported: set[str] = set()  # devices without sparse products, of which a sweep says so once
CALIBRATION_BATCH = 8  # sequences per forward pass; it does not change the statistics


def finished(config: RunConfig) -> dict[str, Any] | None:
    """The result of exactly this config, if it was run to the end and its files are intact.

    Raises:
        UserError: the result cannot be read or was made on other data than the config's, or the run
            that it starts from is damaged.
    """
    result, why = _find(config.resolve())
    return result if why is None else None


def _find(run: Run) -> tuple[dict[str, Any] | None, str | None]:
    """(the result if the run has ended, the reason if it must be made again)."""
    config, directory = run.config, run.directory
    result = results.read_finished(directory, run.id, _SHAPE)
    if result is None:
        return None, None
    if not config.data.check_result(result, directory):
        raise UserError(
            f"{directory} was made on other data (from {result['config']['data']['source']}, hash "
            f"{result['corpus_hash'][:12]}) than those of data.source={config.data.source}: give "
            f"these another data.name, or delete {directory}"
        )
    if result.get("init") != config.init_weights():
        return result, f"{config.init} has other weights than when {directory} began with them"
    return result, damage(directory, result)


def run(config: RunConfig, report: Callable[[str], None] = say) -> dict[str, Any]:
    """Train, or resume, or do nothing if the run is done; return the content of `result.json`.

    Raises:
        UserError: before anything is written, if config, data and machine do not fit together.
    """
    with process_settings(config.impl), world(config.impl.device, config.impl.offload) as here:
        report = report if here.is_main else silent
        run = here.of_main(config.resolve)
        directory = run.directory
        # Only rank 0 decides: another process may finish the run while the ranks look.
        ended, why = here.of_main(lambda: _find(run))
        if ended is not None and why is None:
            report(f"done already: {directory}")
            if here.is_main:  # left by a process that was killed after writing the result
                shutil.rmtree(directory / "checkpoints", ignore_errors=True)
            return ended
        if why is not None:
            report(f"{why}; trained anew")
        # Every rank would raise the same error; let rank 0 report it.
        quantizes = config.build_method().quantizes
        micro_batch = here.of_main(
            lambda: micro_batch_size(config.train, config.impl.micro_batch, here.size, quantizes)
        )
        check_viewers(config.impl.loggers)
        init = config.init_weights()
        model, method, converted, source = _prepare(config, here)
        if config.impl.activation_checkpointing:
            recompute(model)
        shards = share(model, method, config.impl, DTYPES[config.train.dtype], here)
        accelerate(method, micro_batch * source.tokens_per_sample, config.impl)
        if config.init_weights() != init:
            raise UserError(f"{config.init} was changed while it was read")
        with ExitStack() as stack:
            here.of_main(lambda: stack.enter_context(checkpoint.exclusive(directory)))
            ended, why = here.of_main(lambda: _find(run))
            if ended is not None and why is None:  # by another process, since we looked
                report(f"done already: {directory}")
                return ended
            trainer = Trainer(
                model=model,
                method=method,
                source=source,
                evaluation=HeldOut(source, config.train.eval_samples),
                train=config.train,
                identity=f"{run.id} {init}",
                directory=directory,
                world=here,
                micro_batch=micro_batch,
                impl=config.impl,
                config=config.as_dict(),
                report=report,
            )
            # Initialisation used the seed itself; dropout must differ by rank.
            seeds = np.random.SeedSequence([config.seed, here.rank])
            torch.manual_seed(int(seeds.generate_state(1)[0]))
            trainer.resume()
            if here.is_main:
                # A result that is still here diverged, or its weights are damaged or began with
                # other ones.
                (directory / results.FILE).unlink(missing_ok=True)
                checkpoint.write_json(directory / "config.json", config.as_dict())
            report(f"{config.method}, seed {config.seed}: {converted}")
            report(f"in {directory}")
            if method.acceleration and here.device.type not in _reported:
                report(str(method.acceleration))
                _reported.update({here.device.type} - {"cuda"})
            for note in notes(config, source):
                report(note)
            return _train(run, trainer, shards, source, converted, init, report)


def notes(config: RunConfig, source: Source) -> list[str]:
    """Sentences for report and result about settings that were changed to fit the data."""
    said = list(config.notes)
    asked, there = config.train.eval_samples, source.eval_size
    if asked > there:
        said.append(
            f"train.eval_samples={asked}, but only {there} samples are held out: all are used; "
            "compare losses only with those of runs on the same samples"
        )
    return said


def _prepare(config: RunConfig, here: World) -> tuple[Model, Method, Report, Source]:
    """The converted model (on its device, unless it will be sharded), its method, the conversion's
    report, and the data.

    Everything that can be checked without the data is checked before they are prepared.
    """
    method = config.build_method()
    check_shared(method, config.impl, config.train, here)
    # A model to be sharded is built on rank 0 in the host's memory, and on the others on `meta`.
    sharded = shares_weights(config.impl, here) and not method.calibration_sequences

    def build() -> Model:
        torch.manual_seed(config.seed)
        try:
            if sharded:
                return config.build_model() if here.is_main else config.build_shape()
            return config.build_model().to(here.device)
        except ValueError as error:
            raise UserError(str(error)) from error

    model = here.main_first(build) if sharded else build()

    @functools.cache
    def open_source() -> Source:
        source = here.main_first(lambda: config.open_source(model, here.device))
        source.eval_batches(1, 1)  # is there anything to evaluate on?
        return source

    try:
        backend.resolve(here.device)
        if count := method.calibration_sequences:
            firsts = range(0, count, CALIBRATION_BATCH)
            parts = (range(count)[i : i + CALIBRATION_BATCH] for i in firsts)
            batches = open_source().batches((CALIBRATION, part) for part in parts)
            on_device = ({k: send(v, here.device) for k, v in b.items()} for b in batches)
            method.calibrate(model, on_device)
        with alone(here.device) if sharded else nullcontext():
            converted = method.convert(model, dtype=DTYPES[config.train.dtype])
        source = open_source()
    except (ValueError, RuntimeError) as error:
        raise UserError(str(error)) from error
    return model, method, converted, source


def _train(
    run: Run,
    trainer: Trainer,
    shards: Shards | None,
    source: Source,
    converted: Report,
    init: dict[str, str] | None,
    report: Callable[[str], None],
) -> dict[str, Any]:
    """Train, finalize, evaluate and write the result, also if the training diverges, before that
    error is raised."""
    config, here = run.config, trainer.world
    started = time.time()
    products = {
        name: dataclasses.asdict(layer.accelerated)
        for name, layer in trainer.method.sparse_layers.items()
    }

    def result(means: dict[str, float], flip_rate: Any, **more: Any) -> dict[str, Any]:
        samples = int(config.train.samples_before[trainer.step])
        return {
            "config_hash": run.id,
            "config": config.as_dict(),
            "command": config.command,
            "init": init,
            "corpus_hash": source.fingerprint,
            "corpus": source.describe(),
            "seed": config.seed,
            "tier": config.tier,
            "steps": trainer.step,
            "samples": samples,
            "tokens": samples * source.tokens_per_sample,
            "metrics": {
                **means,
                "eval_samples": min(config.train.eval_samples, source.eval_size),
                "flip_rate": flip_rate,
                "skipped_steps": trainer.optimization.skipped,
            },
            "notes": notes(config, source),
            "train_seconds": trainer.seconds,
            **more,
            **process_record(trainer, started),
        }

    try:
        if here.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        trainer.fit()
        flip_rate = trainer.method.metrics()["flip_rate"]
        averaged, means = finalized_averages(trainer, shards), trainer.evaluate_averages()
        done = finalize(trainer, shards, lambda: trainer.evaluate_weights() | means)
        if not math.isfinite(done.metrics.get("val_loss", 0.0)):
            raise trainer.optimization.diverged(
                f"val_loss is {done.metrics['val_loss']} after the last step"
            )
    except Diverged as error:
        lost = result(
            {"val_loss": math.nan},
            math.nan,
            diverged=error.reason,
            converted=list(converted.names),
            sparsity=None,
            step_seconds=trainer.seconds / max(1, trainer.step),
        )
        here.of_main(lambda: results.write_result(trainer.directory, lost))
        error.elsewhere = not here.is_main
        raise
    plain, names = deliverable(done.model, converted.names)
    found = result(
        done.metrics,
        flip_rate,
        sparsity=sparsity(trainer, plain, {n: trainer.method.pattern(o) for n, o in names.items()}),
        converted=list(names),
        matmul=products,
    )
    latent = {
        f"{new}.{key}": value
        for new, old in names.items()
        for key, value in done.latent.get(old, {}).items()
    }
    scores = ", ".join(f"{name} {value:.4f}" for name, value in done.metrics.items())

    def deliver() -> dict[str, Any]:
        written = _write(trainer, source, found, plain, averaged, latent)
        for path in written["corpus"].get("skipped_files", [])[:1]:
            count = written["corpus"]["skipped"]
            report(f"left out {count} training images that cannot be read, the first: {path}")
        report(f"{scores}, {trainer.seconds:.0f} s of training")
        if (gained := written["acceleration"]) and (line := speed.summary(gained)):
            report(line)
        return written

    return here.of_main(deliver)  # so that all ranks learn of an error such as a full disk


def _write(
    trainer: Trainer,
    source: Source,
    result: dict[str, Any],
    plain: nn.Module,
    averaged: nn.Module | None,
    latent: dict[str, Tensor],
) -> dict[str, Any]:
    """Write a finished run's files and return the content of its `result.json`. latent: the layers'
    state before they were finalized, by the names in `plain`."""
    here, directory = trainer.world, trainer.directory
    result["step_seconds"] = statistics.median(
        r["step_seconds"] for r in read_metrics(directory / "metrics.jsonl") if "loss" in r
    )
    result["acceleration"] = speed.gain(
        trainer.method.acceleration,
        1e3 * result["step_seconds"],
        -(-trainer.train.batch_size // (trainer.micro_batch * here.size)),
        speed.of_dense(directory, result["config"], results.device_name()),
    )
    wrote = save_model(plain, directory / WEIGHTS)
    if averaged is not None:
        wrote += save_model(averaged, directory / AVERAGED)
    if latent:
        wrote += tensor_files.save(latent, directory / LATENT)
    wrote += keep_tokenizer(result["corpus"], source.directory, directory)
    result["files"] = {name: checkpoint.sha256(directory / name) for name in wrote}
    result = results.write_result(directory, result)
    shutil.rmtree(trainer.checkpoints, ignore_errors=True)
    return result


@contextmanager
def process_settings(impl: ImplConfig) -> Iterator[None]:
    """A context with the run's threads, backend and determinism; afterwards these are restored."""
    threads, name = torch.get_num_threads(), backend.ENVIRONMENT_VARIABLE
    before, deterministic = os.environ.get(name), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(impl.threads or max(1, threads - impl.workers))
    if impl.backend != "auto":
        os.environ[name] = impl.backend
    if impl.deterministic:
        # Both are read once, before the first product and the first compilation.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
