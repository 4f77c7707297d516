"""One trainer for every model and method.

All that a step (experiments/training/optimization.py) depends on is the saved state and the step's
number, so a run that is stopped anywhere and started again goes on as if nothing had happened.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from experiments.config.settings import TrainConfig
from experiments.data.source import Batch, Request, Source
from experiments.support import checkpoint
from experiments.support.errors import Stop, UserError, deferred_stop
from experiments.support.progress import Progress, say
from experiments.training.distributed import World
from experiments.training.optimization import (
    NonFiniteGradient,
    Optimization,
    generators,
    set_generators,
)
from experiments.training.schedules import learning_rate
from experiments.training.tracking import MetricsLog
from methods import Method, refresh
from models.base import Model


def micro_batch_size(
    train: TrainConfig, micro_batch: int | None, ranks: int, quantizes: bool = False
) -> int:
    """Samples per rank and micro-batch.

    Args:
        quantizes: the method takes its FP8 scales over a micro-batch (`Method.quantizes`), whose
            size is then `train.fp8_samples`, or the whole batch.
    Raises:
        UserError: the ranks or the micro-batch do not divide the batch, from its first size on, or
            are not what FP8 scales are taken over.
    """
    name = "batch_size" if train.ramp_batch is None else "ramp_batch"
    unit = train.ramp_batch or train.batch_size
    if unit % ranks:
        raise UserError(
            f"train.{name}={unit} cannot be shared by {ranks} processes; choose an "
            "nproc_per_node that divides it"
        )
    size, setting = unit // ranks, "impl.micro_batch"
    if micro_batch is not None:
        size = micro_batch
    elif quantizes and train.fp8_samples is not None:
        size, setting = train.fp8_samples, "train.fp8_samples"
    if quantizes and size != (train.fp8_samples or train.batch_size):
        over, remedy = f"the batch of a step, {train.batch_size}", f"train.fp8_samples={size}"
        if train.fp8_samples is not None:
            over, remedy = f"train.fp8_samples={train.fp8_samples}", "impl.micro_batch=null"
        raise UserError(
            f"a micro-batch has {size} samples here, but FP8 scales, on which the result depends, "
            f"are taken over {over}; set {remedy}"
        )
    if unit % (size * ranks):
        raise UserError(
            f"train.{name}={unit} is no multiple of {setting}={size} x {ranks} "
            "processes; change one of them"
        )
    return size


class Trainer:
    """Trains `model`, converted by `method` and on its device, on the batches of `source`.

    Args:
        identity: hash of the run's config; a checkpoint of another config, or made on other data,
            is refused.
        config: of the run, for the viewers of its log.
    """

    def __init__(
        self,
        *,
        model: Model,
        method: Method,
        source: Source,
        train: TrainConfig,
        seed: int,
        identity: str,
        directory: Path,
        world: World,
        compiled: bool = False,
        micro_batch: int | None = None,
        checkpoint_every: int = 0,
        loggers: tuple[str, ...] = (),
        config: dict[str, Any] | None = None,
        report: Callable[[str], None] = say,
    ) -> None:
        self.model, self.method, self.source = model, method, source
        self.train, self.seed = train, seed
        self.eval_samples = min(train.eval_samples, source.eval_size)
        self.identity, self.directory, self.world = identity, directory, world
        self.checkpoint_every, self.report = checkpoint_every, report
        self.loggers, self.config = loggers, config or {}
        self.micro_batch = micro_batch_size(train, micro_batch, world.size, method.quantizes)
        self.optimization = Optimization(
            model, method, train, world.device, compiled=compiled, ranks=world.size
        )
        own = _parameters(model) if train.ema else {}
        self.averages = {name: value.clone() for name, value in own.items()}
        self.step = 0
        self.seconds = 0.0
        self.lines: list[str] = []  # of the log
        self.log: MetricsLog | None = None
        # Of the steps since the last record.
        self.loss_sum, self.loss_count = torch.zeros((), device=world.device), 0
        # Initialisation used the seed itself; dropout differs by rank.
        torch.manual_seed(int(np.random.SeedSequence([seed, world.rank]).generate_state(1)[0]))

    @property
    def checkpoints(self) -> Path:
        return self.directory / "checkpoints"

    def fit(self) -> None:
        """Train up to the last step, from where the state is."""
        main = self.world.is_main
        if main:
            self.log = MetricsLog(self.directory, self.lines, self.loggers, self.config)
        unit = self.source.unit
        size = self.source.tokens_per_sample if unit == "tokens" else 1
        first, seen = self.step, self.train.samples_before * size
        batches = self.source.batches(self._requests())
        self.model.train()
        bar = Progress(self.train.steps, self.step, unit, enabled=main)
        with bar as progress, self._stop() as stop:
            durations: list[float] = []
            while self.step < self.train.steps:
                if self.step % self.train.eval_every == 0:
                    self._log({"step": self.step, **self.evaluate()})
                start = time.perf_counter()
                norm = self._train_step(batches)
                durations.append(time.perf_counter() - start)
                self.seconds += durations[-1]
                if self.step % self.train.log_every == 0 or self.step == self.train.steps - 1:
                    record = self._record(norm, durations)
                    durations = []
                    self._log(record)
                    count = int(seen[self.step + 1] - seen[first])
                    progress.update(self.step + 1, count, record["loss"])
                self.step += 1
                every = self.checkpoint_every
                if every and (stop.kind is not None or self.step % every == 0):
                    self.save()
                if stop.kind is not None:
                    raise stop.kind
        self._join_skipped()

    def log_last(self, means: dict[str, float]) -> None:
        """The evaluation after the last step, of the weights as the method leaves them."""
        self._log({"step": self.train.steps, **means})
        if self.log is not None:
            self.log.close()

    def _stop(self) -> AbstractContextManager[Stop]:
        """Ranks that share a step cannot stop each after its own: there, a signal ends all."""
        return deferred_stop() if self.world.size == 1 else nullcontext(Stop())

    def _join_skipped(self) -> list[int]:
        """What the source left out on any rank, now known to all; every rank must call it."""
        skipped: set[int] = getattr(self.source, "skipped", set())
        if self.world.size > 1:
            parts: list[Any] = [None] * self.world.size
            torch.distributed.all_gather_object(parts, sorted(skipped))
            skipped.update(*parts)
        return sorted(skipped)

    def _log(self, record: dict[str, Any]) -> None:
        if self.log is not None:
            self.log.write(record)

    def _record(self, norm: float, durations: list[float]) -> dict[str, Any]:
        """Figures of this step; `loss` is the mean over the steps since the last record."""
        # Every rank takes part in the mean; the main one writes it.
        loss = self.world.mean(self.loss_sum) / (self.loss_count or math.nan)
        self.loss_sum, self.loss_count = torch.zeros_like(self.loss_sum), 0
        return {
            "step": self.step,
            "loss": float(loss),
            "grad_norm": norm,
            "learning_rate": learning_rate(self.train, self.step),
            "step_seconds": statistics.median(durations),
            "skipped_steps": self.optimization.skipped,
            **self.method.metrics(),
            **self.model.metrics(),
        }

    def _train_step(self, batches: Iterator[Batch]) -> float:
        """One optimizer step; returns the norm of the gradient before clipping."""
        before = generators(self.world.device)
        accumulation = self._micro_batches(self.step)
        try:
            loss, norm = self.optimization.step(
                self.step, batches, [1.0 / accumulation] * accumulation
            )
        except NonFiniteGradient as error:
            self._stop_non_finite(float(self.world.mean(error.loss)), before)
        if self.averages:
            own = _parameters(self.model)
            torch._foreach_lerp_(
                list(self.averages.values()), [own[n] for n in self.averages], 1 - self.train.ema
            )
        if math.isfinite(norm):
            self.loss_sum, self.loss_count = self.loss_sum + loss, self.loss_count + 1
        return norm

    def _micro_batches(self, step: int) -> int:
        return int(self.train.batch_sizes[step]) // (self.micro_batch * self.world.size)

    def _requests(self) -> Iterator[Request]:
        """This rank's share of every micro-batch from here on: consecutive samples of the step."""
        for step in range(self.step, self.train.steps):
            for index in range(self._micro_batches(step)):
                first = (index * self.world.size + self.world.rank) * self.micro_batch
                yield step, range(first, first + self.micro_batch)

    def evaluate(self) -> dict[str, float]:
        """Means over the fixed held-out samples, equal on all ranks: `val_loss` in nats and what
        else the source counts; those of the averaged weights as `ema_val_...`."""
        return self.evaluate_weights() | self.evaluate_averages()

    def evaluate_weights(self) -> dict[str, float]:
        return self._evaluate("val_")

    def evaluate_averages(self) -> dict[str, float]:
        """With masks and scales of their own; nothing without averaged weights."""
        if not self.averages:
            return {}
        with self.averaged():
            return self._evaluate("ema_val_")

    @torch.no_grad()
    def _evaluate(self, prefix: str) -> dict[str, float]:
        was_training = self.model.training
        self.model.eval()
        totals: dict[str, Tensor] = {}
        count = 0
        for batch in self.source.eval_batches(self.eval_samples, self.micro_batch):
            on_device = self.optimization.to_device(batch)
            with self.optimization.autocast():
                output, loss = self.model(**on_device)
            sums, targets = self.source.score(output, loss.float(), on_device)
            totals = {name: totals.get(name, 0) + value for name, value in sums.items()}
            count += targets
        self.model.train(was_training)
        return {f"{prefix}{name}": float(value) / count for name, value in totals.items()}

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The averaged weights in the model, with masks and operands derived from them."""
        own = {name: value.clone() for name, value in self.model.state_dict().items()}
        with torch.no_grad():
            parameters = dict(self.model.named_parameters())
            for name, average in self.averages.items():
                parameters[name].copy_(average)
        refresh(self.model)
        try:
            yield
        finally:
            self.model.load_state_dict(own)

    def _stop_non_finite(self, loss: float, before: dict[str, Tensor]) -> NoReturn:
        # Nothing of this step has touched the weights yet: they are the last good ones.
        self.save(before)
        raise UserError(
            f"the gradient of step {self.step} is not finite (loss {loss:.4g}); the state before "
            f"it is saved in {self.checkpoints}. Start anew with a lower train.learning_rate"
            f"{'' if self.train.dtype == 'fp32' else ', or with train.dtype=fp32'}"
        )

    # ------------------------------------------------------------------ state

    def save(self, own: dict[str, Tensor] | None = None) -> None:
        """Checkpoint the state before step `self.step`; every rank must call it.

        Args:
            own: states of this rank's generators, if not the present ones.
        """
        states: list[Any] = [None] * self.world.size
        own = own or generators(self.world.device)
        if self.world.size > 1:
            torch.distributed.all_gather_object(states, own)
        else:
            states = [own]
        loss_sum, skipped = self.world.mean(self.loss_sum), self._join_skipped()
        if not self.world.is_main:
            return
        if self.log is not None:
            self.lines = self.log.lines
            self.log.sync()
        checkpoint.save(
            self.checkpoints,
            self.step,
            {
                "identity": self.identity,
                "data": self.source.fingerprint,
                "step": self.step,
                **self.optimization.state_dict(),
                "generators": states,
                "seconds": self.seconds,
                "loss_sum": loss_sum,
                "loss_count": self.loss_count,
                "averages": self.averages,
                "skipped_samples": skipped,
                "log": self.lines,
            },
        )

    def resume(self) -> None:
        """Load the newest whole checkpoint, if there is one.

        Raises:
            UserError: it belongs to another config or corpus; nothing is changed.
        """
        state = checkpoint.load_latest(self.checkpoints, self.report)
        if state is None:
            return
        if state.get("identity") != self.identity:
            raise UserError(
                f"{self.checkpoints} belongs to another config; remove it or change `runs`"
            )
        if state["data"] != self.source.fingerprint:
            raise UserError(
                f"{self.checkpoints} was made on other data than those in "
                f"{self.source.directory}; give these another data.name, or remove it"
            )
        self.optimization.load_state_dict(state)
        self.step = state["step"]
        self.seconds = state["seconds"]
        self.lines = state["log"]
        self.loss_sum = state["loss_sum"].to(self.world.device)
        self.loss_count = state["loss_count"]
        for name, average in self.averages.items():
            average.copy_(state["averages"][name])
        getattr(self.source, "skipped", set()).update(state["skipped_samples"])
        if len(state["generators"]) != self.world.size:
            self.report(
                f"{len(state['generators'])} processes made this checkpoint, here are "
                f"{self.world.size}: dropout goes on with other random numbers"
            )
        else:
            set_generators(state["generators"][self.world.rank], self.world.device)
        if self.world.is_main:
            self.report(f"resumed at step {self.step} of {self.train.steps}")


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    """The trained parameters by name, detached."""
    return {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
