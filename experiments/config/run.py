"""From hydra's overrides to one frozen, typed configuration, and back to a run directory.

The config is composed and resolved once; every group becomes a frozen dataclass, so a key that
does not exist or a value of the wrong kind stops the run before any work. No code beyond this
file sees a `DictConfig`.

`train` and the other groups say what is computed; `impl` may change nothing but the speed.
So the identity of a run is a hash of everything except `impl` and paths, and its directory is
found by that alone: never by the clock, never by the machine.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

import methods
from experiments.config import run_names
from experiments.config.command_line import help_text, take_texts
from experiments.config.initial import HFConfig, load_weights, source_hash, weight_files
from experiments.config.settings import ImplConfig, TrainConfig, check_name, check_seed, fit_warmup
from experiments.data.corpus import DataConfig, check_fits, load_tokens
from experiments.data.mlm import MaskedText, MLMConfig
from experiments.data.source import Source
from experiments.data.text import CausalText
from experiments.images.dataset import ImageConfig
from experiments.images.multicrop import MultiCrops
from experiments.images.source import ImageSource
from experiments.support import memory
from experiments.support.errors import Terminated, UserError, raise_on_sigterm
from methods.nn import base, distillation
from models.base import Model
from models.bert import BertConfig, BertLM
from models.dino import DINO, DinoConfig
from models.gpt2 import GPT, GPTConfig
from models.vit import ViT, ViTConfig

T = TypeVar("T")
ModelConfig = GPTConfig | BertConfig | ViTConfig | HFConfig

# What a model's `name` stands for: its shape, the kind of data it takes, and where to find some.
FAMILIES: dict[str, tuple[type, type, str]] = {
    "gpt2": (GPTConfig, DataConfig, "causal text: data=stdlib or openwebtext"),
    "bert": (BertConfig, MLMConfig, "masked text: data=stdlib_mlm, c4_mlm or wikipedia_mlm"),
    "vit": (ViTConfig, ImageConfig, "images: data=digits, fashion_mnist or imagenet"),
    "hf": (HFConfig, DataConfig, "causal text: data=stdlib or openwebtext"),
}


@dataclass(frozen=True)
class RunConfig:
    """One run. `method_options` are the fields of the method's own `Config`.

    init: directory of a finished run whose weights this one starts from, or of a checkpoint of
        transformers. dino: set where the model teaches itself (`experiments.dino`).
    notes: sentences on what was changed so that the parts fit together.
    command: the line that makes this run, if it was composed from one.
    """

    seed: int
    tier: str
    runs: Path
    init: Path | None
    model_name: str
    model: ModelConfig
    data: DataConfig | ImageConfig
    method: str
    method_options: base.Config
    train: TrainConfig
    impl: ImplConfig
    dino: DinoConfig | None = None
    notes: tuple[str, ...] = ()
    command: str | None = None

    def identity(self) -> dict[str, Any]:
        """Everything that the result depends on, as plain values."""
        model = dataclasses.asdict(self.model)
        if isinstance(self.model, HFConfig):
            del model["path"]
            model["weights"] = self.model.fingerprint
        identity = {
            "seed": self.seed,
            "model": {"name": self.model_name, **model},
            "data": self.data.identity(),
            "method": {"name": self.method, **dataclasses.asdict(self.method_options)},
            "train": dataclasses.asdict(self.train),
        }
        if self.dino is not None:
            identity["dino"] = dataclasses.asdict(self.dino)
        if self.init is not None:
            identity["init"] = source_hash(self.init)
        return identity

    def init_weights(self) -> dict[str, str] | None:
        """Hashes of the weights that it starts from: a run may have been made again."""
        return None if self.init is None else weight_files(self.init, "sparse")

    def digest(self) -> str:
        """Hash of `identity()`, 16 hex digits."""
        return digest(self.identity())

    def directory(self) -> Path:
        """`<runs>/<model>-<data>/<method>-<tag>-<hash without seed>/seed<seed>`; see run_names."""
        family = self.identity()
        method, model, train = (dict(family[group]) for group in ("method", "model", "train"))
        if family["method"]["seed"] == family.pop("seed"):
            del family["method"]["seed"]
        folder = self.model_name if self.dino is None else f"dino_{self.model_name}"
        return run_names.find(
            self.runs / f"{folder}-{self.data.name}",
            digest(family)[:8],
            self.seed,
            lambda: run_names.name(method, model, train, "" if self.init is None else "init"),
        )

    def as_dict(self) -> dict[str, Any]:
        """The whole resolved config as plain values, for `config.json` and `result.json`."""
        identity = self.identity()
        model = {**identity["model"], **dataclasses.asdict(self.model)}
        if isinstance(self.model, HFConfig):
            model["path"] = self.model.pinned
        paths = {"runs": str(self.runs), "data": dataclasses.asdict(self.data), "model": model}
        return {
            **identity,
            **paths,
            "tier": self.tier,
            "impl": dataclasses.asdict(self.impl),
        }

    def build_model(self) -> Model:
        """The model with its first weights, on the CPU; random ones from torch's generator.

        Raises:
            UserError: the checkpoint or run that it starts from does not fit.
        """
        model = build_model(self.model)
        if self.init is not None:
            load_weights(model, self.init)
        if self.dino is None:
            return model
        assert isinstance(model, ViT)
        return DINO(model, self.dino)

    def build_method(self) -> methods.Method:
        return methods.module(self.method).Method(self.method_options)

    def open_source(self, model: nn.Module) -> Source:
        """The data, as samples of the shape that `model` takes.

        Raises:
            UserError: they are missing, damaged or do not fit the model.
        """
        if isinstance(self.data, ImageConfig):
            assert isinstance(self.model, ViTConfig)
            batch, workers = self.train.batch_size, self.impl.workers
            device = next(model.parameters()).device
            if self.dino is None:
                return ImageSource(self.data, self.model, self.seed, batch, workers, device)
            return MultiCrops(self.data, self.dino, self.model, self.seed, batch, workers, device)
        shape: Any = model if isinstance(self.model, HFConfig) else self.model
        corpus = load_tokens(self.data, self.seed)
        if isinstance(self.data, MLMConfig):
            return MaskedText(corpus, self.data, shape)
        check_fits(corpus, shape.vocab_size, shape.block_size)
        return CausalText(corpus, shape.block_size)


def build_model(shape: ModelConfig) -> Model:
    """A plain model of this shape: random weights, or those of the checkpoint that it names.

    Raises:
        UserError: its weights are larger than the memory.
    """
    if isinstance(shape, HFConfig):
        return shape.build()
    kind: Any = {GPTConfig: GPT, BertConfig: BertLM, ViTConfig: ViT}[type(shape)]
    memory.require(
        f"the weights of a {kind.__name__} of this shape",
        4 * _parameters(kind, shape),
        torch.device("cpu"),
        "choose a smaller model.*",
    )
    return kind(shape)


def _parameters(kind: type[nn.Module], shape: Any) -> float:
    """How many parameters a model of this shape would have, by those of one and of two layers."""
    depth = "depth" if isinstance(shape, ViTConfig) else "n_layer"
    counts = []
    for layers in (1, 2):
        try:
            with torch.device("meta"):
                model = kind(dataclasses.replace(shape, **{depth: layers}))
        except RuntimeError:  # more numbers in one matrix than torch can count
            return 2.0**63
        counts.append(sum(parameter.numel() for parameter in model.parameters()))
    return counts[0] + (getattr(shape, depth) - 1) * (counts[1] - counts[0])


@dataclass(frozen=True, kw_only=True)
class _Top:
    seed: int
    tier: str
    runs: str
    init: str | None

    def __post_init__(self) -> None:
        check_seed(self.seed)


def digest(value: dict[str, Any]) -> str:
    """Hash of plain values, 16 hex digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def load(overrides: list[str] | None = None, config_name: str = "pretrain") -> RunConfig:
    """`composed` of `experiments/conf/<config_name>.yaml`, as a run."""
    config = composed(config_name, freeze, overrides)
    return dataclasses.replace(config, command=_command(config_name, overrides or []))


def _command(config_name: str, overrides: Sequence[str]) -> str:
    return shlex.join(["python", "-m", f"experiments.{config_name}", *overrides])


def composed(config_name: str, typed: Callable[[Any], T], overrides: list[str] | None = None) -> T:
    """Compose `experiments/conf/<config_name>.yaml` with hydra overrides, in its typed form.

    Raises:
        UserError: an override that does not fit, in one line.
    """
    from hydra import compose, initialize_config_module

    context = initialize_config_module("experiments.conf", version_base="1.3")
    with one_line_errors(config_name), context:
        return typed(compose(config_name, overrides=overrides or []))


def freeze(composed: Any) -> RunConfig:
    """The typed form of a composed `DictConfig`."""
    from hydra.core.hydra_config import HydraConfig

    fields = [f.name for f in dataclasses.fields(_Top)]
    groups = plain(composed, "data", "impl", "method", "model", "train", *fields)
    method, model = dict(groups["method"]), dict(groups["model"])
    for group, values in (("method", method), ("model", model)):
        if "name" not in values:
            raise UserError(f"{group}: this file is a part of others and no {group} of its own")
    method_name, model_name = str(method.pop("name")), str(model.pop("name"))
    schema = methods.module(method_name).Config
    if "dino" in groups and not model_name.startswith("vit"):
        raise UserError(f"self-distillation is for a ViT, not for {model_name}; see model=vit_nano")
    settings, changed = fit_warmup(groups["train"])
    train = typed(TrainConfig, "train", settings)  # first: other groups refer to it
    run = typed(_Top, "the config", {key: groups[key] for key in fields})
    check_name("model.name", model_name)
    family = "hf" if "path" in model else model_name.partition("_")[0]
    if family not in FAMILIES:
        raise UserError(f"model.name={model_name}; choose one of {', '.join(FAMILIES)}")
    model_schema, data_schema, takes = FAMILIES[family]
    shape = typed(model_schema, "model", model)
    data = dict(groups["data"])
    kind = "images" if "image_size" in data else data.get("objective", "causal")
    if kind != {"bert": "mlm", "vit": "images"}.get(family, "causal"):
        raise UserError(
            f"data={data.get('name')} does not fit model={model_name}, which takes {takes}"
        )
    if isinstance(shape, HFConfig) and shape.has_tokenizer:
        data["tokenizer"] = str(shape.folder)  # no other tokens mean anything to its weights
    config = RunConfig(
        seed=run.seed,
        tier=run.tier,
        runs=Path(run.runs),
        init=None if run.init is None else Path(run.init),
        model_name=model_name,
        model=shape,
        data=typed(data_schema, "data", data),
        method=method_name,
        method_options=typed(schema, "method", method),
        train=train,
        impl=typed(ImplConfig, "impl", groups["impl"]),
        dino=typed(DinoConfig, "dino", groups["dino"]) if "dino" in groups else None,
        notes=changed,
    )
    if HydraConfig.initialized():
        line = HydraConfig.get()
        assert line.job.config_name is not None
        command = _command(line.job.config_name, line.overrides.task)
        config = dataclasses.replace(config, command=command)
    _check_together(config)
    return config


def plain(composed: Any, *needed: str) -> dict[str, Any]:
    """A composed `DictConfig` as plain values.

    Raises:
        UserError: one of the keys that are `needed` is gone.
    """
    from omegaconf import OmegaConf

    values: Any = OmegaConf.to_container(composed, resolve=True)
    if missing := [key for key in needed if key not in values]:
        raise UserError(f"the config has no {missing[0]}: leave ~{missing[0]} out")
    return values


def _check_together(config: RunConfig) -> None:
    """UserError for parts that cannot work with each other."""
    options = config.method_options
    distils = isinstance(options, distillation.Config) and options.kl_weight > 0
    if distils and (config.dino is not None or isinstance(config.model, BertConfig)):
        kind = "its own teacher" if config.dino is not None else "logits of the hidden tokens alone"
        raise UserError(
            f"method={config.method} distils from the model as it was, but model="
            f"{config.model_name} has {kind} here; set method.kl_weight=0 method.task_weight=1"
        )
    if config.train.fp8_samples is not None and not config.build_method().quantizes:
        raise UserError(
            f"train.fp8_samples={config.train.fp8_samples}, but method={config.method} has no FP8 "
            "products here; set train.fp8_samples=null"
        )
    if config.dino is not None and config.train.ema:
        raise UserError("train.ema with self-distillation: its teacher is the average; set it to 0")


def typed(schema: type, group: str, values: Any) -> Any:
    """The dataclass `schema` with these values, a dict.

    Raises:
        UserError: a key that it does not have, or a value of the wrong kind.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

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


@contextmanager
def one_line_errors(config_name: str | None = None) -> Iterator[None]:
    """Turn the errors of hydra and omegaconf, and a dataclass's ValueError, into a `UserError`.

    config_name: of the primary config, in which a key that does not exist is looked for.
    """
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        yield
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        parts = [str(error)]
        if isinstance(error.__cause__, OmegaConfBaseException):
            parts.append(str(error.__cause__))
        lines = [line.strip().rstrip(".") for line in "\n".join(parts).splitlines()]
        kept = [x for x in dict.fromkeys(lines) if x and not x.startswith(_NOISE)]
        text = "; ".join(kept)
        if found := re.match(r"Could not override '([^']+)'", text):
            text = f"there is no {found[1]} here{_similar(found[1], config_name)}"
        raise UserError(text) from error


def _similar(key: str, config_name: str | None) -> str:
    """The keys of a primary config that may have been meant, as the end of a sentence."""
    if config_name is None:
        return ""
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf

    def leaves(node: Any, prefix: str) -> Iterator[str]:
        if not OmegaConf.is_dict(node):
            yield prefix.removesuffix(".")
            return
        for name in node:
            yield from leaves(node._get_node(name), f"{prefix}{name}.")

    with initialize_config_module("experiments.conf", version_base="1.3"):
        known = [*leaves(compose(config_name), "")]
    last = {name.rpartition(".")[2] for name in known}
    meant = difflib.get_close_matches(key.rpartition(".")[2], last, 1, 0.7)
    found = [name for name in known if meant and name.rpartition(".")[2] == meant[0]]
    found = [name for name in found if name != key]  # another choice of a group has it
    return f"; {' or '.join(found)} may be meant" if found else ""


# Lines of hydra's messages that tell a user nothing.
_NOISE = (
    *("To append to your config", "Key '", "full_key", "object_type", "Config search path"),
    *("provider=", "_common", "_distillation"),
)


def driver(
    config_name: str,
    typed: Callable[..., Any] = freeze,
    after_stop: str = "goes on from the last checkpoint",
    texts: tuple[str, ...] = (),
    groups: tuple[str, ...] = (),
    after_sweep: Callable[[list[Any]], None] | None = None,
) -> Callable[[Callable[[Any], Any]], Callable[[], None]]:
    """Make `main(config)` a command line: hydra overrides, `-m` sweeps, errors in one line.

    Args:
        typed: makes the config of `main` out of the composed one, and of `texts` by their names.
        after_stop: what the same command does after an interrupt.
        texts: arguments that are taken as they are typed and never read by hydra.
        groups: those of the config that `main` reads and `--help` shows; () = all, and what is in
            none.
        after_sweep: called with what `main` returned for each run of a sweep that ended well,
            on rank 0.
    """

    def decorate(main: Callable[[Any], Any]) -> Callable[[], None]:
        @functools.wraps(main)
        def command() -> None:
            import hydra

            returned: list[Any] = []

            def task(composed: Any) -> None:
                with exit_with_one_line(after_stop):
                    with one_line_errors():
                        config = typed(composed, **given)
                    try:
                        returned.append(main(config))
                    except ValueError as error:  # our own, not one of the arguments
                        raise RuntimeError(str(error)) from error

            # Hydra then raises its errors instead of printing them over several lines.
            os.environ["HYDRA_FULL_ERROR"] = "1"
            with exit_with_one_line(after_stop), one_line_errors(config_name):
                sys.argv[1:], given = take_texts(sys.argv[1:], texts)
                if {"-h", "--help"} & {*sys.argv[1:]}:
                    overrides = [a for a in sys.argv[1:] if not a.startswith("-")]
                    own = main.__globals__
                    module, says = own["__spec__"].name, own["__doc__"]
                    print(help_text(module, says, config_name, overrides, groups))
                    return
                hydra.main(
                    config_path="pkg://experiments.conf",
                    config_name=config_name,
                    version_base="1.3",
                )(task)()
                is_main = not int(os.environ.get("RANK", "0"))
                if after_sweep is not None and len(returned) > 1 and is_main:
                    after_sweep(returned)

        return command

    return decorate


@contextmanager
def exit_with_one_line(after_stop: str) -> Iterator[None]:
    """End the process with one line on a `UserError`, a file that cannot be written or want of
    memory (status 1), on an interrupt (130) or when it is told to terminate (143).
    """
    raise_on_sigterm()
    try:
        yield
    except UserError as error:
        sys.exit("\n  ".join([f"error: {' '.join(str(error).split())}", *error.choices]))
    except OSError as error:
        if error.errno is None:
            raise
        # A full disk, say, comes without a name.
        sys.exit(f"error: {error.filename or 'a file'}: {error.strerror}")
    except (MemoryError, RuntimeError) as error:
        if not memory.is_exhausted(error):
            raise
        reason = str(error).strip().splitlines() or ["MemoryError"]
        sys.exit(
            f"error: out of memory ({reason[0]}); set a smaller impl.micro_batch, batch or model"
        )
    except (KeyboardInterrupt, Terminated) as stop:
        what, status = ("terminated", 143) if isinstance(stop, Terminated) else ("interrupted", 130)
        print(f"{what}; the same command {after_stop}", file=sys.stderr)
        sys.exit(status)
