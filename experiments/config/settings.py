"""The settings that every training has: `train` changes the result, `impl` only the speed."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from experiments.support.names import check_bounds, check_choices

# Larger counts are typing errors, and the list of batch sizes would fill the memory. A higher
# learning rate times a decay factor may overflow fp32.
_COUNT, _RATE, _REAL = (1, 10**8), (0, 10**6), (0, math.inf)
_BOUNDS = {
    **dict.fromkeys(
        ("steps", "batch_size", "ramp_batch", "ramp_micro_steps", "fp8_samples"), _COUNT
    ),
    **dict.fromkeys(("log_every", "eval_every", "eval_samples"), (1, math.inf)),
    **dict.fromkeys(("learning_rate", "min_learning_rate", "warmup_learning_rate"), _RATE),
    **dict.fromkeys(("eps", "weight_decay", "weight_decay_end", "grad_clip"), _REAL),
    **dict.fromkeys(("warmup_steps", "cooldown_steps", "average_last", "average_every"), _REAL),
    "descent_every": _REAL,
    "ema": (0, 1 - 1e-9),
}

OPTIMIZERS = ("adamw", "lamb", "lion")
DTYPES = ("fp32", "bf16", "fp16")
SCHEDULES = ("cosine", "linear", "sqrt", "inverse_sqrt", "triangle")
# Settings that a schedule does not use.
UNUSED = {
    "sqrt": ("min_learning_rate", "cooldown_steps"),
    "inverse_sqrt": ("min_learning_rate", "cooldown_steps"),
    "triangle": ("min_learning_rate", "cooldown_steps", "warmup_steps", "warmup_learning_rate"),
}


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Settings of a training that change its result. Batches are counted in samples (sequences or
    images), periods in optimizer steps. conf/train/_common.yaml explains each.

    schedule: see `learning_rate`. `sqrt` and `inverse_sqrt` have no minimum and no cooldown, and
        `triangle` has no warm-up either: these settings must be 0.
    average_last, average_every: see `experiments.training.averages.update`.
    ramp_batch, ramp_micro_steps: the batch grows linearly over this many micro-steps of
        `ramp_batch` samples, which are the whole run.
    fp8_samples: is also the micro-batch of a rank.
    """

    group: ClassVar[str] = "train"  # the config group that has the settings, for messages
    steps: int
    batch_size: int
    learning_rate: float
    min_learning_rate: float = 0.0
    warmup_steps: int = 0
    warmup_learning_rate: float = 0.0
    cooldown_steps: int = 0
    schedule: str = "cosine"
    optimizer: str = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    weight_decay_end: float | None = None
    grad_clip: float = 1.0
    ema: float = 0.0
    average_last: int = 0
    average_every: int = 0
    ramp_batch: int | None = None
    ramp_micro_steps: int | None = None
    dtype: str = "fp32"
    fp8_samples: int | None = None
    descent_every: int = 0
    log_every: int = 10
    eval_every: int = 50
    eval_samples: int = 64

    def __post_init__(self) -> None:
        check_bounds(self, "train.", **_BOUNDS)
        for name in ("min_learning_rate", "warmup_learning_rate"):
            if getattr(self, name) > self.learning_rate:
                raise ValueError(
                    f"train.{name}={getattr(self, name)} is above "
                    f"train.learning_rate={self.learning_rate}"
                )
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"train.betas={list(self.betas)}; they must lie in [0, 1)")
        choices = {"optimizer": OPTIMIZERS, "schedule": SCHEDULES, "dtype": DTYPES}
        check_choices(self, "train.", choices)
        for name in UNUSED.get(self.schedule, ()):
            if getattr(self, name):
                raise ValueError(
                    f"train.{name}={getattr(self, name)}, but train.schedule={self.schedule} does "
                    "not use it; set it to 0"
                )
        if (self.average_last == 0) != (self.average_every == 0):
            raise ValueError("train.average_last and train.average_every go together; set both")
        if self.average_last and self.ema:
            raise ValueError("train.ema and train.average_last exclude each other; set one to 0")
        if self.warmup_steps + self.cooldown_steps > self.steps:
            raise ValueError(
                f"train.warmup_steps={self.warmup_steps} and train.cooldown_steps="
                f"{self.cooldown_steps} together exceed train.steps={self.steps}"
            )
        if (self.ramp_batch is None) != (self.ramp_micro_steps is None):
            raise ValueError("train.ramp_batch and train.ramp_micro_steps go together; set both")
        if self.ramp_batch is None or self.ramp_micro_steps is None:
            return
        if self.batch_size % self.ramp_batch:
            raise ValueError(
                f"train.ramp_batch={self.ramp_batch} must divide train.batch_size={self.batch_size}"
            )
        if len(self.batch_sizes) != self.steps:
            raise ValueError(
                f"train.steps={self.steps}, but a batch that grows from {self.ramp_batch} to "
                f"{self.batch_size} over {self.ramp_micro_steps} micro-steps takes "
                f"{len(self.batch_sizes)} optimizer steps; set train.steps to that"
            )

    @cached_property
    def batch_sizes(self) -> np.ndarray:
        """Samples of each optimizer step, int64 [steps]. With a ramp, only whole steps count."""
        if self.ramp_batch is None or self.ramp_micro_steps is None:
            return np.full(self.steps, self.batch_size, dtype=np.int64)
        most, done = self.batch_size // self.ramp_batch, 0
        sizes: list[int] = []
        while True:
            count = min(most, done * most // self.ramp_micro_steps + 1)
            if done + count > self.ramp_micro_steps:
                return np.array(sizes, dtype=np.int64) * self.ramp_batch
            sizes.append(count)
            done += count

    @cached_property
    def samples_before(self) -> np.ndarray:
        """Samples seen before each step, int64 [steps + 1]; the last entry is the run's total."""
        return np.concatenate([[0], np.cumsum(self.batch_sizes)])

    @property
    def epoch_steps(self) -> int | None:
        """Optimizer steps per epoch; None if the run is not divided into epochs."""
        return None


@dataclass(frozen=True, kw_only=True)
class EpochConfig(TrainConfig):
    """A training in whole epochs over `samples` samples; an epoch's last batch may be smaller."""

    group: ClassVar[str] = "recipe"
    samples: int

    @property
    def epoch_steps(self) -> int:
        """Optimizer steps of an epoch."""
        return math.ceil(self.samples / self.batch_size)

    @cached_property
    def batch_sizes(self) -> np.ndarray:
        """[steps] int64: samples of each optimizer step."""
        sizes = np.full(self.epoch_steps, self.batch_size, dtype=np.int64)
        sizes[-1] = self.samples - (self.epoch_steps - 1) * self.batch_size
        return np.tile(sizes, self.steps // self.epoch_steps)


def fit_warmup(train: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The settings of `train` with a warm-up of at most its steps, else of a tenth of them, as is
    usual, and a note if it had to be shortened."""
    steps, warmup, cooldown = (train.get(f"{k}steps", 0) for k in ("", "warmup_", "cooldown_"))
    if not all(type(value) is int and value >= 0 for value in (steps, warmup, cooldown)):
        return train, ()
    available = steps - cooldown
    if warmup <= available or available < 0:
        return train, ()
    fits = min(available, steps // 10)
    note = f"train.warmup_steps={warmup} does not fit train.steps={steps}: it is {fits} here"
    return {**train, "warmup_steps": fits}, (note,)


def learning_rate(config: TrainConfig, step: int) -> float:
    """The learning rate of one optimizer step, counted from 0, by `train.schedule`. p is the
    fraction of the run's samples seen before it.

    cosine: linear warm-up, then half a cosine from the peak to the minimum (nanoGPT).
    linear: linear warm-up, then a line from the peak to the minimum.
    sqrt: linear warm-up, then peak * sqrt(1 - p) (BERT of NVIDIA, SLoPe's recipe).
    inverse_sqrt: linear warm-up, then peak * sqrt(warm-up / step) (Vaswani et al., 2017).
    triangle: peak * min(1/4 + p, 4 - 4 p), without warm-up (Cramming, arXiv 2212.14034): up to the
        peak at three quarters of the run, then down to 0.
    """
    if config.schedule == "triangle":
        # Not NumPy's number: an optimizer's state with one is not read again.
        seen = float(config.samples_before[min(step, config.steps)] / config.samples_before[-1])
        return config.learning_rate * min(0.25 + seen, 4.0 - 4.0 * seen)
    if step < config.warmup_steps:
        low = config.warmup_learning_rate
        return low + (config.learning_rate - low) * step / config.warmup_steps
    if config.schedule == "sqrt":
        return config.learning_rate * math.sqrt(max(0.0, 1.0 - step / config.steps))
    if config.schedule == "inverse_sqrt":
        warmup = max(1, config.warmup_steps)
        return config.learning_rate * math.sqrt(warmup / max(step, warmup))
    floor_at = config.steps - config.cooldown_steps
    if config.cooldown_steps and step >= floor_at:
        left = max(0, config.steps - step)
        return config.min_learning_rate * left / config.cooldown_steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, floor_at - config.warmup_steps))
    cosine = config.schedule == "cosine"
    share = 0.5 * (1.0 + math.cos(math.pi * progress)) if cosine else 1.0 - progress
    return config.min_learning_rate + share * (config.learning_rate - config.min_learning_rate)


def weight_decay(config: TrainConfig, step: int) -> float:
    """The weight decay in one step: constant, or a cosine to its last value (arXiv 2104.14294)."""
    if config.weight_decay_end is None:
        return config.weight_decay
    share = 0.5 * (1.0 + math.cos(math.pi * min(1.0, step / config.steps)))
    return config.weight_decay_end + share * (config.weight_decay - config.weight_decay_end)


@dataclass(frozen=True, kw_only=True)
class ImplConfig:
    """Settings of a training that change only its speed and place; conf/impl/default.yaml has more.

    micro_batch: null = the whole batch of a step, or with FP8 `train.fp8_samples`.
    optimizer: `fused` is `methods.FusedAdamW`, for methods that support it.
    cuda_graphs: needs one GPU and batches of one shape (`experiments.training.graphs.choose`).
    """

    device: str = "auto"
    compile: bool = False
    micro_batch: int | None = None
    matmul: str = "auto"
    repack_backward: bool = False
    optimizer: str = "separate"
    cuda_graphs: bool | str = False
    shard: str = "ddp"
    offload: bool = False
    activation_checkpointing: bool = False
    deterministic: bool = False
    checkpoint_every: int = 50
    threads: int = 0
    workers: int = 0
    loggers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        choices = {
            "device": ("auto", "cpu", "cuda"),
            "matmul": ("auto", "cusparselt", "cuda", "dense"),
            "optimizer": ("separate", "fused"),
            "shard": ("ddp", "fsdp2"),
        }
        check_choices(self, "impl.", choices)
        if self.offload and self.shard != "fsdp2":
            raise ValueError(
                f"impl.offload=true with impl.shard={self.shard}: only sharded weights can be "
                "offloaded; set impl.shard=fsdp2"
            )
        if self.cuda_graphs not in (True, False, "auto"):
            raise ValueError(
                f"impl.cuda_graphs={self.cuda_graphs}; choose one of auto, true, false"
            )
        unknown = set(self.loggers) - {"tensorboard", "wandb"}
        if unknown:
            raise ValueError(f"impl.loggers={sorted(unknown)}; choose from tensorboard, wandb")
        threads = (0, 1024)
        check_bounds(self, "impl.", threads=threads, workers=threads)
        check_bounds(self, "impl.", checkpoint_every=_REAL, micro_batch=_COUNT)
