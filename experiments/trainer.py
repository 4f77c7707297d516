"""One trainer for every model and method.

A step: learning rate, `method.on_step_begin`, forward and backward of every micro-batch, unscale,
clip, `method.on_gradients`, optimizer, `method.on_step_end`. All that a step depends on is the
saved state and the step's number, so a run that is stopped anywhere and started again goes on as
if nothing had happened.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from experiments import checkpoint
from experiments.config import TrainConfig
from experiments.data import Corpus
from experiments.distributed import World
from experiments.errors import UserError
from experiments.progress import Progress
from experiments.tracking import MetricsLog
from methods import Method

# A run whose scaler has skipped this many steps in a row will not recover.
MAX_SKIPPED_IN_A_ROW = 50

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def learning_rate(config: TrainConfig, step: int) -> float:
    """Linear warm-up from 0 over `warmup_steps`, then a cosine to the minimum at `steps`."""
    if step < config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    share = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    return config.min_learning_rate + share * (config.learning_rate - config.min_learning_rate)


def micro_batches(batch_size: int, micro_batch: int | None, ranks: int) -> tuple[int, int]:
    """(sequences per rank and micro-batch, micro-batches per step).

    Raises:
        UserError: the ranks or the micro-batch do not divide the batch.
    """
    if batch_size % ranks:
        raise UserError(
            f"train.batch_size={batch_size} cannot be shared by {ranks} processes; choose an "
            "nproc_per_node that divides it"
        )
    size = micro_batch if micro_batch is not None else batch_size // ranks
    if batch_size % (size * ranks):
        raise UserError(
            f"train.batch_size={batch_size} is no multiple of impl.micro_batch={size} x {ranks} "
            "processes; change one of them"
        )
    return size, batch_size // (size * ranks)


class Trainer:
    """Trains `model`, converted by `method` and on its device, on the windows of `corpus`.

    Args:
        identity: hash of the run's config; a checkpoint of another config, or made on another
            corpus, is refused.
        block: tokens per sequence.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        method: Method,
        corpus: Corpus,
        train: TrainConfig,
        block: int,
        seed: int,
        identity: str,
        directory: Path,
        world: World,
        dtype: str = "fp32",
        compiled: bool = False,
        micro_batch: int | None = None,
        checkpoint_every: int = 0,
        loggers: tuple[str, ...] = (),
        report: Callable[[str], None] = print,
    ) -> None:
        self.model, self.method, self.corpus = model, method, corpus
        self.train, self.block, self.seed = train, block, seed
        self.identity, self.directory, self.world = identity, directory, world
        self.dtype = DTYPES[dtype]
        self.checkpoint_every, self.loggers, self.report = checkpoint_every, loggers, report
        self.micro_batch, self.accumulation = micro_batches(
            train.batch_size, micro_batch, world.size
        )
        self.optimizer = method.optimizer(
            model.param_groups(train.weight_decay),  # type: ignore[operator]
            lr=train.learning_rate,
            betas=train.betas,
            eps=train.eps,
            fused=True,
        )
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=self.dtype is torch.float16)
        runner: Any = torch.compile(model) if compiled else model
        if world.size > 1:
            # Masks and scales are equal on all ranks by construction; the random keys must not be.
            runner = DistributedDataParallel(runner, broadcast_buffers=False)
        self.runner = runner
        self.step = 0
        self.seconds = 0.0
        self.skipped_steps = self.skipped_in_a_row = 0
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
        log = MetricsLog(self.directory, self.step, self.loggers) if main else None
        tokens = self.train.batch_size * self.block
        self.model.train()
        with Progress(self.train.steps, self.step, tokens, enabled=main) as progress:
            durations: list[float] = []
            while self.step < self.train.steps:
                if self.step % self.train.eval_every == 0:
                    self._log(log, {"step": self.step, "val_loss": self.evaluate()})
                start = time.perf_counter()
                norm = self._train_step()
                durations.append(time.perf_counter() - start)
                self.seconds += durations[-1]
                if self.step % self.train.log_every == 0 or self.step == self.train.steps - 1:
                    record = self._record(norm, durations)
                    durations = []
                    self._log(log, record)
                    progress.update(self.step + 1, record)
                self.step += 1
                if self.checkpoint_every and self.step % self.checkpoint_every == 0:
                    self.save()
        if log is not None:
            log.close()

    def _log(self, log: MetricsLog | None, record: dict[str, Any]) -> None:
        if log is not None:
            log.write(record)

    def _record(self, norm: float, durations: list[float]) -> dict[str, Any]:
        """Figures of this step; `loss` is the mean over the steps since the last record."""
        # Every rank takes part in the mean; the main one writes it.
        loss = self.world.mean(self.loss_sum) / self.loss_count
        self.loss_sum, self.loss_count = torch.zeros_like(self.loss_sum), 0
        return {
            "step": self.step,
            "loss": float(loss),
            "grad_norm": norm,
            "learning_rate": learning_rate(self.train, self.step),
            "step_seconds": statistics.median(durations),
            "skipped_steps": self.skipped_steps,
            **self.method.metrics(),
        }

    def _train_step(self) -> float:
        """One optimizer step; returns the norm of the gradient before clipping."""
        generators = self._generators()
        rate = learning_rate(self.train, self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.method.on_step_begin(self.step)
        total = torch.zeros((), device=self.world.device)
        for index in range(self.accumulation):
            batch = self._batch(index)
            last = index == self.accumulation - 1
            lazy = isinstance(self.runner, DistributedDataParallel) and not last
            with self.runner.no_sync() if lazy else nullcontext():
                with self._autocast():
                    loss = self.method.loss(self.runner, batch) / self.accumulation
                self.scaler.scale(loss).backward()
            total += loss.detach()
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(
            self.model.parameters(), self.train.grad_clip or math.inf
        )
        finite = bool(torch.isfinite(norm))
        if not finite and not self.scaler.is_enabled():
            self._stop_non_finite(float(self.world.mean(total)), generators)
        if finite:
            self.method.on_gradients(self.step, self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self._count_skipped(finite)
        self.optimizer.zero_grad(set_to_none=True)
        self.method.on_step_end(self.step)
        self.loss_sum, self.loss_count = self.loss_sum + total, self.loss_count + 1
        return float(norm)

    def _batch(self, index: int) -> dict[str, Tensor]:
        """This rank's share of micro-batch `index`: consecutive sequences of the global batch."""
        first = (index * self.world.size + self.world.rank) * self.micro_batch
        batch = self.corpus.batch(
            "train", self.step, range(first, first + self.micro_batch), self.block
        )
        return self._to_device(batch)

    def _to_device(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {k: v.to(self.world.device, non_blocking=True) for k, v in batch.items()}

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.world.device.type, self.dtype, enabled=self.dtype is not None)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss per token, in nats, on the fixed validation windows; equal on all ranks."""
        was_training = self.model.training
        self.model.eval()
        total, sequences = torch.zeros((), device=self.world.device), 0
        batches = self.corpus.eval_batches(
            self.train.eval_sequences, min(self.micro_batch, 64), self.block
        )
        for batch in batches:
            count = next(iter(batch.values())).shape[0]
            with self._autocast():
                _, loss = self.model(**self._to_device(batch))
            total += loss.float() * count
            sequences += count
        self.model.train(was_training)
        return float(total) / sequences

    def _stop_non_finite(self, loss: float, generators: dict[str, Tensor]) -> None:
        # Nothing of this step has touched the weights yet: they are the last good ones.
        self.optimizer.zero_grad(set_to_none=True)
        self.save(generators)
        raise UserError(
            f"the gradient of step {self.step} is not finite (loss {loss:.4g}); the state before "
            f"it is saved in {self.checkpoints}. Go on from it with impl.dtype=fp32 or bf16, or "
            "start anew with a lower train.learning_rate"
        )

    def _count_skipped(self, finite: bool) -> None:
        self.skipped_steps += not finite
        self.skipped_in_a_row = 0 if finite else self.skipped_in_a_row + 1
        if self.skipped_in_a_row == MAX_SKIPPED_IN_A_ROW:
            raise UserError(
                f"no finite gradient in {MAX_SKIPPED_IN_A_ROW} steps up to step {self.step}, at any"
                " loss scale; lower train.learning_rate, or train in bf16 or fp32"
            )

    # ------------------------------------------------------------------ state

    def _generators(self) -> dict[str, Tensor]:
        states = {"cpu": torch.get_rng_state()}
        if self.world.device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state()
        return states

    def save(self, own: dict[str, Tensor] | None = None) -> None:
        """Checkpoint the state before step `self.step`; every rank must call it.

        Args:
            own: states of this rank's generators, if not the present ones.
        """
        generators: list[Any] = [None] * self.world.size
        own = own or self._generators()
        if self.world.size > 1:
            torch.distributed.all_gather_object(generators, own)
        else:
            generators = [own]
        loss_sum = self.world.mean(self.loss_sum)
        if not self.world.is_main:
            return
        checkpoint.save(
            self.checkpoints,
            self.step,
            {
                "identity": self.identity,
                "corpus": self.corpus.fingerprint,
                "step": self.step,
                "model": self.model.state_dict(),
                "method": self.method.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scaler": self.scaler.state_dict(),
                "generators": generators,
                "seconds": self.seconds,
                "skipped_steps": self.skipped_steps,
                "skipped_in_a_row": self.skipped_in_a_row,
                "loss_sum": loss_sum,
                "loss_count": self.loss_count,
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
        if state["identity"] != self.identity:
            raise UserError(
                f"{self.checkpoints} belongs to another config; remove it or change `runs`"
            )
        if state["corpus"] != self.corpus.fingerprint:
            raise UserError(
                f"{self.checkpoints} was made on other tokens than those in "
                f"{self.corpus.directory}; remove it or change `runs`"
            )
        self.model.load_state_dict(state["model"])
        self.method.load_state_dict(state["method"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scaler.is_enabled() and state["scaler"]:  # empty when impl.dtype was another
            self.scaler.load_state_dict(state["scaler"])
        self.step = state["step"]
        self.seconds = state["seconds"]
        self.skipped_steps = state["skipped_steps"]
        self.skipped_in_a_row = state["skipped_in_a_row"]
        self.loss_sum = state["loss_sum"].to(self.world.device)
        self.loss_count = state["loss_count"]
        if len(state["generators"]) == self.world.size:
            own = state["generators"][self.world.rank]
            torch.set_rng_state(own["cpu"])
            if "cuda" in own and self.world.device.type == "cuda":
                torch.cuda.set_rng_state(own["cuda"])
        if self.world.is_main:
            self.report(f"resumed at step {self.step} of {self.train.steps}")
