"""From hydra's overrides to one frozen, typed configuration, and back to a run directory.

The config is composed and resolved once; every group becomes a frozen dataclass, so a key that
does not exist or a value of the wrong kind stops the run before any work. No code beyond this
file sees a `DictConfig`.

`train` and the other groups say what is computed; `impl` may change nothing but the speed.
So the identity of a run is a hash of everything except `impl` and paths, and its directory is a
function of that alone: never of the clock, never of the machine.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import methods
from experiments.data import DataConfig
from experiments.errors import Terminated, UserError, raise_on_sigterm
from experiments.initial import HFConfig, load_weights, source_hash
from models.gpt2 import GPT, GPTConfig
from models.hf import CausalLM


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """What a run computes. Batches are in sequences, periods in optimizer steps.

    batch_size: sequences per optimizer step, over all ranks and micro-batches.
    learning_rate: peak; linear warm-up from 0, cosine to `min_learning_rate` at `steps`.
    grad_clip: global norm; 0 = off. eval_sequences: validation windows per evaluation.
    """

    steps: int
    batch_size: int
    learning_rate: float
    min_learning_rate: float
    warmup_steps: int
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    grad_clip: float = 1.0
    log_every: int = 10
    eval_every: int = 50
    eval_sequences: int = 64

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))  # omegaconf makes a list of it
        for name in ("steps", "batch_size", "log_every", "eval_every", "eval_sequences"):
            if getattr(self, name) < 1:
                raise ValueError(f"train.{name}={getattr(self, name)}; it must be at least 1")
        for name in ("learning_rate", "min_learning_rate", "eps", "weight_decay", "grad_clip"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"train.{name}={getattr(self, name)}; it must not be negative")
        if self.min_learning_rate > self.learning_rate:
            raise ValueError(
                f"train.min_learning_rate={self.min_learning_rate} is above "
                f"train.learning_rate={self.learning_rate}"
            )
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"train.betas={list(self.betas)}; it must be two numbers in [0, 1)")
        if not 0 <= self.warmup_steps <= self.steps:
            raise ValueError(
                f"train.warmup_steps={self.warmup_steps} does not fit train.steps={self.steps}; "
                f"set train.warmup_steps to at most {self.steps}"
            )


@dataclass(frozen=True, kw_only=True)
class ImplConfig:
    """How fast it runs, and where.

    device: `auto`, `cpu` or `cuda`. dtype: `fp32`, `bf16`, `fp16` (autocast; fp16 with a
    gradient scaler). matmul: backend of products with a 2:4 operand (`Method.accelerate`); with a
    method's FP8 it decides between simulated and real products, which round differently.
    micro_batch: sequences per rank and forward pass; null = all of a step.
    checkpoint_every: optimizer steps; 0 = never. threads: of the CPU; 0 = torch's
    choice. loggers: of `tensorboard`, `wandb`, beside the JSONL file.
    """

    device: str = "auto"
    dtype: str = "fp32"
    compile: bool = False
    micro_batch: int | None = None
    backend: str = "auto"
    matmul: str = "auto"
    checkpoint_every: int = 50
    threads: int = 0
    loggers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "loggers", tuple(self.loggers))
        for name, choices in {
            "device": ("auto", "cpu", "cuda"),
            "dtype": ("fp32", "bf16", "fp16"),
            "backend": ("auto", "naive", "triton", "cuda"),
            "matmul": ("auto", "cusparselt", "dense"),
        }.items():
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"impl.{name}={getattr(self, name)}; choose one of {', '.join(choices)}"
                )
        unknown = set(self.loggers) - {"tensorboard", "wandb"}
        if unknown:
            raise ValueError(f"impl.loggers={sorted(unknown)}; choose of tensorboard, wandb")
        for name in ("checkpoint_every", "threads"):
            if getattr(self, name) < 0:
                raise ValueError(f"impl.{name}={getattr(self, name)}; it must not be negative")
        if self.micro_batch is not None and self.micro_batch < 1:
            raise ValueError(f"impl.micro_batch={self.micro_batch}; it must be at least 1")


@dataclass(frozen=True)
class RunConfig:
    """One run. `method_options` are the fields of the method's own `Config`.

    init: directory of a finished run whose weights this one starts from.
    """

    seed: int
    tier: str
    runs: Path
    init: Path | None
    model_name: str
    model: GPTConfig | HFConfig
    data: DataConfig
    method: str
    method_options: methods.base.Config
    train: TrainConfig
    impl: ImplConfig

    def identity(self) -> dict[str, Any]:
        """Everything that the result depends on, as plain values."""
        data = dataclasses.asdict(self.data)
        del data["root"], data["source"]  # where the text comes from; its tokens are named here
        data |= {"tokenizer": self.data.tokenizer_kind, "corpus": self.data.directory.name}
        model = dataclasses.asdict(self.model)
        if isinstance(self.model, HFConfig):
            del model["path"]
            model["weights"] = self.model.fingerprint
        identity = {
            "seed": self.seed,
            "model": {"name": self.model_name, **model},
            "data": data,
            "method": {"name": self.method, **dataclasses.asdict(self.method_options)},
            "train": dataclasses.asdict(self.train),
        }
        if self.init is not None:
            identity["init"] = source_hash(self.init)
        return identity

    def digest(self) -> str:
        """Hash of `identity()`, 16 hex digits."""
        return _digest(self.identity())

    def directory(self) -> Path:
        """`<runs>/<model>-<data>/<method>-<hash without the seed>/seed<seed>`."""
        family = self.identity()
        if family["method"]["seed"] == family.pop("seed"):
            del family["method"]["seed"]
        name = f"{self.method}-{_digest(family)[:8]}"
        return self.runs / f"{self.model_name}-{self.data.name}" / name / f"seed{self.seed}"

    def as_dict(self) -> dict[str, Any]:
        """The whole resolved config as plain values, for `config.json` and `result.json`."""
        identity = self.identity()
        model = {**identity["model"], **dataclasses.asdict(self.model)}
        paths = {"runs": str(self.runs), "data": dataclasses.asdict(self.data), "model": model}
        return {
            **identity,
            **paths,
            "tier": self.tier,
            "impl": dataclasses.asdict(self.impl),
        }

    def build_model(self) -> GPT | CausalLM:
        """The model with its first weights, on the CPU; random ones from torch's generator.

        Raises:
            UserError: the checkpoint or run that it starts from does not fit.
        """
        model = self.model.build() if isinstance(self.model, HFConfig) else GPT(self.model)
        if self.init is not None:
            load_weights(model, self.init)
        return model

    def build_method(self) -> methods.Method:
        return importlib.import_module(f"methods.{self.method}").Method(self.method_options)


@dataclass(frozen=True, kw_only=True)
class _Top:
    seed: int
    tier: str
    runs: str
    init: str | None

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ValueError(f"seed={self.seed}; it must not be negative")


def _digest(value: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def load(overrides: list[str] | None = None, config_name: str = "pretrain") -> RunConfig:
    """Compose `experiments/conf/<config_name>.yaml` with hydra overrides.

    Raises:
        UserError: an override that does not fit, in one line.
    """
    from hydra import compose, initialize_config_module

    with one_line_errors(), initialize_config_module("experiments.conf", version_base="1.3"):
        return freeze(compose(config_name, overrides=overrides or []))


def freeze(composed: Any) -> RunConfig:
    """The typed form of a composed `DictConfig`."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    groups = OmegaConf.to_container(composed, resolve=True)
    assert isinstance(groups, dict)

    def typed(schema: type, group: str, values: dict[str, Any]) -> Any:
        known = {f.name for f in dataclasses.fields(schema)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise UserError(
                f"{group} has no key {', '.join(unknown)}; it takes {', '.join(sorted(known))}"
            )
        try:
            return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), values))
        except OmegaConfBaseException as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"{group}.{error.full_key}: {reason}") from error

    method, model = dict(groups["method"]), dict(groups["model"])
    for group, values in (("method", method), ("model", model)):
        if "name" not in values:
            raise UserError(f"{group}: this file is a part of others and no {group} of its own")
    method_name, model_name = str(method.pop("name")), str(model.pop("name"))
    if method_name not in methods.available():
        choices = ", ".join(methods.available())
        raise UserError(f"no method {method_name!r}; choose one of {choices}")
    schema = importlib.import_module(f"methods.{method_name}").Config
    train = typed(TrainConfig, "train", groups["train"])  # first: other groups refer to it
    fields = [f.name for f in dataclasses.fields(_Top)]
    run = typed(_Top, "the config", {key: groups[key] for key in fields})
    shape = typed(HFConfig if "path" in model else GPTConfig, "model", model)
    data = dict(groups["data"])
    if isinstance(shape, HFConfig) and shape.has_tokenizer:
        data["tokenizer"] = str(shape.folder)  # no other tokens mean anything to its weights
    return RunConfig(
        seed=run.seed,
        tier=run.tier,
        runs=Path(run.runs),
        init=None if run.init is None else Path(run.init),
        model_name=model_name,
        model=shape,
        data=typed(DataConfig, "data", data),
        method=method_name,
        method_options=typed(schema, "method", method),
        train=train,
        impl=typed(ImplConfig, "impl", groups["impl"]),
    )


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn the errors of hydra and omegaconf, and a dataclass's ValueError, into a `UserError`."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        yield
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        parts = [str(error)]
        if isinstance(error.__cause__, OmegaConfBaseException):
            parts.append(str(error.__cause__))
        lines = [line.strip() for line in "\n".join(parts).splitlines()]
        kept = [x for x in dict.fromkeys(lines) if x and not x.startswith(_NOISE)]
        raise UserError("; ".join(kept)) from error


# Lines of hydra's messages that tell a user nothing.
_NOISE = ("full_key", "object_type", "Config search path", "provider=", "_common")


def driver(
    config_name: str, typed: Callable[[Any], Any] = freeze
) -> Callable[[Callable[[Any], None]], Callable[[], None]]:
    """Make `main(config)` a command line: hydra overrides, `-m` sweeps, errors in one line.

    Args:
        typed: makes the config of `main` out of the composed one.
    """

    def decorate(main: Callable[[Any], None]) -> Callable[[], None]:
        @functools.wraps(main)
        def command() -> None:
            import hydra

            def task(composed: Any) -> None:
                with exit_with_one_line():
                    with one_line_errors():
                        config = typed(composed)
                    main(config)

            # Hydra then raises its errors instead of printing them over several lines.
            os.environ["HYDRA_FULL_ERROR"] = "1"
            with exit_with_one_line(), one_line_errors():
                hydra.main(
                    config_path="pkg://experiments.conf",
                    config_name=config_name,
                    version_base="1.3",
                )(task)()

        return command

    return decorate


@contextmanager
def exit_with_one_line() -> Iterator[None]:
    """End the process with one line on a `UserError` or a file that cannot be written (status 1),
    on an interrupt (130) or when it is told to terminate (143).
    """
    raise_on_sigterm()
    try:
        yield
    except UserError as error:
        sys.exit(f"error: {' '.join(str(error).split())}")
    except OSError as error:
        if error.filename is None:
            raise
        sys.exit(f"error: {error.filename}: {error.strerror}")
    except (KeyboardInterrupt, Terminated) as stop:
        what, status = ("terminated", 143) if isinstance(stop, Terminated) else ("interrupted", 130)
        print(f"{what}; the same command goes on from the last checkpoint", file=sys.stderr)
        sys.exit(status)
