"""Semi-sparse training: torchao's accelerated sparse training at run time, but by magnitude.

    mode=weight       operand 1   operand 2   sparse operand, along
    fprop             X           W * M       weight, 2:4 along `in`
    dgrad             dY          W * M       the same weight, 2:4 along `out` as well
    wgrad             dY          X           none; flows to W unmasked

    mode=activation
    fprop             X * M       W           input, 2:4 along `in`
    dgrad             dY          W           none; flows to X unmasked
    wgrad             dY          X * M       the same input, 2:4 along tokens as well

M is transposable: it keeps at most two entries in every row and column of a 4x4 tile, of the weight
or of [tokens, in]. This is plain STE: no decay, no sampling, and the mask is never frozen. The
weight's mask is chosen once per optimizer step (`refresh_every`), the input's in every forward
pass. Sparse steps come first, then dense ones: with `sparse_fraction=1` and mode=weight the model
ends 2:4 sparse, otherwise dense. In mode=activation the weights are always dense; evaluation prunes
the inputs as training does, but the plain linears that `finalize` leaves do not.

torchao (removed in 0.19) ranks by signed value, so that it keeps only 54% of the sum of magnitudes
of a Gaussian weight instead of 69%. Ranking by magnitude is its `largest_abs_values_greedy`; after
a ReLU both are the same. torchao also chooses the mask in every forward pass, does not support
biases and 3-D inputs with sparse activations, autocast, or fp32 weights, and its layers lose hooks
and the training flag.

A tile of [tokens, in] couples four tokens: which inputs of a token are kept depends on later
tokens, in training and in evaluation. For causal language models use `algorithm=rows`, which keeps
two of four inputs of each token separately; wgrad is then a dense product on hardware.

The second half of this file provides torchao's names, for code that was written for them: layers
that prune at run time without a `Method` (`swap_linear_with_semi_sparse_linear`).
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from common_kernels import nm_mask

from .nn import base
from .nn.at_run_time import linear_of_pruned_input, linear_of_pruned_weight, of_input, pair_of
from .nn.conversion import become, some_names, weight_of
from .nn.gemms import Products, under_autocast
from .nn.optimizer import StepWork
from .nn.phases import SwitchedLinear, SwitchedMethod, TransposableLinear


@dataclass(frozen=True, kw_only=True)
class Config(base.Config):
    """Options of semi-sparse training.

    mode: the sparse operand, `weight` or `activation`.
    algorithm: how the mask is chosen: `greedy` (torchao's, from the largest magnitude down; it
        sometimes keeps only seven of eight), `exact` (the largest sum of magnitudes), or `rows`
        (mode activation only, see above).
    refresh_every: optimizer steps between two choices of the weight's mask.
    sparse_fraction: fraction of `total_steps` that is sparse, at the start.
    fp8: FP8 products while weights are sparse, as in `methods.fst`.
    """

    mode: str = base.choice("weight", ("weight", "activation"))
    algorithm: str = base.choice("greedy", ("greedy", "exact", "rows"))
    refresh_every: int = base.number(1, 1)
    sparse_fraction: float = base.number(1.0, 0, 1)
    fp8: str = "off"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode == "activation" and self.fp8 != "off":
            raise ValueError(f"fp8={self.fp8} needs mode=weight; mode=activation has no FP8")
        if self.mode == "weight" and self.algorithm == "rows":
            raise ValueError("algorithm=rows with mode=weight is the method ste; use that")


class ActivationLinear(SwitchedLinear):
    """A layer that prunes its input. Its weight has no mask; the flip rate is a virtual one's."""

    config: Config

    def setup(self, name: str, config: Any, dtype: torch.dtype | None) -> None:
        super().setup(name, config, dtype)
        del self.mask

    def sparse_products(self) -> Products:
        return of_input(self.config.algorithm)

    def current_mask(self) -> Tensor:
        return nm_mask(self.weight.detach())

    def choose_mask(self) -> None:
        """Do nothing: inputs are masked in the forward pass."""

    def effective_weight(self) -> Tensor:
        return self.weight.detach()

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        if self.is_dense:
            return super().forward(x)
        x = self.checked_input(x)
        weight, algorithm = self.sparse_weight.to(x.dtype), self.config.algorithm
        layouts = pair_of(self.products) if x.dtype == self.dtype else ("", "")
        return linear_of_pruned_input(x, self.weight, weight, self.bias, algorithm, layouts)


class Method(SwitchedMethod):
    Config = Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        weights = config.mode == "weight"
        self.Linear = TransposableLinear if weights else ActivationLinear  # type: ignore[misc]

    @property
    def capabilities(self) -> base.Capabilities:
        weights = self.config.mode == "weight"
        return replace(
            super().capabilities,
            mask_period=self.config.refresh_every,
            changes_only_weights=weights,
            # as the weights always are with pruned activations
            ends_dense=not weights or self.dense_start < self.config.total_steps,
        )

    @property
    def fraction(self) -> str:
        return "sparse_fraction" if self.config.sparse_fraction < 1.0 else ""

    def check_layer(self, name: str, module: nn.Module) -> None:
        if self.config.mode == "weight":
            super().check_layer(name, module)
        elif (inputs := weight_of(module).shape[1]) % 4:
            raise ValueError(f"{inputs} inputs; 2:4 needs a multiple of 4")

    @property
    def holds_pattern(self) -> bool:
        return self.config.mode == "weight" and super().holds_pattern

    @property
    def dense_start(self) -> float:
        """The first dense step."""
        fraction = self.config.sparse_fraction
        return round(fraction * self.config.total_steps) if fraction < 1.0 else math.inf

    def dense_at(self, step: int) -> bool:
        return step >= self.dense_start

    def step_work(self, layer: Any, step: int) -> StepWork | None:
        chooses = self._chooses(step)
        return layer.step_work(0.0, chooses) if isinstance(layer, TransposableLinear) else None


# ---------------------------------------------------------------------- torchao's names


class SemiSparseLinear(nn.Linear):
    """A linear that prunes its weight in every forward pass. It has only the state of `nn.Linear`,
    so the weight may change by any means, also in compiled and sharded (FSDP2) models. The cost is
    a mask search and packing in every micro-batch; `Method` needs them once per optimizer step.
    Products run sparse where the GPU has sparse products and they were measured to be faster."""

    algorithm: ClassVar[str] = "greedy"

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        return linear_of_pruned_weight(under_autocast(x), self.weight, self.bias, self.algorithm)


class SemiSparseActivationLinear(nn.Linear):
    """A linear that prunes its input; four tokens share a tile (see the module docstring). Products
    run sparse as for `SemiSparseLinear`."""

    algorithm: ClassVar[str] = "greedy"

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        x = under_autocast(x)
        weight = self.weight.detach().to(x.dtype)
        return linear_of_pruned_input(x, self.weight, weight, self.bias, self.algorithm)


def swap_linear_with_semi_sparse_linear(
    model: nn.Module, config: Mapping[str, type[nn.Linear]], current: str = ""
) -> None:
    """Make linears of `model` semi-sparse, in place.

    Modules, parameters, hooks and `state_dict()` stay the same; only the class changes. Raises
    ValueError if an entry of `config` matches no `nn.Linear`, or one whose shape does not fit 2:4.
    The model is then unchanged.

    Args:
        config: maps the name of a linear, or a glob on names, to `SemiSparseLinear`,
            `SemiSparseActivationLinear` or a subclass.
        current: name of `model` itself, if the names in `config` begin with it.
    """
    # Only nn.Linear itself: a subclass may behave differently.
    linears = {n: m for n, m in model.named_modules(prefix=current) if type(m) is nn.Linear}
    chosen: dict[str, type[nn.Linear]] = {}
    for glob, cls in config.items():
        names = [name for name in linears if fnmatchcase(name, glob)]
        if not names:
            raise ValueError(
                f"{glob!r} names no nn.Linear; those of the model are: "
                f"{some_names(list(linears)) or 'none'}"
            )
        chosen.update(dict.fromkeys(names, cls))
    for name, cls in chosen.items():
        mode = "weight" if issubclass(cls, SemiSparseLinear) else "activation"
        try:
            Method(Config(mode=mode)).check_layer(name, linears[name])
        except ValueError as error:
            raise ValueError(f"{name} cannot be swapped: {error}") from error
    for name, cls in chosen.items():
        become(linears[name], cls)


def swap_semi_sparse_linear_with_linear(
    model: nn.Module, current: str = "", include: Iterable[str] = ("*",)
) -> None:
    """Turn semi-sparse linears of `model` back into plain ones in place, with their dense weights.

    Args:
        current: name of `model` itself, if the names in `include` begin with it.
        include: globs on the names of the linears to swap.
    """
    for name, module in model.named_modules(prefix=current):
        if isinstance(module, SemiSparseLinear | SemiSparseActivationLinear) and any(
            fnmatchcase(name, glob) for glob in include
        ):
            become(module, nn.Linear)
