"""One-shot pruning: a mask chosen once, by a score or by learning, and fine-tuning under it.

    GEMM   operand 1   operand 2   sparse operand, along
    fprop  X           W           weight, 2:4 along `in`
    dgrad  dY          W           the same weight (2:4 along `in`: a dense product on hardware)
    wgrad  dY          X           none; flows to W under the mask

`convert` prunes, and the mask never changes afterwards. Removed entries are exact zeros of the
Parameter and stay zero, because their gradient is masked (so it does not count in the clipped norm,
either). Without training this is the training-free baseline of AST (arXiv 2407.20584, Table 1);
with training it is "naive training" (Table 4), and with distillation "fixed mask". The model ends
2:4 sparse.

Wanda and SparseGPT prune the layers in the model's order, each for the inputs that come from the
layers already pruned, as both papers do. The released codes measure a whole transformer block
before any of its layers is pruned; here every layer is measured separately.

ProxSparse and MaskLLM learn the masks of all layers together, with the model's loss on the
calibration set (nn/learnt.py has their formulas); the weights are not changed.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from .nn import base, distillation, ranks
from .nn.calibration import collect, evaluating
from .nn.columns import partial_mask, split
from .nn.conversion import is_conv1d, weight_of
from .nn.gemms import DENSE, Products
from .nn.learnt import maskllm, proxsparse
from .nn.linear import MaskedLinear
from .nn.operands import Dense
from .nn.sparsegpt import prune

SCORES = ("magnitude", "wanda", "sparsegpt")
# The steps and the learning rate of the released codes, by learnt metric.
LEARNT = {"proxsparse": (400, 1e-4), "maskllm": (2000, 5e-4)}
METRICS = (*SCORES, *LEARNT)


@dataclass(frozen=True, kw_only=True)
class Config(distillation.Config, base.NMConfig, base.PartialConfig):
    """Options besides those of distillation, which is off by default.

    metric: the score of a weight: `magnitude` |W_ij|, `wanda` |W_ij| |X_j| (arXiv 2306.11695), or
        `sparsegpt` (arXiv 2301.00774), which also updates the kept weights; or how a mask is
        learnt: `proxsparse` (2:4 alone) or `maskllm` (m up to 8). All but the first need
        `Method.calibrate`, the last two with labels, on which the model returns its loss.
    calibration_sequences: number of sequences that a driver gives to `Method.calibrate`.
    mask_steps, mask_learning_rate: of the learning of a mask, on one calibration batch after the
        other, again and again; None for the released code's, LEARNT.
    penalty: ProxSparse's lambda. What it does grows with the size of the weights: the released
        scripts have 0.25 for LLaMA-2-7B and 0.5 for 13B.
    prior: the metric whose mask MaskLLM starts from, without an update of the weights.
    permute: permute the hidden channels of feed-forward networks first, so that the mask keeps more
        magnitude (nn/permutation.py).
    """

    task_weight: float = 1.0
    kl_weight: float = 0.0
    metric: str = base.choice("magnitude", METRICS)
    calibration_sequences: int = base.number(128, 1)
    mask_steps: int | None = base.number(None, 1)
    mask_learning_rate: float | None = base.number(None, 0)
    penalty: float = base.number(0.25, 0)
    prior: str = base.choice("sparsegpt", SCORES)
    permute: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.metric == "proxsparse" and self.pattern("") != (2, 4):
            raise ValueError(f"metric=proxsparse learns 2:4 masks, not {self.n}:{self.m}")
        if self.metric == "maskllm" and self.m > 8:
            raise ValueError(f"metric=maskllm has a logit per pattern, too many with m={self.m}")


class Linear(MaskedLinear):
    """A linear whose `mask` (bool [out, in], saved) only `prune` changes. Entries outside the mask
    are zeros of `weight` itself."""

    masks_gradient = True

    def setup(self, name: str, config: Any, dtype: torch.dtype | None) -> None:
        super().setup(name, config, dtype)
        self.mask.fill_(True)

    @property
    def phase(self) -> str:
        mask = self.grouped(self.mask)
        kept = int(mask.count_nonzero())  # gradual methods remove entries over many steps
        whole, (n, m) = mask.numel(), self.pattern
        return "dense" if kept == whole else "sparse" if m * kept <= n * whole else "pruning"

    def sparse_products(self) -> Products:
        return DENSE

    def choose_mask(self) -> None:
        """Do nothing: the mask does not follow the weights."""

    @torch.no_grad()
    def prune(self, mask: Tensor) -> None:
        """Keep the entries under `mask` [out, in] and set all others to zero."""
        self.mask.copy_(mask)
        self.refresh()

    @torch.no_grad()
    def update_buffers(self) -> None:
        # The optimizer's momentum can still move an entry that was pruned during training.
        self.weight.masked_fill_(~self.mask, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        x = self.checked_input(x)
        return Dense(self.in_place(x.dtype)).linear(x, self.bias)


class Method(distillation.Method):
    Config = Config
    Linear = Linear
    _batches: Sequence[Mapping[str, Any]] = ()
    _learnt: Mapping[str, Tensor] = {}  # masks, while the model is converted

    @property
    def capabilities(self) -> base.Capabilities:
        wanted = 0 if self.config.metric == "magnitude" else self.config.calibration_sequences
        given = super().capabilities
        return replace(given, changes_only_weights=True, calibration_sequences=wanted)

    def calibrate(self, model: nn.Module, batches: Iterable[Mapping[str, Any]]) -> None:
        """Keep the batches for `convert`, which runs the model on them once per layer."""
        self._batches = list(batches)
        for batch in self._batches:
            if not isinstance(batch, Mapping):
                raise TypeError(f"batches are dicts, as method.loss takes them, not {type(batch)}")

    @torch.no_grad()
    def convert(self, model: nn.Module, dtype: torch.dtype | None = None) -> base.Report:
        if self.capabilities.calibration_sequences and not self._batches:
            raise ValueError(
                f"metric={self.config.metric} needs inputs: call method.calibrate(model, batches) "
                "before convert, or choose metric=magnitude"
            )
        # The operands get their dtype last: calibration must not see rounded weights.
        report = super().convert(model)
        for name, layer in self.layers.items():
            mask = self._learnt.get(name)
            if mask is None:
                mask, updated = self._choose_mask(model, name, layer, self.config.metric)
                layer.weight.copy_(updated)
            layer.prune(mask)
        for layer in self.sparse_layers.values():
            layer.dtype = dtype or layer.weight.dtype
            layer.operand = layer.sparse_weight.to(layer.dtype)
        self._batches, self._learnt = (), {}
        return report

    def _prepare(self, model: nn.Module, chosen: dict[str, Any]) -> None:
        super()._prepare(model, chosen)
        if self.config.metric in LEARNT:
            self._learnt = self._learn(model, chosen)

    def _choose_mask(
        self, model: nn.Module, name: str, layer: nn.Linear, metric: str
    ) -> tuple[Tensor, Tensor]:
        """The mask of a layer by this metric, and its weight [out, in], which SparseGPT updates."""
        weight, (n, m) = weight_of(layer).detach(), self.config.pattern(name)
        grouped, dense = split(weight, self.config.dense_columns, m)
        if metric == "magnitude":
            return partial_mask(weight, grouped, n, m), weight
        inputs = collect(model, {name: layer}, self._batches, hessian=metric == "sparsegpt")[name]
        if inputs.hessian is None:
            scores = weight.float() * inputs.square_sum.sqrt()
            return partial_mask(scores, grouped, n, m), weight
        order = torch.cat([grouped, dense])
        hessian = inputs.hessian[order][:, order]
        mask, updated = prune(weight[:, order], hessian, n=n, m=m, grouped=len(grouped))
        back = order.argsort()
        return mask[:, back], updated[:, back]

    def _learn(self, model: nn.Module, linears: dict[str, Any]) -> dict[str, Tensor]:
        """The learnt masks by layer, of rank 0; `model` is left as it was."""
        config = self.config
        whole = {name: weight_of(linear).detach() for name, linear in linears.items()}
        grouped = {n: split(w, config.dense_columns, config.m)[0] for n, w in whole.items()}
        weights = {name: weight[:, grouped[name]] for name, weight in whole.items()}

        def loss(used: Mapping[str, Tensor], batch: Mapping[str, Any]) -> Tensor:
            given = {}
            for name, linear in linears.items():
                weight = whole[name].index_copy(
                    1, grouped[name], used[name].to(linear.weight.dtype)
                )
                key = f"{name}.weight".lstrip(".")
                given[key] = weight.t() if is_conv1d(linear) else weight
            return base.loss_of(functional_call(model, given, (), dict(batch)))

        steps, rate = LEARNT[config.metric]
        steps = steps if config.mask_steps is None else config.mask_steps
        rate = rate if config.mask_learning_rate is None else config.mask_learning_rate
        shared = loss, self._batches, steps, rate
        with evaluating(model), torch.enable_grad():
            if config.metric == "proxsparse":
                masks = proxsparse(weights, *shared, config.penalty)
            else:
                priors = self._priors(model, linears)
                priors = {name: prior[:, grouped[name]] for name, prior in priors.items()}
                masks = maskllm(weights, priors, *shared, config.n, config.m, config.seed)
        found = {name: torch.ones_like(w, dtype=torch.bool) for name, w in whole.items()}
        for name, mask in masks.items():
            found[name].index_copy_(1, grouped[name], mask)
        ranks.take_from_rank_0(found.values())
        return found

    @torch.no_grad()
    def _priors(self, model: nn.Module, linears: dict[str, Any]) -> dict[str, Tensor]:
        """The masks by `prior`, each chosen behind layers that are pruned already."""
        priors, whole = {}, {}
        for name, linear in linears.items():
            weight = weight_of(linear)
            whole[name] = weight, weight.clone()
            priors[name], _ = self._choose_mask(model, name, linear, self.config.prior)
            weight.masked_fill_(~priors[name], 0.0)
        for weight, values in whole.values():
            weight.copy_(values)
        return priors
