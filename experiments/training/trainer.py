"""One trainer for every model and method, in pre-training and in fine-tuning.

A step (experiments/training/optimization.py) depends only on the saved state and the step's number,
so a run that is stopped and resumed gives the same result as one that was not.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.config.settings import ImplConfig, TrainConfig, learning_rate
from experiments.data.source import Batch, Request, TrainingSource
from experiments.support import memory
from experiments.support.errors import Diverged, Stop, UserError, deferred_stop, first_line
from experiments.support.progress import progress
from experiments.support.results import revision
from experiments.training import averages, checkpoints
from experiments.training.checkpoints import Saver
from experiments.training.descent import Descent
from experiments.training.distributed import World
from experiments.training.graphs import choose
from experiments.training.optimization import (
    NonFiniteGradient,
    Optimization,
    generators,
    set_generators,
)
from experiments.training.tracking import MetricsLog
from methods import Method
from models.base import Model

VERSION = 1  # of the state in a checkpoint; raise it when its entries or their meaning change
# A function that evaluates a trainer's model and returns metrics by name.
Evaluation = Callable[["Trainer"], dict[str, float]]


@dataclass
class Built:
    """A converted model with all that a `Trainer` needs; on its device unless it will be sharded.

    evaluation: evaluates the model every `train.eval_every` steps, or after each epoch.
    micro_batch: samples per rank and forward pass. tokens: tokens of the longest micro-batch.
    """

    model: Model
    method: Method
    source: TrainingSource
    evaluation: Evaluation
    train: TrainConfig
    micro_batch: int
    tokens: int


class Trainer:
    """Trains a built model, which is on its device by now. identity: hashes of the config and the
    initial weights; a checkpoint with another one, or of other data, is refused. config: for the
    viewers of the log."""

    def __init__(
        self,
        built: Built,
        impl: ImplConfig,
        world: World,
        directory: Path,
        identity: str,
        config: dict[str, Any],
        report: Callable[[str], None],
    ) -> None:
        model, method, train = built.model, built.method, built.train
        self.model, self.method, self.train = model, method, train
        self.source, self.evaluation = built.source, built.evaluation
        self.identity, self.directory, self.world = identity, directory, world
        self.checkpoints = directory / "checkpoints"
        self.micro_batch, self.impl = built.micro_batch, impl
        self.config, self.report = config, report
        self.saver = Saver(self.checkpoints, world)
        one_shape = built.source.one_shape
        replayed, self.notice = choose(impl.cuda_graphs, world, model, train, one_shape)
        self.optimization = Optimization(
            model,
            method,
            train,
            world.device,
            impl,
            graphed=replayed,
            report=report,
            ranks=world.size,
        )
        own = averages.trained(model) if train.ema or train.average_last else {}
        self.averages = {name: value.clone() for name, value in own.items()}
        self.revisions = [revision()]  # of the code, in the order in which they trained
        self.step = 0
        self.seconds = 0.0
        self.lines: list[str] = []  # lines of the log
        self.log: MetricsLog | None = None
        # Sums over the steps since the last record.
        self.loss_sum, self.loss_count = torch.zeros((), device=world.device), 0
        self.durations: list[float] = []  # seconds

    @property
    def graphed(self) -> bool:
        """True if this process replays passes from CUDA graphs."""
        replays = self.optimization.replays
        return replays is not None and replays.steps > 0 and not replays.given_up

    def fit(self) -> None:
        """Train to the end. Raises `Diverged` if most steps were skipped, or one is not finite."""
        main = self.world.is_main
        if main:
            self.log = MetricsLog(self.directory, self.lines, self.impl.loggers, self.config)
        unit = self.source.unit
        size = self.source.tokens_per_sample if unit == "tokens" else 1
        first, seen = self.step, self.train.samples_before * size
        batches = self.source.batches(self._requests())
        self.model.train()
        if self.notice is not None:
            self.report(self.notice)
        bar = progress(self.train.steps, self.step, unit, enabled=main)
        epoch = self.train.epoch_steps
        # A signal is delayed to the end of a step. Several ranks cannot decide this separately, so
        # there it ends the process at once.
        delayed = deferred_stop() if self.world.size == 1 else nullcontext(Stop())
        # However the training ends, a checkpoint that is being written is completed.
        with closing(self.saver), bar as show, delayed as stop:
            while self.step < self.train.steps:
                # An epoch is evaluated at its end.
                if self.step % (epoch or self.train.eval_every) == 0 and (self.step or not epoch):
                    self._log_evaluation(self.evaluate())
                start = time.perf_counter()
                norm = self._train_step(batches)
                self.durations.append(time.perf_counter() - start)
                self.seconds += self.durations[-1]
                loss = self._log_step(norm)
                if loss is not None:
                    show(self.step + 1, int(seen[self.step + 1] - seen[first]), loss)
                self.step += 1
                self.saver.poll()
                every = self.impl.checkpoint_every
                if every and (stop.kind is not None or self.step % every == 0):
                    self.save()
                if stop.kind is not None:
                    self.saver.wait()
                    raise stop.kind(
                        "goes on from the last checkpoint"
                        if every
                        else "begins anew: with impl.checkpoint_every=0 nothing is saved"
                    )
            self.saver.wait()
        skipped = self.optimization.skipped
        if 2 * skipped > self.step:
            raise self.optimization.diverged(
                f"{skipped} of {self.step} steps were skipped, because their gradients were not "
                "finite at the loss scale"
            )
        if self.optimization.replays is not None:
            self.optimization.replays.forget()  # later work may need their memory

    def log_last(self, means: dict[str, float]) -> None:
        """Record the evaluation after the last step and close the log."""
        self._log_evaluation(means)
        if self.log is not None:
            self.log.close()

    def _log(self, record: dict[str, Any]) -> None:
        if self.log is not None:
            self.log.write(record)

    def _log_evaluation(self, means: dict[str, float]) -> None:
        """Record an evaluation; with epochs it is the epoch's only record, with its mean loss."""
        record: dict[str, Any] = {"step": self.step}
        if self.train.epoch_steps is not None:
            record |= {"epoch": self.step // self.train.epoch_steps, "loss": self._mean_loss()}
        self._log(record | means)

    def _log_step(self, norm: float) -> float | None:
        """Record this step if a record is due; return the mean loss since the last one, if there is
        one to show. norm: the gradient's before clipping."""
        if self.train.epoch_steps is not None:
            return float(self.loss_sum) / (self.loss_count or math.nan)
        if self.step % self.train.log_every and self.step != self.train.steps - 1:
            return None
        seconds = statistics.median(self.durations)
        loss = self._mean_loss()
        self._log(
            {
                "step": self.step,
                "loss": loss,
                "grad_norm": norm,
                "learning_rate": learning_rate(self.train, self.step),
                "step_seconds": seconds,
                "skipped_steps": self.optimization.skipped,
                **self.method.metrics(),
                **self.model.metrics(),
            }
        )
        return loss

    def _mean_loss(self) -> float:
        """The mean loss since the last record, or nan; counts anew. Every rank must call it."""
        mean = self.world.all_reduce_mean(self.loss_sum) / (self.loss_count or math.nan)
        self.loss_sum, self.loss_count = torch.zeros_like(self.loss_sum), 0
        self.durations = []
        return float(mean)

    def _train_step(self, batches: Iterator[Batch]) -> float:
        """Take one optimizer step and return the gradient's norm before clipping."""
        before = generators(self.world.device)
        samples = int(self.train.batch_sizes[self.step])
        # DDP averages the ranks' gradients; with these shares the mean is that over all samples.
        shares = [len(p) * self.world.size / samples for p in self._micro_batches(self.step)]
        descent = None
        if self.train.descent_every and self.step % self.train.descent_every == 0:
            parts = [next(batches) for _ in shares]
            descent, batches = Descent(self.optimization, parts, shares), iter(parts)
        try:
            loss, norm = self.optimization.step(self.step, batches, shares)
        except NonFiniteGradient as error:
            mean, group = float(self.world.all_reduce_mean(error.loss)), self.train.group
            # This step has not changed the weights yet, so they are the last good ones.
            self.save(before)
            self.saver.wait()
            raise Diverged(
                f"the gradient of step {self.step} is not finite (loss {mean:.4g})",
                f"the state before it is saved in {self.checkpoints}. Start anew with a lower "
                f"{group}.learning_rate"
                f"{'' if self.train.dtype == 'fp32' else f', or with {group}.dtype=fp32'}",
            ) from error
        if descent is not None:
            changes = descent.after().items()
            means = {name: float(self.world.all_reduce_mean(change)) for name, change in changes}
            self._log({"step": self.step, **means})
        if self.averages:
            averages.update(self.averages, averages.trained(self.model), self.train, self.step)
        if math.isfinite(norm):
            self.loss_sum, self.loss_count = self.loss_sum + loss, self.loss_count + 1
        return norm

    def _micro_batches(self, step: int) -> list[range]:
        """This rank's micro-batches of a step, as ranges of indices into the step's batch. All
        ranks have the same number; the last may be small, or empty."""
        samples, size, ranks = int(self.train.batch_sizes[step]), self.micro_batch, self.world.size
        starts = range(0, samples, ranks * size)
        firsts = (min(start + self.world.rank * size, samples) for start in starts)
        return [range(first, min(first + size, samples)) for first in firsts]

    def _requests(self) -> Iterator[Request]:
        """Yield the requests for this rank's micro-batches of all remaining steps. An empty one is
        replaced by a sample with share 0, because all ranks must run the model equally often."""
        for step in range(self.step, self.train.steps):
            for part in self._micro_batches(step):
                yield step, part or range(1)

    def evaluate(self) -> dict[str, float]:
        """The metrics of the weights and, as `ema_...`, those of their running average."""
        return self.evaluate_weights() | (self.evaluate_averages() if self.train.ema else {})

    @torch.no_grad()
    def evaluate_weights(self) -> dict[str, float]:
        """The metrics of the present weights."""
        was_training = self.model.training
        self.model.eval()
        means = self.evaluation(self)
        self.model.train(was_training)
        return means

    def evaluate_averages(self) -> dict[str, float]:
        """The metrics of the averaged weights, with their own masks and scales, if any."""
        if not self.averages:
            return {}
        with averages.applied(self.model, self.averages):
            prefix = "ema" if self.train.ema else "averaged"
            return {f"{prefix}_{name}": value for name, value in self.evaluate_weights().items()}

    def forward(self, batch: Batch) -> tuple[Any, Any, Batch]:
        """(output, loss or None, the batch on the device) of the model in the training's dtype."""
        on_device = self.optimization.to_device(batch)
        with self.optimization.autocast():
            output, loss = self.model(**on_device)
        return output, loss, on_device

    # ------------------------------------------------------------------ state

    def save(self, own: dict[str, Tensor] | None = None) -> None:
        """Begin to checkpoint the state before step `self.step`, with other states of this rank's
        random generators if `own` are given; every rank must call it."""
        states = self.world.all_gather(own or generators(self.world.device))
        loss_sum = self.world.all_reduce_mean(self.loss_sum)
        if self.log is not None:
            self.lines = self.log.lines
            self.log.sync()
        state = {
            "version": VERSION,
            "revisions": self.revisions,
            "identity": self.identity,
            "data": self.source.fingerprint,
            "step": self.step,
            **self.optimization.state_dict(),
            "generators": states,
            "seconds": self.seconds,
            "loss_sum": loss_sum,
            "loss_count": self.loss_count,
            "averages": self.averages,
            "log": self.lines,
        }
        self.saver.save(self.step, state)

    def resume(self) -> None:
        """Load the newest whole checkpoint, if there is one."""
        state = checkpoints.load_latest(self.checkpoints, self.report, self.world)
        if state is None:
            return
        revisions = state.get("revisions", ["unknown"])
        if state.get("identity") != self.identity:
            raise UserError(
                f"{self.checkpoints} belongs to another config, or to other weights to start "
                "from; remove it to begin anew"
            )
        if state.get("data") != self.source.fingerprint:
            raise UserError(
                f"{self.checkpoints} was made on other data than those in "
                f"{self.source.directory}; give these another data.name, or remove it"
            )
        try:
            self._load(state)
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            if memory.is_exhausted(error):
                raise
            raise UserError(
                f"{self.checkpoints} does not fit this version of the code ({first_line(error)}); "
                f"go on with the one that wrote it, revision {revisions[-1]}, or remove it to "
                "begin anew"
            ) from error
        self.revisions = list(dict.fromkeys([*revisions, *self.revisions]))
        if self.world.is_main:
            self.report(f"resumed at step {self.step} of {self.train.steps}")

    def _load(self, state: dict[str, Any]) -> None:
        # Earlier versions of the code wrote no number, but the layout of version 1.
        if (found := state.get("version", 1)) != VERSION:
            raise ValueError(f"its layout has version {found}, not {VERSION}")
        like = {**self.optimization.places(), "averages": self.averages}
        state = checkpoints.placed(state, like)
        self.optimization.load_state_dict(state)
        self.step = state["step"]
        self.seconds = state["seconds"]
        self.lines = state["log"]
        self.loss_sum = state["loss_sum"].to(self.world.device)
        self.loss_count = state["loss_count"]
        for name, average in self.averages.items():
            average.copy_(state["averages"][name])
        if self.train.descent_every and self.step:
            # Its own passes draw the random bits of the last micro-batch of the step before.
            self.method.select_bits(self.step - 1)
            self.method.micro_batch = len(self._micro_batches(self.step - 1)) - 1
            with torch.no_grad():
                self.method.open_micro_batch()
        if len(state["generators"]) != self.world.size:
            self.report(
                f"{len(state['generators'])} processes wrote this checkpoint and {self.world.size} "
                "read it: dropout continues with other random numbers"
            )
        else:
            set_generators(state["generators"][self.world.rank], self.world.device)
