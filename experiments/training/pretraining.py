"""Pre-training; experiments/pretrain.py lists the files of a run."""

import dataclasses
import math
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common_kernels import backend
from experiments.config.initial import AVERAGED, LATENT, damage
from experiments.config.run import RunConfig
from experiments.data.corpus import CALIBRATION
from experiments.data.source import Batch, Source, send
from experiments.support import checkpoint, results, tensor_files
from experiments.support.errors import UserError
from experiments.training.distributed import World
from experiments.training.optimization import DTYPES, micro_batch_size
from experiments.training.routine import Finalized, Training, finalized_averages, save_model
from experiments.training.sharding import Shards, check_shardable, shards_weights
from experiments.training.trainer import Built, Evaluation, Trainer
from methods.nn.ranks import alone
from models.base import Model

CALIBRATION_BATCH = 8  # sequences per forward pass; it does not change the statistics


class Pretraining(Training):
    """A training of a `RunConfig`."""

    config: RunConfig

    def outdated(self, result: dict[str, Any]) -> str | None:
        config, directory = self.config, self.directory
        if not config.data.check_result(result, directory):
            raise UserError(
                f"{directory} was made on other data (from {result['config']['data']['source']}, "
                f"hash {result['corpus_hash'][:12]}) than those of data.source="
                f"{config.data.source}: give these another data.name, or delete {directory}"
            )
        if result.get("init") != config.init_weights():
            return f"{config.init} has other weights than when {directory} began with them"
        return damage(directory, result)

    def inputs(self) -> tuple[Any, Any]:
        return self.config.init_weights(), None

    def build(self, here: World) -> Built:
        config, method = self.config, self.config.build_method()
        # Every rank would raise the same error; let rank 0 report it.
        quantizes = method.capabilities.quantizes
        micro_batch = here.broadcast_from_rank0(
            lambda: micro_batch_size(config.train, config.impl.micro_batch, here.size, quantizes)
        )
        check_shardable(method, config.impl, here)
        # A model to be sharded is built on rank 0 in the host's memory, elsewhere on `meta`.
        count = method.capabilities.calibration_sequences
        sharded = shards_weights(config.impl, here) and not count

        def build_model() -> Model:
            torch.manual_seed(config.seed)
            try:
                if sharded:
                    return config.build_model() if here.is_main else config.build_shape()
                return config.build_model().to(here.device)
            except ValueError as error:
                raise UserError(str(error)) from error

        try:
            backend.resolve(here.device)
            model = here.rank0_first(build_model) if sharded else build_model()
            source = here.rank0_first(lambda: config.open_source(model, here.device))
            source.eval_batches(1, 1)  # is there anything to evaluate on?
            if count:
                firsts = range(0, count, CALIBRATION_BATCH)
                parts = (range(count)[i : i + CALIBRATION_BATCH] for i in firsts)
                batches = source.batches((CALIBRATION, part) for part in parts)
                on_device = ({k: send(v, here.device) for k, v in b.items()} for b in batches)
                method.calibrate(model, on_device)
            with alone(here.device) if sharded else nullcontext():
                method.convert(model, dtype=DTYPES[config.train.dtype])
        except (ValueError, RuntimeError) as error:
            raise UserError(str(error)) from error
        self.source = source
        self.other = here.rank0_first(lambda: config.open_other(source, model, here.device))
        return Built(
            model=model,
            method=method,
            source=source,
            evaluation=self.on(source),
            train=config.train,
            micro_batch=micro_batch,
            tokens=micro_batch * source.tokens_per_sample,
        )

    def on(self, source: Source) -> Evaluation:
        """The evaluation on the held-out samples of a source."""
        samples = self.config.train.eval_samples
        return lambda trainer: held_out(source, samples, trainer.micro_batch, trainer.forward)

    def begin(self, trainer: Trainer) -> None:
        method, here = trainer.method, trainer.world
        if here.is_main:
            checkpoint.write_json(self.directory / "config.json", trainer.config)
        self.report(f"{self.config.method}, seed {self.config.seed}: {method.report}")
        self.report(f"in {self.directory}")
        if method.acceleration:
            self.report(str(method.acceleration))
        for note in self.notes():
            self.report(note)
        self.products = {
            name: dataclasses.asdict(layer.accelerated)
            for name, layer in method.sparse_layers.items()
        }
        self.flip_rate: Any = math.nan

    def notes(self) -> list[str]:
        """Sentences for report and result about settings that were changed to fit the data."""
        said = list(self.config.notes)
        asked, there = self.config.train.eval_samples, self.source.eval_size
        if asked > there:
            said.append(
                f"train.eval_samples={asked}, but only {there} samples are held out: all are used; "
                "compare losses only with those of runs on the same samples"
            )
        return said

    def trained(self, trainer: Trainer, shards: Shards | None) -> None:
        self.flip_rate = trainer.method.metrics()["flip_rate"]
        self.averaged = finalized_averages(trainer, shards)
        self.means = trainer.evaluate_averages()

    def measure(self, trainer: Trainer) -> dict[str, float]:
        metrics = trainer.evaluate_weights() | self.means
        if self.other is not None:
            trainer.evaluation = self.on(self.other)
            metrics["other_val_loss"] = trainer.evaluate_weights()["val_loss"]
        return metrics

    def entries(self, trainer: Trainer, metrics: dict[str, float]) -> dict[str, Any]:
        config, source = self.config, self.source
        samples = int(config.train.samples_before[trainer.step])
        return {
            "command": config.command,
            "init": self.hashes[0],
            "corpus_hash": source.fingerprint,
            "corpus": source.describe(),
            "samples": samples,
            "tokens": samples * source.tokens_per_sample,
            "metrics": {
                **metrics,
                "eval_samples": min(config.train.eval_samples, source.eval_size),
                "flip_rate": self.flip_rate,
                "skipped_steps": trainer.optimization.skipped,
            },
            "notes": self.notes(),
            "train_seconds": trainer.seconds,
            "step_seconds": trainer.seconds / max(1, trainer.step),
        }

    def write(self, trainer: Trainer, done: Finalized, result: dict[str, Any]) -> list[str]:
        result["matmul"] = self.products
        result["step_seconds"] = statistics.median(
            r["step_seconds"]
            for r in results.read_metrics(self.directory / "metrics.jsonl")
            if "loss" in r
        )
        parts = -(-trainer.train.batch_size // (trainer.micro_batch * trainer.world.size))
        step = result["acceleration"] = None
        if (found := trainer.method.acceleration) is not None and found.layers:
            ms = 1e3 * result["step_seconds"]
            step = {
                "ms": ms,
                "micro_batches": parts,
                "saved_ms": parts * found.saved_ms,
                "expected_gain": found.gain(ms, parts),
            }
            result["acceleration"] = {**found.as_dict(), "step": step}
        wrote = keep_tokenizer(result["corpus"], self.source.directory, self.directory)
        if self.averaged is not None:
            wrote += save_model(self.averaged, self.directory / AVERAGED)
        if done.latent:
            wrote += tensor_files.save(done.latent, self.directory / LATENT)
        scores = ", ".join(f"{name} {value:.4f}" for name, value in done.metrics.items())
        self.report(f"{scores}, {trainer.seconds:.0f} s of training")
        if step is not None and step["saved_ms"]:
            self.report(
                f"{step['ms']:.4g} ms a step; sparse products save {step['saved_ms']:.3g} ms of "
                f"it: alone they make it {step['expected_gain']:.2f} times as fast"
            )
        return wrote


finished, run = Pretraining.finished, Pretraining.run


def held_out(
    source: Source, samples: int, batch: int, forward: Callable[[Batch], tuple[Any, Any, Batch]]
) -> dict[str, float]:
    """Means over fixed held-out samples, at most as many as `source` has, equal on all ranks, of
    `val_loss` in nats and the source's other metrics; run by `forward`, as `Trainer.forward`."""
    totals: dict[str, Tensor] = {}
    count = 0
    for part in source.eval_batches(min(samples, source.eval_size), batch):
        output, loss, on_device = forward(part)
        sums, targets = source.score(output, loss.float(), on_device)
        totals = {name: totals.get(name, 0) + value for name, value in sums.items()}
        count += targets
    return {f"val_{name}": float(value) / count for name, value in totals.items()}


def keep_tokenizer(corpus: dict[str, Any], source: Path, directory: Path) -> list[str]:
    """Copy the tokenizer's file, if the manifest `corpus` has one, from the folder `source` into
    the run's, and return its name: the corpus may later be prepared again from another text."""
    name = corpus.get("tokenizer", {}).get("file")
    if name is None:
        return []
    content = (source / name).read_bytes()
    checkpoint.write_atomic(directory / name, lambda path: path.write_bytes(content))
    return [name]
