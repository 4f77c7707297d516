"""One optimizer step, for pre-training and fine-tuning.

In order: learning rate and weight decay, `on_step_begin`, forward and backward of every
micro-batch, unscale, clip, `on_gradients`, optimizer, `on_step_end`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from experiments.config.settings import ImplConfig, TrainConfig, learning_rate, weight_decay
from experiments.data.source import Batch, send
from experiments.support.errors import Diverged, UserError
from experiments.support.progress import say
from experiments.training.graphs import Replays
from methods import FusedAdamW, Method
from methods.nn import ranks as of_ranks
from methods.nn import sharding
from models.base import Model

# After this many skipped steps in a row the loss scaler will not recover.
MAX_SKIPPED_IN_A_ROW = 50

# The dtype of autocast for each `train.dtype`; None: no autocast.
DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}

# The parts of an `Optimization` that have a state of their own.
STATEFUL = ("model", "method", "optimizer", "scaler")


class NonFiniteGradient(Exception):
    """The gradient of a step, with this loss, is not finite; the weights are still as before it."""

    def __init__(self, loss: Tensor) -> None:
        super().__init__(f"loss {float(loss):.4g}")
        self.loss = loss


def micro_batch_size(
    train: TrainConfig, micro_batch: int | None, ranks: int, quantizes: bool = False
) -> int:
    """The number of samples per rank and micro-batch. If the method takes its FP8 scales over one
    (`quantizes`), it must be `train.fp8_samples`, or the whole batch."""
    name = "batch_size" if train.ramp_batch is None else "ramp_batch"
    unit = train.ramp_batch or train.batch_size
    if unit % ranks:
        raise UserError(
            f"train.{name}={unit} cannot be shared by {ranks} processes; choose an "
            "nproc_per_node (of a plan, plan.gpus) that divides it"
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


def make_optimizer(
    method: Method, model: Model, train: TrainConfig, fused: bool = False
) -> torch.optim.Optimizer:
    """The optimizer that `train` names, with the model's parameter groups. fused: use the AdamW
    that does the method's work on the weights in its own pass."""
    groups = model.param_groups(train.weight_decay)
    options: dict[str, Any] = {"lr": train.learning_rate, "betas": train.betas}
    if train.optimizer == "adamw":
        if fused and not method.capabilities.needs_adamw:
            return FusedAdamW(groups, eps=train.eps, **options)
        return method.optimizer(groups, eps=train.eps, fused=True, **options)
    if method.capabilities.needs_adamw:
        raise UserError(
            f"train.optimizer={train.optimizer}, but the update rule of this method is a "
            "variant of AdamW; set train.optimizer=adamw"
        )
    from timm.optim import Lamb, Lion

    if train.optimizer == "lion":
        return Lion(groups, **options)
    # Our step clips the gradient, so the optimizer's own clipping is turned off.
    return Lamb(groups, eps=train.eps, max_grad_norm=None, **options)


class Optimization:
    """Optimizer steps of `model`, which `method` has converted and which is on its device, sharded
    or whole. Hooks of the model's own are called before the method's of the same name.

    graphed: replay the passes from CUDA graphs; `report` is called if they cannot be used after
        all.
    ranks: number of processes that share each step's samples.
    """

    def __init__(
        self,
        model: Model,
        method: Method,
        train: TrainConfig,
        device: torch.device,
        impl: ImplConfig | None = None,
        *,
        graphed: bool = False,
        report: Callable[[str], None] = say,
        ranks: int = 1,
    ) -> None:
        self.model, self.method, self.train = model, method, train
        self.device, self.dtype = device, DTYPES[train.dtype]
        impl = impl or ImplConfig()
        self.optimizer = make_optimizer(method, model, train, impl.optimizer == "fused")
        # Remember indices, because loading a checkpoint replaces the groups.
        decayed = model.param_groups(1.0)
        self.decayed = [i for i, group in enumerate(decayed) if group["weight_decay"]]
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.dtype is torch.float16)
        sharded = any(map(sharding.is_sharded, model.parameters()))
        # The blocks of a sharded model are compiled one by one (sharding.py).
        runner: Any = torch.compile(model) if impl.compile and not sharded else model
        if ranks > 1 and not sharded:
            of_ranks.take_from_rank_0(model.parameters())
            runner = DistributedDataParallel(runner, init_sync=False)
            # Do not broadcast buffers: masks and scales are equal on all ranks anyway, and the
            # random keys must differ. DDP's argument for this is deprecated in some torch.
            runner.broadcast_buffers = False
        self.runner = runner
        self.replays = Replays(model, self._backward, report) if graphed else None
        self.skipped = self.skipped_in_a_row = 0

    def step(
        self, step: int, batches: Iterator[Batch], shares: Sequence[float]
    ) -> tuple[Tensor, float]:
        """One optimizer step on as many micro-batches as there are `shares`.

        Args:
            batches: the micro-batches, on any device.
            shares: the weight of each micro-batch's mean loss. Their weighted sum, averaged over
                the ranks, must be the mean over all samples of the step.
        Returns: (mean loss on this rank, norm of the gradient before clipping). If the norm is not
            finite, the loss scaler has skipped the step.
        Raises:
            NonFiniteGradient: the gradient is not finite, and there is no loss scaler.
            Diverged: the loss scaler has skipped too many steps in a row.
        """
        rate = learning_rate(self.train, step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("lr_scale", 1.0)
        for index in self.decayed:
            decay = weight_decay(self.train, step)
            self.optimizer.param_groups[index]["weight_decay"] = decay
        self.model.on_step_begin(step)
        self.method.on_step_begin(step)
        total = self._accumulate(batches, shares)
        self.scaler.unscale_(self.optimizer)
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = sharding.full(torch.nn.utils.get_total_norm(grads))
        length = float(norm)  # waits for the device
        finite = math.isfinite(length)
        if not finite and not self.scaler.is_enabled():
            self.optimizer.zero_grad(set_to_none=True)
            raise NonFiniteGradient(total)
        # As torch's clip_grad_norm_, which would also multiply shorter gradients by 1.
        if finite and length + 1e-6 > (self.train.grad_clip or math.inf):
            torch.nn.utils.clip_grads_with_norm_(
                self.model.parameters(), self.train.grad_clip, norm
            )
        if finite:
            self.model.on_gradients(step)
            self.method.on_gradients(step, self.optimizer)
            # If only the norm overflows, all entries are finite and the scaler would not notice.
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.skipped += not finite
        self.skipped_in_a_row = 0 if finite else self.skipped_in_a_row + 1
        if self.skipped_in_a_row == MAX_SKIPPED_IN_A_ROW:
            raise self.diverged(
                f"no finite gradient in {MAX_SKIPPED_IN_A_ROW} steps up to step {step}, at any loss"
                " scale"
            )
        self.optimizer.zero_grad(set_to_none=True)
        self.model.on_step_end(step)
        self.method.on_step_end(step)
        return total, length

    def _accumulate(self, batches: Iterator[Batch], shares: Sequence[float]) -> Tensor:
        """Forward and backward of each micro-batch; returns the loss of the step."""
        total = torch.zeros((), device=self.device)
        if self.replays is not None:
            on_device = map(self.to_device, batches)
            for replay in self.replays.of(on_device, shares, self.method.phase()):
                self.method.open_micro_batch()
                total += replay()
            return total
        for index, share in enumerate(shares):
            batch, last = self.to_device(next(batches)), index == len(shares) - 1
            lazy = isinstance(self.runner, DistributedDataParallel) and not last
            with self.runner.no_sync() if lazy else nullcontext():
                self.method.open_micro_batch()
                total += self._backward(batch, share)
        return total

    def _backward(self, batch: Batch, share: float) -> Tensor:
        """Add the gradients of `share` times a micro-batch's loss, and return that loss."""
        with self.autocast():
            loss = self.method.micro_batch_loss(self.runner, batch) * share
        self.scaler.scale(loss).backward()
        return loss.detach()

    def diverged(self, reason: str) -> Diverged:
        others = " or ".join(dtype for dtype in ("bf16", "fp32") if dtype != self.train.dtype)
        return Diverged(reason, f"lower {self.train.group}.learning_rate, or train in {others}")

    def to_device(self, batch: Batch) -> Batch:
        return {name: send(value, self.device) for name, value in batch.items()}

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not None)

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on: states of model, method, optimizer and scaler."""
        states = {name: getattr(self, name).state_dict() for name in STATEFUL}
        return {**states, "skipped": self.skipped, "skipped_in_a_row": self.skipped_in_a_row}

    def places(self) -> dict[str, Any]:
        """A tree like `state_dict()` whose tensors show where those of a loaded state belong."""
        weights = (p for group in self.optimizer.param_groups for p in group["params"])
        return {
            "model": self.model.state_dict(),
            "method": self.method.state_dict(),
            "optimizer": {"state": dict(enumerate(weights))},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in STATEFUL:
            getattr(self, name).load_state_dict(state[name])
        self.skipped = state["skipped"]
        self.skipped_in_a_row = state["skipped_in_a_row"]


def generators(device: torch.device) -> dict[str, Tensor]:
    """The states of torch's random generators, from which dropout draws."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_generators(states: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"])
