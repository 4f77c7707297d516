"""The routine of every training: build, train, finalize, check the sparsity, write."""

import copy
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from common_kernels import backend
from experiments.config.initial import WEIGHTS
from experiments.config.run import Run, resolve
from experiments.config.settings import ImplConfig
from experiments.runs.finished import FinishedRun
from experiments.support import checkpoint, results, tensor_files
from experiments.support.errors import Diverged, UserError, check_installed
from experiments.support.progress import say, silent
from experiments.training import averages, legality
from experiments.training.blocks import recompute
from experiments.training.distributed import World, world
from experiments.training.optimization import DTYPES
from experiments.training.sharding import Shards, accelerate, shards_weights
from experiments.training.trainer import Built, Trainer
from models.dino import DINO


class Finalized(NamedTuple):
    """A finalized training, with the metrics of the finalized weights.

    model: the plain model that is delivered; on ranks other than 0 of a sharded one, their part.
    names: its converted linears, by their name during the training.
    latent: the converted layers' state before that: dense weights, masks, scales, by name.
    """

    model: nn.Module
    names: dict[str, str]
    metrics: dict[str, float]
    latent: dict[str, Tensor]


class Training:
    """The steps in which pre-training and fine-tuning differ. `report` prints on rank 0 alone."""

    reseeds: ClassVar[bool] = True  # draw dropout from other numbers than the initial weights
    hashes: tuple[Any, Any]  # the `inputs` that are trained on

    def __init__(self, run: Run[Any], report: Callable[[str], None] = silent) -> None:
        self.config, self.id, self.directory = run.config, run.id, run.directory
        self.report = report

    def find(self) -> tuple[dict[str, Any] | None, str | None]:
        """(the result if there is nothing to do, why a run that has ended must be made again)."""
        result = results.read_finished(self.directory, self.id)
        why = None if result is None else self.outdated(result)
        return (result if why is None else None), why

    def outdated(self, result: dict[str, Any]) -> str | None:
        """The reason why a run with this result must be made again, if there is one."""
        raise NotImplementedError

    @classmethod
    def finished(cls, config: Any) -> dict[str, Any] | None:
        """The result of exactly this config, on the present data and weights, if it was run to the
        end and its files are intact."""
        return cls(resolve(config)).find()[0]

    @classmethod
    def run(cls, config: Any, report: Callable[[str], None] = say) -> FinishedRun:
        """Train, resume, or do nothing if the run is done. If parts do not fit, nothing is
        written."""
        impl: ImplConfig = config.impl
        with process_settings(impl), world(impl.device, impl.offload) as here:
            report = report if here.is_main else silent
            run = here.broadcast_from_rank0(lambda: resolve(config))
            training = cls(run, report)
            if (ended := _ended(training, here)[0]) is not None:
                return FinishedRun(run.directory, ended)
            for viewer in impl.loggers:
                check_installed(viewer, f"impl.loggers has {viewer}", "logging")
            training.hashes = training.inputs()
            built = training.build(here)
            if impl.activation_checkpointing:
                recompute(built.model)
            shards = None
            if shards_weights(impl, here):
                shards = Shards(built.model, built.method, impl, DTYPES[built.train.dtype], here)
            accelerate(built.method, built.tokens, impl)
            if training.inputs() != training.hashes:
                raise UserError(
                    f"{run.directory}: the weights to start from, or the data, were changed while "
                    "they were read; run the same command again"
                )
            with ExitStack() as stack:
                here.broadcast_from_rank0(
                    lambda: stack.enter_context(checkpoint.exclusive(run.directory))
                )
                ended, why = _ended(training, here)  # by another process, since we looked
                if ended is not None:
                    return FinishedRun(run.directory, ended)
                if why is not None:
                    report(f"{why}; trained anew")
                trainer = training.trainer(built, here)
                if training.reseeds or here.size > 1:  # dropout must differ by rank
                    seeds = np.random.SeedSequence([config.seed, here.rank])
                    torch.manual_seed(int(seeds.generate_state(1)[0]))
                trainer.resume()
                if trainer.world.is_main:
                    # A result that is still here diverged, or its weights are damaged or outdated.
                    (training.directory / results.FILE).unlink(missing_ok=True)
                training.begin(trainer)
                return FinishedRun(run.directory, _train(training, trainer, shards))

    def inputs(self) -> tuple[Any, Any]:
        """Hashes of the present files of the weights to start from, and of the data."""
        raise NotImplementedError

    def build(self, here: World) -> Built:
        """Load the data; build and convert the model, on its device unless it will be sharded."""
        raise NotImplementedError

    def trainer(self, built: Built, here: World) -> Trainer:
        """The trainer of a built model, which may be sharded by now, at its first step."""
        identity, config = f"{self.id} {self.hashes[0]}", self.config.as_dict()
        place = self.config.impl, here, self.directory
        return Trainer(built, *place, identity, config, self.report)

    def begin(self, trainer: Trainer) -> None:
        """Called before the first step, once it is certain that this process trains."""

    def trained(self, trainer: Trainer, shards: Shards | None) -> None:
        """Called after the last step, before the model is finalized."""

    def measure(self, trainer: Trainer) -> dict[str, float]:
        """The metrics of the finalized model."""
        return trainer.evaluate()

    def entries(self, trainer: Trainer, metrics: dict[str, float]) -> dict[str, Any]:
        """The entries of the result beside those of every training; called on every rank."""
        raise NotImplementedError

    def write(self, trainer: Trainer, done: Finalized, result: dict[str, Any]) -> list[str]:
        """Write files, add to `result`, and return the files' names; called on rank 0."""
        raise NotImplementedError


def _ended(training: Training, here: World) -> tuple[dict[str, Any] | None, str | None]:
    """`Training.find`. Only rank 0 decides, because another process may finish the run while the
    ranks look."""
    result, why = here.broadcast_from_rank0(training.find)
    if result is not None:
        training.report(f"done already: {training.directory}")
        if here.is_main:  # left by a process that was killed after writing the result
            shutil.rmtree(training.directory / "checkpoints", ignore_errors=True)
    return result, why


def _train(training: Training, trainer: Trainer, shards: Shards | None) -> dict[str, Any]:
    """Train, finalize, evaluate and write the result, before the error also if it diverges."""
    here, method, started = trainer.world, trainer.method, time.time()
    patterns = {name: method.pattern(name) for name in method.layers}

    def result(metrics: dict[str, float]) -> dict[str, Any]:
        return {
            "config_hash": training.id,
            "config": trainer.config,
            "seed": training.config.seed,
            "tier": training.config.tier,
            "steps": trainer.step,
            "metrics": metrics,
            **training.entries(trainer, metrics),
            "backend": backend.resolve(here.device),
            "cuda_graphs": trainer.graphed,
            "world_size": here.size,
            "revisions": trainer.revisions,
            "started": started,
            "ended": time.time(),
        }

    try:
        if here.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        trainer.fit()
        training.trained(trainer, shards)
        done = _finalize(training, trainer, shards)
        if not math.isfinite(done.metrics.get("val_loss", 0.0)):
            raise trainer.optimization.diverged(
                f"val_loss is {done.metrics['val_loss']} after the last step"
            )
    except Diverged as error:
        lost = result({"val_loss": math.nan})
        lost |= {"diverged": error.reason, "converted": list(patterns), "sparsity": None}
        here.broadcast_from_rank0(lambda: results.write_result(trainer.directory, lost))
        error.elsewhere = not here.is_main
        raise
    found = result(done.metrics)
    found["converted"] = list(done.names)
    found["sparsity"] = here.broadcast_from_rank0(
        lambda: legality.total(
            legality.measure(done.model, {n: patterns[old] for n, old in done.names.items()})
        )
    )

    def deliver() -> dict[str, Any]:
        wrote = save_model(done.model, trainer.directory / WEIGHTS)
        wrote += training.write(trainer, done, found)
        found["files"] = {name: checkpoint.sha256(trainer.directory / name) for name in wrote}
        written = results.write_result(trainer.directory, found)
        shutil.rmtree(trainer.checkpoints, ignore_errors=True)
        return written

    return here.broadcast_from_rank0(deliver)  # all ranks learn of an error such as a full disk


def _finalize(training: Training, trainer: Trainer, shards: Shards | None) -> Finalized:
    """Finalize a trained model, and record its `measure` as the last evaluation."""
    converted = tuple(trainer.method.layers)
    # Files are written from the full weights, which only rank 0 has if they are sharded.
    full = (trainer.model, trainer.method) if shards is None else shards.unsharded()
    layers = {} if full is None else full[1].sparse_layers
    states = {
        name: {key: value.detach().cpu().clone() for key, value in layer.state_dict().items()}
        for name, layer in layers.items()
    }
    if shards is None:
        trainer.method.finalize(trainer.model)
    else:
        shards.finalize()
    metrics = training.measure(trainer)
    trainer.log_last(metrics)
    if shards is not None and full is not None:
        full[1].finalize(full[0])
    model, names = deliverable(trainer.model if full is None else full[0], converted)
    latent = {
        f"{new}.{key}": value
        for new, old in names.items()
        for key, value in states.get(old, {}).items()
    }
    return Finalized(model, names, metrics, latent)


def finalized_averages(trainer: Trainer, shards: Shards | None) -> nn.Module | None:
    """A plain copy of the model with averaged weights, finalized; if sharded, only on rank 0."""
    if not trainer.averages:
        return None
    with averages.applied(trainer.model, trainer.averages):
        own = trainer.model, trainer.method
        copied = copy.deepcopy(own) if shards is None else shards.unsharded()
    if copied is None:
        return None
    model, method = copied
    method.finalize(model)
    return deliverable(model, ())[0]


def deliverable(model: nn.Module, names: tuple[str, ...]) -> tuple[nn.Module, dict[str, str]]:
    """The plain model that a run delivers, and its converted linears as a dict from the name there
    to the name in `model`. For DINO it is the teacher's backbone, otherwise the model itself."""
    plain = model.backbone() if isinstance(model, DINO) else model
    inside = {id(module): name for name, module in plain.named_modules()}
    modules = {name: model.get_submodule(name) for name in names}
    return plain, {inside[id(m)]: name for name, m in modules.items() if id(m) in inside}


def save_model(model: nn.Module, path: Path) -> list[str]:
    """Write all parameters as safetensors, tied ones under their first name, and return the names
    of the files (support/tensor_files.py)."""
    return tensor_files.save(dict(model.named_parameters()), path)


@contextmanager
def process_settings(impl: ImplConfig) -> Iterator[None]:
    """A context with the run's threads and determinism; afterwards these are restored."""
    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(impl.threads or max(1, threads - impl.workers))
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
