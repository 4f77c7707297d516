"""Composes hydra's overrides into one frozen, typed configuration, and names its run directory.

The config is composed and resolved once; every group becomes a frozen dataclass, so a key that
does not exist or a value of the wrong kind stops the run before any work. No code beyond
this folder sees a `DictConfig`.

`train` and the other groups say what is computed; `impl` may change only the speed. The identity of
a run is therefore a hash of everything except `impl` and paths. Its directory depends on this hash
alone, not on the time or the machine.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import torch
from torch import nn

import methods
from experiments.config.compose import composed, plain
from experiments.config.initial import HFConfig, load_weights, source_hash, weight_files
from experiments.config.settings import ImplConfig, TrainConfig, fit_warmup
from experiments.config.yaml_files import tag
from experiments.data.corpus import CausalText, check_fits, load_tokens
from experiments.data.manifest import DataConfig
from experiments.data.mlm import MaskedText, MLMConfig
from experiments.data.pairs import TranslationPairs
from experiments.data.parallel import PairsConfig
from experiments.data.source import Source
from experiments.images.dataset import ImageConfig
from experiments.images.multicrop import MultiCrops
from experiments.images.source import ImageSource
from experiments.support.errors import UserError
from experiments.support.names import (
    SEEDS,
    Identified,
    check_bounds,
    check_name,
    digest,
    identity_of,
)
from experiments.support.typed import typed
from methods.nn import base, distillation
from models.base import Model
from models.bert import BertConfig, BertLM
from models.dino import DINO, DinoConfig
from models.gpt2 import GPT, GPTConfig
from models.transformer import Transformer, TransformerConfig
from models.vit import ViT, ViTConfig

C = TypeVar("C")
ModelConfig = GPTConfig | BertConfig | TransformerConfig | ViTConfig | HFConfig

# The config classes of model and data by the first part of a model's `name`, and what fits.
FAMILIES: dict[str, tuple[type, type, str]] = {
    "gpt2": (GPTConfig, DataConfig, "causal text: data=stdlib or openwebtext"),
    "bert": (BertConfig, MLMConfig, "masked text: data=stdlib_mlm, c4_mlm or wikipedia_mlm"),
    "transformer": (TransformerConfig, PairsConfig, "pairs: data=numbers or wmt14_en_de"),
    "vit": (ViTConfig, ImageConfig, "images: data=digits, fashion_mnist or imagenet"),
    "hf": (HFConfig, DataConfig, "causal text: data=stdlib or openwebtext"),
}

KINDS: dict[type, Any] = {
    GPTConfig: GPT, BertConfig: BertLM, TransformerConfig: Transformer, ViTConfig: ViT
}  # fmt: skip


@dataclass(frozen=True)
class Run(Generic[C]):
    """A training: its config, the hash of that (`id`) and the run directory."""

    config: C
    id: str
    directory: Path


def resolve(config: C) -> Run[C]:
    """A config with its hash and its directory, which take time to find."""
    found: Any = config
    return Run(config, found.digest(), found.directory())


@dataclass(frozen=True, kw_only=True)
class RunConfig(Identified):
    """A run's whole configuration. `method_options`: the method's own `Config`.

    init: the directory of a finished run, or of a transformers checkpoint, whose weights this run
        starts from.
    dino: settings of self-distillation (`experiments.dino`), else None.
    notes: sentences about settings that were changed to fit together.
    command: the command line that makes this run, if it was composed from one.
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

    def __post_init__(self) -> None:
        check_bounds(self, "", seed=SEEDS)

    def identity(self) -> dict[str, Any]:
        """All that the result depends on and that is no default, as plain values."""
        model, method = identity_of(self.model), identity_of(self.method_options)
        if isinstance(self.model, HFConfig):
            del model["path"]
            model["weights"] = self.model.fingerprint
        method.pop("seed", None)
        if self.method_options.seed != self.seed:
            method["seed"] = self.method_options.seed
        identity = {
            "seed": self.seed,
            "model": {"name": self.model_name, **model},
            "data": self.data.identity(),
            "method": {"name": self.method, **method},
            "train": identity_of(self.train),
        }
        if self.dino is not None:
            identity["dino"] = identity_of(self.dino)
        if self.init is not None:
            identity["init"] = source_hash(self.init)
        return identity

    def init_weights(self) -> dict[str, str] | None:
        """SHA-256 of the weight files that the run starts from, by name; None for random weights.
        They are recorded because a run of the same config may be made again with other weights."""
        return None if self.init is None else weight_files(self.init, "sparse")

    def with_seed(self, seed: int) -> Self:
        """The config that the same overrides compose with another `seed`, without a command. The
        method's seed follows the run's, unless it was set to a different value."""
        options = self.method_options
        if options.seed == self.seed:
            options = dataclasses.replace(options, seed=seed)
        return dataclasses.replace(self, seed=seed, method_options=options, command=None)

    def with_command(self, line: str) -> Self:
        """The same config, which records that `line` makes it."""
        return dataclasses.replace(self, command=line)

    def directory(self) -> Path:
        """`<runs>/<model>-<data>/<tag>-<hash without seed>/seed<seed>`. The readable tag
        (`yaml_files.tag`) does not identify a run: one with this hash is found under any."""
        values, family = self.as_dict(), self.identity()
        del family["seed"]
        values["model"].pop("path", None)
        folder = self.model_name if self.dino is None else f"dino_{self.model_name}"
        parent, seed = self.runs / f"{folder}-{self.data.name}", f"seed{self.seed}"
        known = digest(family)[:8]
        there = sorted(parent.glob(f"*-{known}"), key=lambda p: (not (p / seed).exists(), p))
        if there:  # of several, one that has this seed
            return there[0] / seed
        groups = {name: values[name] for name in ("method", "model", "train")}
        return parent / f"{tag(groups, '' if self.init is None else 'init')}-{known}" / seed

    def as_dict(self) -> dict[str, Any]:
        """The whole resolved config as plain values, for `config.json` and `result.json`."""
        identity = self.identity()
        model = {**identity["model"], **dataclasses.asdict(self.model)}
        if isinstance(self.model, HFConfig):
            model["path"] = self.model.pinned
        groups = {"data": self.data, "train": self.train, "impl": self.impl, "dino": self.dino}
        return {
            **identity,
            **{name: dataclasses.asdict(group) for name, group in groups.items() if group},
            "model": model,
            "method": {"name": self.method, **dataclasses.asdict(self.method_options)},
            "runs": str(self.runs),
            "tier": self.tier,
        }

    def build_model(self) -> Model:
        """The model with its initial weights, on the CPU; random ones are torch's generator's."""
        model = build_model(self.model)
        if self.init is not None:
            load_weights(model, self.init)
        if self.dino is None:
            return model
        assert isinstance(model, ViT)
        return DINO(model, self.dino)

    def build_shape(self) -> Model:
        """The model of `build_model` on the meta device, where its tensors take no memory."""
        with torch.device("meta"):
            if isinstance(self.model, HFConfig):
                return self.model.build(weights=False)
            return self.build_model()

    def build_method(self) -> methods.Method:
        """The method with its options, not attached to a model."""
        return methods.module(self.method).Method(self.method_options)

    def open_source(self, model: nn.Module, device: torch.device | None = None) -> Source:
        """The data set as batches for `model`. device: where that will run, by default its own."""
        if isinstance(self.data, ImageConfig):
            assert isinstance(self.model, ViTConfig)
            batch, workers = self.train.batch_size, self.impl.workers
            device = device or next(model.parameters()).device
            if self.dino is None:
                return ImageSource(self.data, self.model, self.seed, batch, workers, device)
            return MultiCrops(self.data, self.dino, self.model, self.seed, batch, workers, device)
        shape: Any = model if isinstance(self.model, HFConfig) else self.model
        corpus = load_tokens(self.data, self.seed)
        if isinstance(self.data, MLMConfig):
            return MaskedText(corpus, self.data, shape)
        if isinstance(self.data, PairsConfig):
            return TranslationPairs(corpus, self.data, shape, self.train.batch_size)
        check_fits(corpus, shape.vocab_size, shape.block_size)
        return CausalText(corpus, shape.block_size)

    def open_other(self, own: Source, model: nn.Module, device: torch.device) -> Source | None:
        """The corpus `data.other`, if there is one, as `open_source` opens the run's `own`."""
        if not isinstance(self.data, DataConfig) or self.data.other_corpus is None:
            return None
        other = dataclasses.replace(self, data=self.data.other_corpus).open_source(model, device)
        first, second = (of.describe()["tokenizer"]["sha256"] for of in (own, other))
        if first != second:
            raise UserError(
                f"data.other={self.data.other} has a tokenizer of its own, so the model does not "
                f"know its tokens: prepare both with data.tokenizer={self.data.directory}"
            )
        return other


def build_model(shape: ModelConfig) -> Model:
    """A plain model of this shape, with random weights or those of its checkpoint."""
    return shape.build() if isinstance(shape, HFConfig) else KINDS[type(shape)](shape)


def load(overrides: list[str] | None = None, config_name: str = "pretrain") -> RunConfig:
    """The run that `experiments/conf/<config_name>.yaml` and hydra overrides compose."""
    return composed(config_name, freeze, overrides or ())


def freeze(composition: Any) -> RunConfig:
    """The `RunConfig` of a composed `DictConfig`."""
    as_given = ("seed", "tier", "runs", "init", "impl")
    groups = plain(composition, "data", "method", "model", "train", *as_given)
    method, model = dict(groups["method"]), dict(groups["model"])
    for group, values in (("method", method), ("model", model)):
        if "name" not in values:
            raise UserError(f"{group}: this file is only a part of others, not a complete {group}")
    method_name, model_name = str(method.pop("name")), str(model.pop("name"))
    schema = methods.module(method_name).Config
    if "dino" in groups and not model_name.startswith("vit"):
        raise UserError(f"self-distillation is for a ViT, not for {model_name}; see model=vit_nano")
    settings, changed = fit_warmup(groups["train"])
    train = typed(TrainConfig, "train", settings)  # first: other groups refer to it
    check_name("model.name", model_name)
    family = "hf" if "path" in model else model_name.partition("_")[0]
    if family not in FAMILIES:
        raise UserError(f"model.name={model_name}; choose one of {', '.join(FAMILIES)}")
    model_schema, data_schema, takes = FAMILIES[family]
    shape = typed(model_schema, "model", model)
    data = dict(groups["data"])
    kind = "images" if "image_size" in data else data.get("objective", "causal")
    wanted = "images" if family == "vit" else getattr(data_schema, "objective", "causal")
    if kind != wanted:
        raise UserError(
            f"data={data.get('name')} does not fit model={model_name}, which takes {takes}"
        )
    if isinstance(shape, HFConfig) and shape.has_tokenizer:
        data["tokenizer"] = str(shape.folder)  # its weights work only with its own tokenizer
    values = {
        **{key: groups[key] for key in as_given},
        "model_name": model_name,
        "model": shape,
        "data": typed(data_schema, "data", data),
        "method": method_name,
        "method_options": typed(schema, "method", method),
        "train": train,
        "dino": groups.get("dino"),
        "notes": changed,
    }
    config: RunConfig = typed(RunConfig, "", values)
    _check_together(config)
    return config


def _check_together(config: RunConfig) -> None:
    """Raise a `UserError` if parts of the config cannot work together."""
    options = config.method_options
    distils = isinstance(options, distillation.Config) and options.kl_weight > 0
    kinds: dict[type, str] = {
        BertConfig: "logits of the hidden tokens alone",
        TransformerConfig: "logits of padding as well",
    }
    kind = "its own teacher" if config.dino is not None else kinds.get(type(config.model))
    if distils and kind is not None:
        raise UserError(
            f"method={config.method} distils from the model as it was, but model="
            f"{config.model_name} has {kind} here; set method.kl_weight=0 method.task_weight=1"
        )
    train, dino, data = config.train, config.dino, config.data
    if train.fp8_samples is not None and not config.build_method().capabilities.quantizes:
        raise UserError(
            f"train.fp8_samples={train.fp8_samples}, but method={config.method} has no FP8 "
            "products here; set train.fp8_samples=null"
        )
    if dino is not None and (train.ema or train.average_last):
        raise UserError(
            "train.ema or average_last with self-distillation: its teacher is the average; "
            "set it to 0"
        )
    unfit = {
        "self-distillation, whose loss moves with its teacher": dino is not None,
        "impl.shard=fsdp2": config.impl.shard == "fsdp2",
    }
    for what in [what for what, there in unfit.items() if there and train.descent_every]:
        raise UserError(
            f"train.descent_every={train.descent_every} needs extra passes, which do not work with "
            f"{what}; set train.descent_every=0"
        )
    if isinstance(data, PairsConfig) and train.ramp_batch is not None:
        raise UserError("train.ramp_batch is not for pairs of sentences; set it to null")
