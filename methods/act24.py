"""act24: feed-forward networks with squared ReLU whose hidden activations are pruned to 2:4.

    GEMM             operand 1   operand 2   sparse operand, along
    fprop of fc2     H'          W2          activation, 2:4 along the features
    dgrad of fc1     dZ          W1          its gradient, 2:4 along the features as well
    wgrad of fc2     dY          S(H')       with `dense_features`: a sample, 2:4 along the tokens
    wgrad of fc1     S(dZ)       X           likewise
    the other two    dense

Haziza et al., arXiv 2503.16672. Z = X W1^T + b1, H = relu(Z)^2, H' keeps the two largest of each
four features of H, Y = H' W2^T + b2. Most entries of H are zero, so that little is lost.
dZ = 2 dH sqrt(H') has the zeros of H'. Activation, choice and packing are one pass, and so are the
gradient and its packing (nn/feed_forward_gemms.py, common_kernels/relu24). With `fp8` all six
products are in FP8 (nn/fp8_gemms.py); codes are made in the pass that packs them.

For the two wgrads the paper also prunes H' and dZ along the tokens, which it permutes, except for
the densest features. With `dense_features` an unbiased sample S as FST's takes the place of that
pruning, exact where at most two of four tokens are not zero; the densest features are those of
each micro-batch, as one of 17 of its tokens shows them.

A network is two linears of one module, with a squared ReLU as a module between them: our models
with `gelu=relu2` or `squared_relu`, transformers' with `hidden_act=relu2` (Nemotron, which is
LLaMA with such a network, GPT-2, ViT). The second linear computes the whole network; the first one
and the activation pass their input on. Weights are dense, and so is the plain model that `finalize`
leaves, and evaluation before that, unless `prune_evaluation`. `dense_fraction=1` is the baseline,
dense squared ReLU.
"""

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from common_kernels.pack.operands import MULTIPLE
from common_kernels.relu24 import relu24

from .nn import base, conversion, delayed, dtensors, precision
from .nn.feed_forward import networks, unchanged
from .nn.feed_forward_gemms import FeedForward, sums_of
from .nn.gemms import Products
from .nn.phases import SwitchedMethod
from .semi_sparse import ActivationLinear


@dataclass(frozen=True, kw_only=True)
class Config(base.Config):
    """Options of act24.

    dense_fraction: share of `total_steps`, the first ones, in which nothing is pruned.
    prune_evaluation: prune in evaluation, too, as the paper does.
    fp8: FP8 products in the steps that prune, as in `methods.fst`.
    dense_features: share of the hidden features, those with most non-zeros, whose sums over the
        tokens are dense; those of the others are of a 2:4 sample (the paper: 0.05). 1 samples none.
    """

    dense_fraction: float = base.number(0.0, 0, 1)
    prune_evaluation: bool = False
    fp8: str = "off"
    dense_features: float = base.number(1.0, 0, 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dense_features < 1 and self.fp8 != "off":
            raise ValueError(
                f"dense_features={self.dense_features} needs fp8=off: no samples of H' and dZ are "
                f"made in FP8, so set dense_features=1 with fp8={self.fp8}"
            )


class Linear(ActivationLinear):
    """One of the two linears of a network. Its weight is dense and cast when it is used."""

    config: Any
    precision: Any

    @torch.no_grad()
    def hold(self) -> None:
        """Hold no operand, or in FP8 the codes of the weight, which is not packed."""
        precision.hold_operands(self)
        self.operand = None
        self.refresh()

    def quantized_weight(self) -> tuple[Tensor, None]:
        return self.weight.detach(), None

    def _forget(self) -> None:
        super()._forget()
        for name in ("up", "measuring", "kept"):
            vars(self).pop(name, None)

    @property
    def mvue(self) -> str | None:
        return None if self.is_dense or self.config.dense_features == 1 else "exact"

    def in_fp8(self) -> tuple[Any, ...]:
        """The codes for fprop and dgrad, the formats, and the state of delayed scaling."""
        return *precision.operands(self), self.precision, *delayed.of(self)

    def cast(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Weight and bias in `dtype`, which pass their gradients on."""
        return self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype)


class Up(Linear):
    """The first linear, which leaves its product to the second."""

    both_ways = True  # dgrad's packed operand, dZ, and W1 are codes of one format

    def sparse_products(self) -> Products:
        return Products(dgrad=True, wgrad=self.config.dense_features < 1, of_input=True)

    def forward(self, x: Tensor) -> Tensor:
        """x itself."""
        return self.checked_input(x)


class Down(Linear):
    """The second linear. `kept` (fp32 [2], no buffer): the sums of H' and H, if `measuring`."""

    kept: Tensor
    measuring: bool = False
    up: Up

    def sparse_products(self) -> Products:
        return Products(fprop=True, wgrad=self.config.dense_features < 1, of_input=True)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in], the network's input -> [..., out]."""
        x, up = self.checked_input(x), self.up
        if up.weight.is_meta or dtensors.is_sharded(up.weight):
            raise RuntimeError(
                "act24: the second linear of a feed-forward network computes with the first one's "
                "weight, which is sharded or offloaded; shard or offload the module that has both"
            )
        evaluates = not self.training and not torch.is_grad_enabled()
        prune = not self.is_dense and (self.config.prune_evaluation or not evaluates)
        in_fp8 = prune and not evaluates and self.fp8 is not None
        layouts = "", ""
        if prune and (in_fp8 or (self.fp8 is None and x.dtype == self.dtype)):
            layouts = self.products.layout("fprop"), up.products.layout("dgrad")
        measures = self.measuring and self.training
        if in_fp8 and not any(layouts):
            z = up.forward_in_fp8(x)
            h = relu24(z)
            y = self.forward_in_fp8(h)
            sums = sums_of(z.detach(), h.detach()) if measures else y
        else:
            weights = *up.cast(x.dtype), *self.cast(x.dtype)
            own: tuple[tuple[Any, ...], ...] = (), (), ()
            if in_fp8:
                weights = up.weight, up.bias, self.weight, self.bias
                own = up.in_fp8(), self.in_fp8(), ()
            elif prune and self.mvue and torch.is_grad_enabled():
                # A multiple of 8, as fast dense products need.
                count = -(-round(self.config.dense_features * self.in_features) // 8) * 8
                packs = x.dtype == self.dtype
                samples = (of.products.layout("wgrad") if packs else "" for of in (up, self))
                own = (), (), (count, *samples, up.key_of_pass(), self.key_of_pass())
            y, sums = FeedForward.apply(x, *weights, prune, layouts, measures, *own)
        if measures:
            if self.kept.device != sums.device:  # offloaded: the weight is elsewhere between passes
                self.kept = torch.zeros_like(sums)
            self.kept.add_(sums)
        return y


class Method(SwitchedMethod):
    Config = Config
    Linear = Linear
    abilities = base.Capabilities(ends_dense=True)
    saved = (*SwitchedMethod.saved, "kept")

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._networks: dict[str, tuple[str, str, nn.Module, str]] = {}
        self.kept: dict[str, float] = {}  # the measured shares by the name of the second linear

    @property
    def fraction(self) -> str:
        return "dense_fraction" if 0 < self.config.dense_fraction < 1 else ""

    @property
    def holds_pattern(self) -> bool:
        return False  # weights are dense

    def _choose(self, model: nn.Module) -> tuple[dict[str, Any], base.Report]:
        self._networks = networks(model)
        return super()._choose(model)

    def check_layer(self, name: str, module: nn.Module) -> None:
        own = [pair[:2] for pair in self._networks.values() if name in pair[:2]]
        if not own:
            raise ValueError(
                "not one of two linears with a squared ReLU, as a module, and nothing else between "
                "them: set model.gelu=relu2, model.squared_relu=true or hidden_act='relu2', and "
                "dropout between them to 0"
            )
        hidden = conversion.weight_of(module).shape[own[0].index(name)]
        if hidden % 4:
            raise ValueError(f"{hidden} hidden features; 2:4 needs a multiple of 4")

    def _check(self, chosen: dict[str, nn.Linear]) -> None:
        for up, down, *_ in self._networks.values():
            if (up in chosen) != (down in chosen):
                raise ValueError(f"{up} and {down} are one network; convert both or neither")

    def convert(self, model: nn.Module, dtype: torch.dtype | None = None) -> base.Report:
        report = super().convert(model, dtype)
        self._networks = {n: pair for n, pair in self._networks.items() if pair[0] in self.layers}
        for up, down, module, name in self._networks.values():
            first, second = self.layers[up], self.layers[down]
            conversion.become(first, Up)
            if first.precision is not None:  # with the formats of this class
                first._set_precision()
                first.reload()
            conversion.become(second, Down)
            if any(size % MULTIPLE for size in (*first.weight.shape, *second.weight.shape)):
                for layer in (first, second):  # FP8 units take both or none
                    layer.precision = layer.precision and replace(layer.precision, on_units=False)
            kept = torch.zeros(2, device=second.weight.device)
            vars(second).update(up=first, measuring=False, kept=kept)  # `up` is no submodule
            activation = copy.copy(getattr(module, name))  # others may share it
            vars(activation)["forward"] = unchanged
            setattr(module, name, activation)
        self.kept = dict.fromkeys(self.downs(), 1.0)
        return report

    def dense_at(self, step: int) -> bool:
        fraction = self.config.dense_fraction
        return fraction == 1 or step < round(fraction * self.config.total_steps)

    def downs(self) -> dict[str, Down]:
        return {n: layer for n, layer in self.layers.items() if isinstance(layer, Down)}

    @torch.no_grad()
    def on_step_begin(self, step: int) -> None:
        super().on_step_begin(step)
        for layer in self.downs().values():
            layer.measuring = self._measures(step)
            if layer.measuring:
                if layer.kept.device != layer.weight.device:  # moved or sharded after `convert`
                    layer.kept = torch.zeros(2, device=layer.weight.device)
                layer.kept.zero_()

    @torch.no_grad()
    def on_step_end(self, step: int) -> None:
        super().on_step_end(step)
        if not self._measures(step):
            return
        downs = self.downs()
        sums = dtensors.total_each((layer, layer.kept.tolist()) for layer in downs.values())
        shares = (kept / whole if whole else 1.0 for kept, whole in sums)
        self.kept = dict(zip(downs, shares, strict=True))

    def metrics(self) -> dict[str, float | int | str]:
        """The base class's, and `kept_magnitude`: the share of the sum of activations that pruning
        kept in the last measured step, the mean over layers; with `flips_by_layer` of each layer,
        too. Without sharding it is that of this rank's tokens."""
        shares = self.kept.values()
        own = {"kept_magnitude": sum(shares) / max(1, len(shares))}
        if self.config.flips_by_layer:
            own |= {f"kept_magnitude.{name}": share for name, share in self.kept.items()}
        return {**super().metrics(), **own}

    def finalize(self, model: nn.Module) -> nn.Module:
        super().finalize(model)
        for *_, module, name in self._networks.values():
            vars(getattr(module, name)).pop("forward", None)
        return model
