"""A finished run, as fine-tuning, evaluation and export use it."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

import methods
from experiments.config.initial import AVERAGED, LATENT, check_run_files, load_weights
from experiments.config.run import FAMILIES, DataConfig, ImageConfig, ModelConfig, build_model
from experiments.data.manifest import load_encoding
from experiments.data.mlm import MLMConfig
from experiments.data.tokenizer import Encoding
from experiments.support import tensor_files
from experiments.support.checkpoint import write_sealed
from experiments.support.errors import UserError
from experiments.support.results import FILE, read_training
from experiments.support.typed import typed
from methods import dense, one_shot
from methods.nn import lowrank
from models.bert import BertConfig

WEIGHTS_OF = ("sparse", "dense")
MODES = ("auto", "sparse", "masked", "dense")
# Keys of `data` in the configs of older runs.
RETIRED = ("shard_tokens", "on_corrupt", "order", "parts", "weights")


@dataclass(frozen=True)
class FinishedRun:
    """A finished training: its directory and `result.json`, whose hashes its files must have."""

    directory: Path
    result: dict[str, Any]

    @classmethod
    def open(cls, directory: str | Path) -> FinishedRun:
        """The finished run in `directory`. Raises a `UserError` if there is none."""
        return cls(Path(directory), read_training(Path(directory)))

    def extend(self, metrics: dict[str, Any], **entries: Any) -> None:
        """Add metrics and entries to `result.json`."""
        self.result["metrics"] |= metrics
        self.result.update(entries)
        write_sealed(self.directory / FILE, self.result)

    @property
    def config(self) -> dict[str, Any]:
        """The resolved config of the run, as plain values."""
        return self.result["config"]

    @property
    def config_hash(self) -> str:
        """Hash of the run's config, 16 hex digits."""
        return self.result["config_hash"]

    @property
    def seed(self) -> int:
        return self.config["seed"]

    @property
    def model_name(self) -> str:
        """The name of its model, for example `gpt2_nano`."""
        return self.config["model"]["name"]

    @property
    def method(self) -> str:
        """Name of its method."""
        return self.config["method"]["name"]

    @property
    def converted(self) -> tuple[str, ...]:
        """Names of the linears that the method converted."""
        return tuple(self.result["converted"])

    @cached_property
    def shape(self) -> ModelConfig:
        """The shape of its model."""
        values = {k: v for k, v in self.config["model"].items() if k not in ("name", "weights")}
        return self._typed(FAMILIES[self.family][0], "model", values)

    @property
    def family(self) -> str:
        """`gpt2`, `bert`, `vit` or `hf`."""
        return "hf" if "path" in self.config["model"] else self.model_name.partition("_")[0]

    @cached_property
    def data(self) -> DataConfig | ImageConfig:
        """The data that it was trained on."""
        data = {k: v for k, v in self.config["data"].items() if k not in RETIRED}
        return self._typed(FAMILIES[self.family][1], "data", data)

    @cached_property
    def trained_with(self) -> methods.Method:
        """The method that it was trained with, not attached to a model."""
        try:
            module = methods.module(self.method)
        except ValueError as error:
            place = self.directory / FILE
            raise UserError(f"{place}: there is no method {self.method}") from error
        options = {k: v for k, v in self.config["method"].items() if k != "name"}
        return module.Method(self._typed(module.Config, "method", options))

    def _typed(self, schema: type, group: str, values: Any) -> Any:
        try:
            return typed(schema, group, values)
        except ValueError as error:
            raise UserError(f"{self.directory / FILE}: {error}") from error

    @property
    def longest(self) -> int | None:
        """The length of the training sequences in tokens; None if the model has no fixed length."""
        if not isinstance(self.shape, BertConfig) or self.shape.positions != "learned":
            return None
        assert isinstance(self.data, MLMConfig)
        return self.data.sequence_length or self.shape.block_size

    def pattern(self, name: str) -> tuple[int, int]:
        """(n, m) of the converted linear of this name."""
        return self.trained_with.pattern(name)

    def tokenizer(self) -> Encoding:
        """The tokenizer that it was trained with, from the run's copy of its file."""
        if isinstance(self.data, ImageConfig):
            raise UserError(f"{self.directory} was trained on images and has no tokenizer")
        record = self.result["corpus"]["tokenizer"]
        if record["kind"] != "gpt2":
            check_run_files(self.directory, self.result, record["file"])
        return load_encoding(self.directory, record)

    def model(self, weights: str = "sparse") -> nn.Module:
        """The plain model on the CPU with the final weights, or the `dense` ones behind masks."""
        model = build_model(self.shape)
        load_weights(model, self.directory)
        if weights == "dense" and not self.trained_with.capabilities.ends_dense:
            masters = [f"{name}.weight" for name in self.converted]
            if absent := [name for name in masters if name not in self.latent]:
                raise UserError(
                    f"weights=dense, but {self.method} keeps no dense {absent[0]} in "
                    f"{self.directory}; use weights=sparse"
                )
            with torch.no_grad():
                for name in masters:
                    # A low-rank term replaces the pruned weights, which dense weights still have.
                    drop_low_rank_terms(model.get_submodule(name.removesuffix(".weight")))
                    model.get_parameter(name).copy_(self.latent[name])
        return model

    def averaged(self) -> nn.Module | None:
        """The plain model on the CPU with the averaged weights; None if the run kept none."""
        if not tensor_files.among(AVERAGED, self.result.get("files", {})):
            return None
        model = build_model(self.shape)
        load_weights(model, self.directory, AVERAGED)
        return model

    @cached_property
    def latent(self) -> dict[str, torch.Tensor]:
        """The state of the method's layers before they became plain linears, by name."""
        path = self.directory / LATENT
        check_run_files(self.directory, self.result, LATENT)
        there = tensor_files.files(path)[0].is_file()
        return tensor_files.load(path, torch.device("cpu")) if there else {}

    def method_for(
        self,
        model: nn.Module,
        mode: str,
        total_steps: int,
        seed: int,
        dtype: torch.dtype | None = None,
    ) -> methods.Method:
        """Convert `model`, which contains `self.model()` under the same names, for fine-tuning, and
        return the method. dtype: as for `Method.convert`.

        mode: `dense`, `sparse`, `masked` (under the last mask), or `auto`: dense after a dense last
            phase; otherwise the method's own way to continue, or the last mask. Low-rank terms that
            are not trained further are added to the weights.
        """
        trained = self.trained_with
        if mode in ("sparse", "masked") and trained.capabilities.ends_dense:
            raise UserError(
                f"mode={mode}, but {self.directory} ends with dense weights; use mode=auto or dense"
            )
        # Use names, because the training's globs might also match linears of a new head. The
        # training's own head may have been removed.
        modules = dict(model.named_modules())
        names = tuple(name for name in self.converted if name in modules)
        common: dict[str, Any] = {"include": names, "exclude": (), "seed": seed}
        if mode == "dense" or trained.capabilities.ends_dense:
            method: methods.Method = dense.Method(dense.Config(**common))
            lowrank.merge(model)
            method.convert(model, dtype)
            return method
        own = trained.finetuning(total_steps)
        there = [modules[name] for name in names]
        patterns = [*{*map(self.pattern, names)}]
        # Methods with low-rank terms or other patterns keep their masks themselves.
        plain = patterns == [(2, 4)] and not any(map(_low_rank_terms, there))
        if own is None or (mode == "masked" and plain):
            common |= dict(zip("nm", patterns[0], strict=True))
            share = getattr(trained.config, "dense_columns", 0.0)
            own = one_shot.Config(**common, total_steps=total_steps, dense_columns=share)
            # Columns stay dense if they did in training, even if others are larger by now.
            final = copy.deepcopy({name: modules[name].state_dict() for name in names if share})
            method = one_shot.Method(own)
            method.convert(model, dtype)
            self._restore(method, final)
            return method
        for layer in there:
            drop_low_rank_terms(layer)  # the layer's own state has them
        method = methods.module(self.method).Method(type(own)(**{**vars(own), **common}))
        method.convert(model, dtype)
        self._restore(method, {name: {} for name in method.sparse_layers})
        return method

    def _restore(self, method: methods.Method, given: dict[str, dict[str, torch.Tensor]]) -> None:
        """Load the state of layers as training left it, but for what is `given` by their name."""
        for name, own in given.items():
            layer = method.sparse_layers[name]
            wanted = {key: f"{name}.{key}" for key in layer.state_dict() if key not in own}
            if absent := [stored for stored in wanted.values() if stored not in self.latent]:
                path = self.directory / LATENT
                raise UserError(
                    f"{path} is missing or lacks {absent[0]}, which {self.method} continues from; "
                    "run it again, or set mode=dense"
                )
            latent = {key: self.latent[stored] for key, stored in wanted.items()}
            layer.load_state_dict({**own, **latent})


def _low_rank_terms(layer: nn.Module) -> set[str]:
    return set(layer._parameters) - {"weight", "bias"}


def drop_low_rank_terms(layer: nn.Module) -> None:
    """Make a linear with a low-rank term a plain one, in place, without adding the term."""
    for name in _low_rank_terms(layer):
        delattr(layer, name)
    layer.__class__ = nn.Linear
