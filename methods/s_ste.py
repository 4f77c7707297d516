"""S-STE: a continuous 2:4 projection, a frozen scale, MVUE on the output gradient, FP8.

    GEMM   operand 1        operand 2             sparse operand, along        FP8 (paper)
    fprop  X                beta * S(W)           weight, 2:4 along `in`       e4m3 x e4m3
    dgrad  dY               beta * S(W)           the same weight              e5m2 x e5m2
    wgrad  MVUE(dY)         X                     dY, 2:4 along tokens         e5m2 x e5m2
           goes to W unchanged: neither multiplied by beta nor masked

S subtracts from the magnitudes of each group of four the second smallest and clips at zero (S-STE,
section 4.1), so that a weight becomes zero or non-zero continuously. beta = <W, S(W)> /
<S(W), S(W)> is measured once, at conversion, and then frozen (section 4.2): measured again during
training it grows, and the flip rate with it. There is no decay and no dense phase; the model ends
2:4 sparse, as beta * S(W).

The released code casts dY to fp16 before the backward products, whatever the precision of the
run; here dY stays in the dtype of the run.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from common_kernels import mvue24, quantize_fp8, soft_threshold24
from common_kernels.adamw import Rule
from common_kernels.fp8.weights import quantize24_
from common_kernels.pack.operands import pack24_

from .nn import base, precision
from .nn.gemms import DENSE, Products
from .nn.linear import SparseLinear
from .nn.operands import Dense
from .nn.optimizer import StepWork

# Offset of the random numbers for the weight's sample; those for dY count up from 0.
_WEIGHT_STREAM = 1 << 60


@dataclass(frozen=True, kw_only=True)
class Config(base.Config):
    """Options of S-STE; the defaults are the paper's without FP8.

    beta: scale of the projection (Table 2): `none` (1), `keep_l1` (|W|_1 / |S(W)|_1), `mse`
        (minimises |W - beta S(W)|^2, frozen at conversion), `mse_dynamic` (the same, measured in
        every step).
    gamma: position of the threshold between the second smallest magnitude (0) and the third (1)
        (Table 1).
    mvue: sample dY for wgrad: `exact` (minimum variance), `sequential` (the released code's design)
        or `off`.
    mvue_weight: sample the weight along `out` for dgrad, which Table 3 shows to be harmful.
    fp8: FP8 products: `off`, `paper` (formats above), `hybrid` (e5m2 only for dY) or `hopper` (the
        paper's, but W in e4m3 for dgrad). `paper` and `hybrid` are always simulated; `hopper` runs
        on FP8 units if `Method.accelerate` finds them, and is simulated elsewhere
        (nn/fp8_gemms.py). `hopper_delayed` is `hopper` with delayed scaling (nn/delayed.py).
    """

    beta: str = base.choice("mse", ("none", "keep_l1", "mse", "mse_dynamic"))
    gamma: float = base.number(0.0, 0, 1)
    mvue: str = "exact"
    mvue_weight: bool = False
    fp8: str = "off"


def projection_scale(weight: Tensor, projected: Tensor, recipe: str) -> Tensor:
    """beta for `weight` [out, in] and S(weight), a 0-dim fp32 tensor; 1 if S(weight) is all 0."""
    w, s = weight.float(), projected.float()
    if recipe == "none":
        return w.new_ones(())
    if recipe == "keep_l1":
        numerator, denominator = w.abs().sum(), s.abs().sum()
    else:
        numerator, denominator = (w * s).sum(), (s * s).sum()
    return torch.where(denominator > 0, numerator / denominator, 1.0)


class Linear(SparseLinear):
    """A linear that computes with beta * S(W).

    State besides the base class's: `scale` (beta, fp32, saved); with `mvue_weight` and without FP8
    `operand_dgrad` [out, in], dgrad's weight, derived and not saved.
    """

    config: Config
    scale: Tensor
    operand_dgrad: Tensor | None
    rounds_first = False  # the threshold must come from the unrounded weight

    @property
    def prunes(self) -> str:  # type: ignore[override]
        return "" if self.config.gamma or self.config.mvue_weight else "soft"

    @property
    def mvue(self) -> str | None:
        return None if self.config.mvue == "off" else self.config.mvue

    def setup(self, name: str, config: Any, dtype: torch.dtype | None) -> None:
        super().setup(name, config, dtype)
        weight = self.weight.detach()
        projected = soft_threshold24(weight, config.gamma)
        self.register_buffer("scale", projection_scale(weight, projected, config.beta))
        own = torch.empty_like(weight, dtype=self.dtype) if config.mvue_weight else None
        self.register_buffer("operand_dgrad", None if self.fp8 else own, persistent=False)

    def exact_weight(self) -> Tensor:
        """beta * S(W) in fp32."""
        return self.scale * soft_threshold24(self.weight.detach(), self.config.gamma).float()

    def effective_weight(self) -> Tensor:
        return self.exact_weight().to(self.weight.dtype)

    @property
    def rows_together(self) -> int:  # type: ignore[override]
        return 0 if self.config.beta == "mse_dynamic" else 1

    def update_buffers(self) -> None:
        if self.config.beta == "mse_dynamic":
            weight = self.weight.detach()
            projected = soft_threshold24(weight, self.config.gamma)
            self.scale.copy_(projection_scale(weight, projected, self.config.beta))

    def derive(self, amax: Tensor | None = None) -> None:
        super().derive(amax)
        if self.operand_dgrad is not None:
            self.operand_dgrad.copy_(self.sparse_weight)

    def pack(self) -> None:
        fprop, _ = self.packed_operands()
        assert fprop is not None
        weight, dense = self.weight.detach(), self.operand
        if self.config.gamma:
            pack24_(fprop.matrix, self.effective_weight(), "magnitude", dense=dense)
        else:
            pack24_(fprop.matrix, weight, "soft", scale=self.scale, dense=dense)

    def quantize(self, amax: Tensor | None) -> None:
        gamma, room = self.config.gamma, precision.room(self)
        weight, beta = (self.exact_weight(), None) if gamma else (self.weight.detach(), self.scale)
        quantize24_(*room, self.code_scales, weight, amax=amax, beta=beta)

    def sparse_products(self) -> Products:
        return replace(super().sparse_products(), fprop=True)

    def candidates(self) -> Products:
        if self.precision and (self.config.gamma or self.config.mvue_weight):
            return DENSE  # simulated only
        return super().candidates()

    def operands(self, dtype: torch.dtype) -> tuple[Any, Any]:
        fprop, dgrad = super().operands(dtype)
        own = self._buffers["operand_dgrad"]  # quicker than an attribute
        return fprop, dgrad if own is None else Dense(own.to(dtype))

    @torch.no_grad()
    def draw(self) -> None:
        """Draw a new sample of the weight for dgrad, which all micro-batches of a step share."""
        if not self.config.mvue_weight:
            return
        sample = mvue24(self.effective_weight(), self.key[0], _WEIGHT_STREAM, dim=0)
        if self.fp8:
            assert self.codes_dgrad is not None
            codes, scale = quantize_fp8(sample, self.fp8.dgrad)
            self.codes_dgrad.copy_(codes)
            self.code_scales[1].copy_(scale)
        else:
            assert self.operand_dgrad is not None
            self.operand_dgrad.copy_(sample)


class Method(base.Method):
    Config = Config
    Linear = Linear
    abilities = base.Capabilities(changes_only_weights=True)

    def step_work(self, layer: Any, step: int) -> StepWork | None:
        config = self.config
        # A dynamic scale needs a sum over the whole weight first.
        if config.gamma or config.mvue_weight or config.beta == "mse_dynamic":
            return None
        return StepWork(layer=layer, rule=Rule(source="soft"), scale=layer.scale)

    def finetuning(self, total_steps: int) -> base.Config:
        """The config that keeps projecting the weights with the scale of training, in full
        precision and without sampling, as in the paper's evaluation."""
        plain: Any = {"fp8": "off", "mvue": "off", "mvue_weight": False}
        return replace(self.config, total_steps=total_steps, **plain)
