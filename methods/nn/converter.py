"""The part of a method that comes before training: conversion, and the choice of products."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from . import acceleration, conversion, permutation, plain, ranks, sharding
from .acceleration import Acceleration
from .config import Capabilities, Config
from .conversion import Report, weight_of
from .gemms import Products
from .linear import SparseLinear


class Converter:
    """A `Method` until training begins. Its documentation and the order of calls are in base.py."""

    Config: ClassVar[type[Config]] = Config
    Linear: ClassVar[type[SparseLinear] | None] = None
    abilities: ClassVar[Capabilities] = Capabilities()  # those with any options

    def __init__(self, config: Any) -> None:
        given = type(config)
        if not issubclass(given, self.Config):
            raise TypeError(
                f"{type(self).__module__}.Method takes a {self.Config.__module__}.Config, not a "
                f"{given.__module__}.{given.__qualname__}"
            )
        self.config = config
        # The linears by name, and the converted ones of them, of the method's own class.
        self.layers: dict[str, Any] = {}
        self.sparse_layers: dict[str, Any] = {}
        self._model: nn.Module | None = None  # the model that holds the layers
        self._fast: list[tuple[nn.Module, str, Any]] = []  # flags that finalize sets again
        self.report: Report | None = None
        self.acceleration: Acceleration | None = None

    @property
    def capabilities(self) -> Capabilities:
        """The properties of this method and its options that a driver must know."""
        return replace(self.abilities, quantizes=getattr(self.config, "fp8", "off") != "off")

    @property
    def fraction(self) -> str:
        """The option that is a fraction of `total_steps`; empty if there is none."""
        return ""

    def calibrate(self, model: nn.Module, batches: Iterable[Mapping[str, Any]]) -> None:
        """Measure what `convert` needs to know about the layers' inputs; by default nothing.

        Args:
            batches: keyword arguments of the model; in a process group, equal on every rank.
        """

    def set_teacher(self, teacher: nn.Module) -> None:
        """Use `teacher` for distillation; only for methods based on distillation.py. Raises
        ValueError if the method has no teacher."""
        name = type(self.config).__module__.rpartition(".")[2]
        raise ValueError(f"{name} does not distil; set_teacher is for methods that do, ast say")

    def convert(self, model: nn.Module, dtype: torch.dtype | None = None) -> Report:
        """Make the matching linears of `model` sparse, in place, and return a report.

        The modules keep their identity, parameters, hooks and training flag; only their class
        changes. Call it after initialisation (S-STE's scale is measured here), on the final device
        and in the final dtype. In a process group every rank must call it; all start from the
        weights of rank 0. Raises ValueError if no linear can be converted, a linear that `include`
        names in full cannot be, or the model is already converted. The model is then unchanged.

        Args:
            dtype: dtype of the operands of the matrix products, if autocast will run them in
                another dtype than the weights'. They are then cast once per step, not per use.
        """
        if (name := self.fraction) and not self.config.total_steps:
            value = getattr(self.config, name)
            raise ValueError(f"{name}={value:.3g} of how many steps? set total_steps")
        sharding.check_unsharded(model)
        chosen, report = self._choose(model)
        self._check(chosen)
        self._prepare(model, chosen)
        self.report = replace(report, measured=self.Linear is None)
        if self.Linear is not None:
            with torch.no_grad():
                for module in chosen.values():
                    conversion.to_linear(module)
                # DDP broadcasts weights later, but scales are measured from them now.
                ranks.take_from_rank_0(module.weight for module in chosen.values())
                for name, module in chosen.items():
                    with ranks.visiting(module):
                        conversion.become(module, self.Linear)
                        module.setup(name, self.config, dtype)
                        module.refresh_mask()
                        module.refresh()
            self.sparse_layers = {**chosen}
            self._fast = conversion.leave_fast_path(model)
            plain.save_plain(model)
        self.layers, self._model = chosen, model
        return self.report

    def _prepare(self, model: nn.Module, chosen: dict[str, Any]) -> None:
        """Change or measure the dense model before the chosen linears are converted."""
        if getattr(self.config, "permute", False):
            permutation.permute(model, chosen, self.config)

    def matching_linears(self, model: nn.Module) -> dict[str, nn.Linear]:
        """The linears that `convert` would convert, by name."""
        return self._choose(model)[0]

    def _choose(self, model: nn.Module) -> tuple[dict[str, Any], Report]:
        if self.layers or any(isinstance(m, SparseLinear) for m in model.modules()):
            raise ValueError("the model is converted already; build a new method and model")
        return conversion.choose(model, self.config, self.check_layer, self.check_matrix)

    def _check(self, chosen: dict[str, nn.Linear]) -> None:
        """Raise ValueError if the options do not fit the chosen linears."""

    def check_layer(self, name: str, module: nn.Module) -> None:
        """Raise ValueError with the reason if this linear does not fit the method's pattern."""
        (n, m), shape = self.pattern(name), list(weight_of(module).shape)
        if shape[0] % m or shape[1] % m:
            fitting = [-(-size // m) * m for size in shape]
            raise ValueError(
                f"weight {shape}; {n}:{m} needs both dims to be multiples of {m}, as in {fitting}"
            )

    def check_matrix(self, kind: str) -> None:
        """Raise ValueError with the reason if the method cannot convert a matrix that modules of
        this type multiply themselves (matrices.py)."""
        if not self.capabilities.changes_only_weights:
            raise ValueError(f"multiplied by {kind} itself, which this method cannot convert")
        for option, off in (
            ("fp8", "off"), ("mvue", "off"), ("mvue_weight", False), ("metric", "magnitude")
        ):  # fmt: skip
            if (value := getattr(self.config, option, off)) != off:
                raise ValueError(
                    f"multiplied by {kind} itself, where {option}={value} cannot act; convert it "
                    f"with {option}={off}"
                )

    def accelerate(
        self, tokens: int, matmul: str | None = None, repack_backward: bool = False
    ) -> dict[str, Products]:
        """Run products with a 2:4 operand sparse, and return for each layer which ones do. Call it
        after `convert`; `acceleration` then records the reasons and the time saved.

        Without this call all products are dense with masked operands, and FP8 is simulated. In a
        process group every rank must call it; rank 0's choice holds for all.

        Args:
            tokens: number of tokens in a micro-batch on this device; products are timed with it.
            matmul: `auto` takes the sparse or the dense product, whichever was measured to be
                faster; `cusparselt` takes the sparse one for every 2:4 operand; `dense` never does.
                None: the environment variable SPARSE24_MATMUL, else `auto`. It changes only the
                speed: FP8 units are used if method and device allow it (`Products.fp8`).
            repack_backward: pack dgrad's operand in each backward pass instead of keeping it from
                step to step. The result is the same, with less memory and more time. Only for
                `slope` with 2:4 weights and without FP8.
        Raises:
            ValueError: an unknown name, a model that is not converted, or no operand to repack.
            RuntimeError: `cusparselt` cannot serve this device, shape or dtype.
        """
        if not self.layers:
            raise ValueError("nothing is converted: call convert(model) before accelerate")
        if repack_backward:
            self.check_repacks()
        self._shard()
        layers = self.sparse_layers
        found = ranks.of_rank_0(lambda: acceleration.choose_all(layers, tokens, matmul))
        products, choices = {}, {}
        for name, (chosen, choices[name]) in found.items():
            repack = repack_backward and chosen.dgrad and layers[name].repacks
            products[name] = replace(chosen, repack=repack)
            layers[name].accelerate(products[name])
        in_vain = repack_backward and not any(of_layer.repack for of_layer in products.values())
        self.acceleration = Acceleration(tokens, choices, in_vain)
        return products

    def check_repacks(self) -> None:
        """Raise ValueError if no converted layer supports `repack_backward` of `accelerate`."""
        if not any(layer.repacks for layer in self.sparse_layers.values()):
            raise ValueError(
                "repack_backward=True: no layer here has an operand that can be packed in the "
                "backward pass; it is for slope with 2:4 weights and without FP8, set it to False"
            )

    def pattern(self, name: str) -> tuple[int, int]:
        """(n, m) of the converted linear of this name: n non-zeros in m consecutive inputs."""
        return getattr(self.layers.get(name), "pattern", self.config.pattern(name))

    def _shard(self) -> None:
        sharding.shard_layers(self.layers.values(), self._model)
