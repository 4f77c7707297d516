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
gradient and its packing (common_kernels/relu24). With `fp8` all six products are in FP8
(nn/fp8_gemms.py); codes are made in the pass that packs them.

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
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from common_kernels.matmul import mm24, sample_mm24
from common_kernels.pack import check_form
from common_kernels.pack.operands import MULTIPLE, fill_up, sample_pack24
from common_kernels.relu24 import relu24, relu24_backward, relu24_codes, relu24_packed

from .nn import base, conversion, delayed, dtensors, precision
from .nn.fp8_gemms import quantized_gradient, quantized_input, weight_gradient
from .nn.gemms import Products, groups_of, sample_tokens, without_autocast
from .nn.operands import Fp8, flat, save, saved, with_leading_dims
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


class FeedForward(torch.autograd.Function):
    """x [..., in] -> [..., out], and the sums of H' and H (fp32 [2]) if `measures`, else [0]. w1
    [hidden, in], w2 [out, hidden] and biases or None are of x's dtype. layouts: of H' and of dZ,
    packed; "" for a dense product. up, down: `Linear.in_fp8` of both for FP8 units, else (). With
    them w1 and w2 are the master weights, of which only the gradients are made here. sampled: for
    sums over a sample of the tokens the number of features that are not sampled, the layouts of
    dZ's and of H's sample, and two keys; else ()."""

    @staticmethod
    def forward(ctx, x, w1, b1, w2, b2, prune, layouts, measures, up, down, sampled):
        given, dtype = flat(x), torch.float8_e4m3fn if up else x.dtype
        tokens, forms = len(given), [check_form((0, 0), dtype, one) for one in layouts if one]
        packs = bool(forms) or any(sampled[1:3])
        padding = -tokens % math.lcm(MULTIPLE if packs else 1, *(form.rows for form in forms))
        given = fill_up(given, padding)
        if up:
            (fprop, dgrad, formats, *amax), (fprop2, dgrad2, formats2, *amax2) = up, down
            codes, given, scale = quantized_input(given, formats, True, *amax)
            z = fprop.linear(codes, b1, x.dtype)
            z[tokens:] = 0  # else b1 would count for the scale of H'
            if layouts[0]:
                h, codes, kept = packed_codes(z, None, formats2.fprop, layouts[0], *amax2)
            else:
                h = relu24(z)
                codes, kept, _ = quantized_input(h, formats2, True, *amax2)
            y = fprop2.linear(codes, b2, x.dtype)
            y = y[:tokens].clone() if padding else y
            save(ctx, dgrad, given, kept, h, *dgrad2[:2], scale, codes.scale, amax[0], amax2[0])
            # What was seen is not saved by autograd: it changes before the backward pass.
            ctx.own = formats, amax[1], formats2, amax2[1], w1.dtype, w2.dtype
        else:
            z = F.linear(given, w1, b1)
            if padding:
                z[tokens:] = 0  # else b1 would enter the sample's last group
            if layouts[0]:
                h, packed = relu24_packed(z, layouts[0])
                y = mm24(packed, w2, transposed=True)
                y = y[:tokens].clone() if padding else y
                y = y if b2 is None else y.add_(b2)
            else:
                h = relu24(z, prune)
                y = F.linear(h[:tokens], w2, b2)
            ctx.save_for_backward(given, w1, w2, h, *sampled[3:])
        sums = sums_of(z[:tokens], h[:tokens]) if measures else y.new_empty(0)
        ctx.mark_non_differentiable(sums)
        ctx.fp8, ctx.padding, ctx.layout, ctx.like = bool(up), padding, layouts[1], x.shape
        ctx.sampled = sampled[:3]
        return with_leading_dims(y, x), sums

    @staticmethod
    def backward(ctx, dy, _):
        needs, dx = ctx.needs_input_grad, None
        with without_autocast(dy):
            dy = fill_up(flat(dy), ctx.padding)
            if ctx.fp8:
                dz, dx, dw1, dw2 = gradients_in_fp8(ctx, dy, needs)
            else:
                given, w1, w2, h, *keys = ctx.saved_tensors
                dz, packed = relu24_backward(dy @ w2, h, ctx.layout)
                if needs[0]:
                    dx = dz @ w1 if packed is None else mm24(packed, w1)
                dw1 = dw2 = None
                if ctx.sampled:
                    tokens, (count, *own) = len(h) - ctx.padding, ctx.sampled
                    # Some tokens are enough, of all positions in sequences of a power of 2.
                    counts = (h[:tokens:17] != 0).sum(0, dtype=torch.int32)
                    dense = counts.argsort(descending=True)[:count].sort().values
                    if needs[1]:
                        dw1 = of_a_sample(dz, given, tokens, keys[0], own[0], dense)
                    if needs[3]:
                        dw2 = of_a_sample(h, dy, tokens, keys[1], own[1], dense, transposed=True)
                else:
                    dw1 = dz.t() @ given if needs[1] else None
                    dw2 = dy.t() @ h if needs[3] else None
            if dx is not None:
                dx = dx[: len(dx) - ctx.padding].view(ctx.like)
            db1, db2 = (g.sum(0) if n else None for g, n in ((dz, needs[2]), (dy, needs[4])))
        return dx, dw1, db1, dw2, db2, *(None,) * 6


def of_a_sample(
    a: Tensor, b: Tensor, tokens: int, key: Tensor, layout: str, dense: Tensor,
    transposed: bool = False,
) -> Tensor:  # fmt: skip
    """a^T b [features, n], or its transpose, where an unbiased 2:4 sample along the tokens takes
    the place of a [T, features], but in the features `dense`. After the first `tokens` come rows of
    padding, which draw no random bits. layout: of the sample, packed."""
    product: Tensor
    stride = groups_of(a[:tokens])
    if layout and transposed:
        packed = sample_pack24(a, key, stride, layout=layout)
        product = mm24(packed, b, result_transposed=True)
    elif layout:
        product = sample_mm24(a, b, key, stride, layout=layout)
    else:
        a, b = a[:tokens], b[:tokens]
        sample = sample_tokens(a, key, "exact")
        product = b.t() @ sample if transposed else sample.t() @ b
    if not len(dense):
        return product
    exact = a.index_select(1, dense)
    if transposed:
        return product.index_copy_(1, dense, b.t() @ exact)
    return product.index_copy_(0, dense, exact.t() @ b)


def gradients_in_fp8(ctx: Any, dy: Tensor, needs: tuple[bool, ...]) -> tuple[Any, ...]:
    """dZ, dX, dW1 and dW2."""
    dgrad, given, kept, h, w2, w2_scale, scale, scale2, amax, amax2 = saved(ctx)
    formats, seen, formats2, seen2, dtype, dtype2 = ctx.own
    codes, turned = quantized_gradient(dy, formats2, True, amax2, seen2)
    dh = Fp8(w2, w2_scale, True).grad(codes, dy.dtype)
    dw2 = weight_gradient(codes, turned, kept, scale2, True, dtype2) if needs[3] else None
    if ctx.layout:
        dz, codes, turned = packed_codes(dh, h, formats.gradient, ctx.layout, amax, seen)
    else:
        dz = relu24_backward(dh, h)[0]
        codes, turned = quantized_gradient(dz, formats, True, amax, seen)
    dw1 = weight_gradient(codes, turned, given, scale, True, dtype) if needs[1] else None
    return dz, dgrad.grad(codes, dy.dtype), dw1, dw2


def packed_codes(
    x: Tensor, h: Tensor | None, fmt: str, layout: str, amax: Tensor | None, seen: Tensor | None
) -> tuple[Tensor, Fp8, Tensor]:
    """H' from Z, or dZ from dH and H', with its packed codes and those of its transpose."""
    place = 0 if h is None else 1
    scaling = (None if t is None else t[place] for t in (amax, seen))
    out, packed, turned, scale = relu24_codes(x, h, fmt, layout, *scaling)
    return out, Fp8(packed.buffer, scale, True, packed.shape, layout), turned


def sums_of(z: Tensor, h: Tensor) -> Tensor:
    """The sums of H' and H, fp32 [2]."""
    return torch.stack([h.float().sum(), z.float().relu().square().sum()])


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


def unchanged(x: Tensor) -> Tensor:
    """The forward pass of an activation that `Down` applies."""
    return x


def networks(model: nn.Module) -> dict[str, tuple[str, str, nn.Module, str]]:
    """The names of both linears, the module and its child that is the activation, of each network
    by name."""
    found = {}
    for name, module in model.named_modules():
        children = dict(module.named_children())
        linears = [n for n, child in children.items() if conversion.is_linear(child)]
        between = [n for n, child in children.items() if is_squared_relu(child)]
        if len(linears) == 2 and len(between) == 1 and is_network(module, linears, between[0]):
            up, down = (f"{name}.{n}".removeprefix(".") for n in linears)
            found[name] = up, down, module, between[0]
    return found


@torch.no_grad()
def is_network(module: nn.Module, linears: list[str], activation: str) -> bool:
    """True if a module computes the same in training if its first linear and its activation pass
    their input on and the second linear does all: tried on a copy, as what is between them, or
    reads the hidden state, cannot be known."""
    up, down = (conversion.weight_of(getattr(module, name)) for name in linears)
    if up.shape[0] != down.shape[1]:
        return False
    if up.is_meta or isinstance(up, FakeTensor):
        return True
    trial = copy.deepcopy(module).float().train()
    parts = [getattr(trial, name) for name in (linears[0], activation, linears[1])]
    first, between, second = (part.forward for part in parts)
    devices = [up.device] if up.is_cuda else []
    with torch.random.fork_rng(devices=devices):
        found = []
        try:
            for whole in (None, lambda x: second(between(first(x)))):
                if whole:
                    for part, forward in zip(parts, (unchanged, unchanged, whole), strict=True):
                        vars(part)["forward"] = forward
                torch.manual_seed(0)  # of dropout that comes after the network
                y = trial(torch.randn(1, 4, up.shape[1], device=up.device))
                found.append(y if isinstance(y, Tensor) else y[0])
        except Exception:  # of a module that takes other arguments, or hidden states of one size
            return False
    before, after = found
    same = before.shape == after.shape
    return same and bool((after - before).abs().max() <= 1e-4 * before.abs().max())


@torch.no_grad()
def is_squared_relu(module: nn.Module) -> bool:
    """True if a module without state squares what is positive and makes the rest zero."""
    if any(True for _ in module.parameters()):
        return False
    # In a plan of memory all tensors are fake. Dropout would take random numbers.
    with unset_fake_temporarily(), torch.random.fork_rng(devices=()):
        probe, squares = torch.tensor([-2.0, 0.0, 0.5, 3.0]), torch.tensor([0.0, 0.0, 0.25, 9.0])
        try:
            return torch.equal(module(probe), squares)
        except Exception:  # of a module that takes other arguments
            return False


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
        if not any(name in pair[:2] for pair in self._networks.values()):
            raise ValueError(
                "not one of two linears with a squared ReLU, as a module, and nothing else between "
                "them: set model.gelu=relu2, model.squared_relu=true or hidden_act='relu2', and "
                "dropout between them to 0"
            )
        if conversion.weight_of(module).shape[0] % 4:
            raise ValueError(f"{conversion.weight_of(module).shape[0]} outputs; a multiple of 4")

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
