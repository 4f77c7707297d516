"""AST: Adaptive Sparse Trainer, retraining of a dense model under a 2:4 mask that adapts.

    GEMM   operand 1   operand 2     sparse operand, along
    fprop  X           W * M         weight, 2:4 along `in`; plus (X X'^T) S^T with SLoRB
    dgrad  dY          W * M         the same weight (a dense product on hardware)
    wgrad  dY          X             none; flows to W unmasked

AST (arXiv 2407.20584, AAAI 2025). M is chosen from the dense W every `refresh_every` optimizer
steps. Pruned weights decay by lambda(t), which rises linearly and then stays constant ("annealing
SR-STE"). The loss is a mix of the task's loss and the KL divergence from the dense model
(nn/distillation.py). SLoRB (nn/slorb.py) adds a low-rank term; its S and X are ordinary parameters,
so the optimizer's weight decay acts on them unless they are in a parameter group without it. The
model ends 2:4 sparse; layers with SLoRB end as `lowrank.BoostedLinear`.

Paper and released code differ. The released GPT-2 code complements an integer mask, so that its
"decay" makes all weights grow, and its LLaMA code adds the decay to the gradient. Here masks are
boolean and the paper's route is the default. The paper gives lambda(t) = alpha t up to T0; `alpha`
here is lambda's final value. The KL has temperature 2 in the released code and 1 in the paper.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from . import sr_ste
from .nn import base, calibration, distillation, lowrank, slorb
from .nn.conversion import become, check_low_rank, weight_of
from .nn.linear import MaskedLinear
from .nn.optimizer import Optimizers, each, group_of

Rule = TypeVar("Rule", bound="AdamW")
ROUTES = "decoupled_first_moment", "gradient", "decoupled"  # of the decay


@dataclass(frozen=True, kw_only=True)
class Config(distillation.Config, base.PartialConfig):
    """Options of AST, besides those of distillation.

    metric: the score by which a mask keeps weights: |W| (`magnitude`), or |W| times the norm of its
        input over calibration tokens (`wanda`), which `Method.calibrate` measures once.
    calibration_sequences: number of sequences that a driver gives to `Method.calibrate`.
    refresh_every: optimizer steps between two choices of the masks; 0 = never after the first.
    alpha: decay factor lambda at the end of its ramp.
    ramp_fraction: length of the ramp as a fraction of `total_steps`. ramp_steps: the length in
        optimizer steps instead; 0 = constant from the start.
    decay_route: `decoupled_first_moment` (the paper's: u = m + lambda (1 - M) W, and the step is u
        divided by the root of the mean of u^2; it needs `Method.optimizer`), `gradient` (added to
        the gradient after clipping, so that both of Adam's moments include it), or `decoupled`
        (W -= lr lambda (1 - M) W). The last two work with any optimizer.
    slorb_k: number of inputs per rank of SLoRB; 0 = off.
    slorb_train_x: train X as a dense matrix, instead of keeping the fixed indicator of blocks.
    """

    metric: str = base.choice("magnitude", ("magnitude", "wanda"))
    calibration_sequences: int = base.number(128, 1)
    refresh_every: int = base.number(10, 0)
    alpha: float = base.number(1e-4, 0, sr_ste.LARGEST)
    ramp_fraction: float = base.number(0.25, 0, 1)
    ramp_steps: int | None = base.number(None, 0)
    decay_route: str = base.choice(ROUTES[0], ROUTES)
    slorb_k: int = base.number(0, 0)
    slorb_train_x: bool = True


class Linear(MaskedLinear):
    """A masked linear, optionally with SLoRB.

    State besides `MaskedLinear`'s, all saved: `input_norm` (fp32 [in], with the Wanda metric) and
    the Parameters `slorb_s` [out, in / k] and `slorb_x` [in / k, in] (None if X is fixed).
    """

    config: Config
    prunes = "mask"
    input_norm: Tensor
    slorb_s: nn.Parameter | None
    slorb_x: nn.Parameter | None

    def setup(self, name: str, config: Any, dtype: torch.dtype | None) -> None:
        super().setup(name, config, dtype)
        if config.metric == "wanda":
            norm = torch.ones(self.in_features, device=self.weight.device)
            self.register_buffer("input_norm", norm)
        self.slorb_s = self.slorb_x = None
        if config.slorb_k:
            rank = self.in_features // config.slorb_k
            self.slorb_s = nn.Parameter(self.weight.new_empty(self.out_features, rank))
            if config.slorb_train_x:
                self.slorb_x = nn.Parameter(self.weight.new_empty(rank, self.in_features))

    def begin(self, input_norm: Tensor | None) -> None:
        """Choose the first mask, and initialise S and X for it."""
        if input_norm is not None:
            self.input_norm.copy_(input_norm)
        self.mask.copy_(self.best_mask())
        self.refresh()
        if self.slorb_s is not None:
            slorb.initialize(self.weight, self.mask, self.slorb_s, self.slorb_x)

    def best_mask(self) -> Tensor:
        """The mask that keeps the highest scores now."""
        scores = self.weight.detach()
        if self.config.metric == "wanda":
            scores = scores * self.input_norm  # in fp32
        return self.best_of(scores)

    def choose_mask(self) -> None:
        if self.config.refresh_every:
            self.mask.copy_(self.best_mask())

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        y = super().forward(x)
        return y if self.slorb_s is None else y + slorb.boost(x, self.slorb_s, self.slorb_x)

    def restore(self) -> None:
        super().restore()
        if self.slorb_s is None:
            del self.slorb_s, self.slorb_x
        else:
            become(self, lowrank.BoostedLinear)


class Method(distillation.Method):
    Config = Config
    Linear = Linear
    input_norms: Mapping[str, Tensor] = {}

    @property
    def capabilities(self) -> base.Capabilities:
        config = self.config
        own_rule = config.decay_route == "decoupled_first_moment"
        return replace(
            super().capabilities,
            mask_period=config.refresh_every or 1,  # with 0 the mask never changes
            acts_on_gradients=config.alpha > 0 or own_rule,
            needs_adamw=own_rule,
            calibration_sequences=config.calibration_sequences * (config.metric == "wanda"),
        )

    @property
    def fraction(self) -> str:
        ramps = self.config.ramp_steps is None and self.config.ramp_fraction
        return "ramp_fraction" if ramps else ""

    def calibrate(self, model: nn.Module, batches: Iterable[Mapping[str, Any]]) -> None:
        """Measure the input norms of the linears to be converted, for the Wanda metric.

        Call it before `convert`: the norms are those of the dense model and are measured only once.
        """
        found = calibration.collect(model, self.matching_linears(model), batches)
        self.input_norms = {n: (s.square_sum / s.count).sqrt() for n, s in found.items()}

    def convert(self, model: nn.Module, dtype: torch.dtype | None = None) -> base.Report:
        missing = self.matching_linears(model).keys() - self.input_norms.keys()
        if self.config.metric == "wanda" and missing:
            raise ValueError(
                f"metric=wanda needs the input norms of {min(missing)}: call "
                "method.calibrate(model, batches) before convert"
            )
        report = super().convert(model, dtype)
        with torch.no_grad():
            for name, layer in self.sparse_layers.items():
                layer.begin(self.input_norms.get(name))
        self.input_norms = {}
        return report

    def check_layer(self, name: str, module: nn.Module) -> None:
        if (inputs := weight_of(module).shape[1]) % 4:
            raise ValueError(f"{inputs} inputs; 2:4 needs a multiple of 4")
        if k := self.config.slorb_k:
            if inputs % k:
                raise ValueError(f"slorb_k={k} does not divide its {inputs} inputs; choose another")
            check_low_rank(module)

    def decay(self, step: int) -> float:
        """lambda at optimizer step `step`: a linear ramp from 0, then constant."""
        config = self.config
        length = config.ramp_steps
        if length is None:
            length = round(config.ramp_fraction * config.total_steps)
        return config.alpha * min(1.0, step / length) if length else config.alpha

    def optimizer(self, groups: Any, **options: Any) -> torch.optim.Optimizer:
        own_rule = self.capabilities.needs_adamw
        return AdamW(groups, **options) if own_rule else super().optimizer(groups, **options)

    def finetuning(self, total_steps: int) -> base.Config | None:
        """With SLoRB, the config that trains the low-rank terms along with the weights, under the
        last masks; without it None."""
        if not self.config.slorb_k:
            return None
        kept = "include", "exclude", "seed", "slorb_k", "slorb_train_x", "dense_columns"
        own: Any = {name: getattr(self.config, name) for name in kept}
        own |= {"task_weight": 1.0, "kl_weight": 0.0, "decay_route": "gradient"}
        return Config(**own, total_steps=total_steps, refresh_every=0, alpha=0.0)

    @torch.no_grad()
    def on_gradients(self, step: int, optimizer: Optimizers = None) -> None:
        super().on_gradients(step, optimizer)
        route, decay = self.config.decay_route, self.decay(step)
        layers = self.layers.values()
        if route == "decoupled_first_moment":
            advice = ', or the method with decay_route="gradient"'
            for own in give_masks(AdamW, layers, optimizer, advice):
                own.decay = decay
            return
        for layer in layers:
            sr_ste.decay_(layer, decay, route == "decoupled", optimizer)


def give_masks(
    kind: type[Rule], layers: Iterable[Any], optimizer: Optimizers, advice: str = ""
) -> list[Rule]:
    """Give the masks of `layers` to the optimizers of class `kind` for their next step, and return
    these. Raises ValueError if another optimizer holds a layer's weight."""
    optimizers = each(optimizer)
    for own in {group_of(optimizers, layer.weight)[0] for layer in layers}:
        if not isinstance(own, kind):
            raise ValueError(
                f"{kind.METHOD} has its own update rule, which {type(own).__module__}."
                f"{type(own).__name__} lacks: make the optimizer with method.optimizer("
                f"parameters, lr=...){advice}"
            )
    found = [own for own in optimizers if isinstance(own, kind)]
    for own in found:
        own.masks = {layer.weight: layer.mask for layer in layers}
    return found


class AdamW(torch.optim.Optimizer):
    """AdamW that updates masked weights by AST's rule, and other parameters as torch's AdamW does.

        W <- (1 - lr wd) W;   m <- b1 m + (1 - b1) g;   u = m + lambda (1 - M) W
        v <- b2 v + (1 - b2) u^2;   W <- W - lr / (1 - b1^t) u / (sqrt(v / (1 - b2^t)) + eps)

    The decay enters the second moment but not the first. Since v averages u^2 and not g^2, its
    noise is averaged, too: if the gradient is mostly noise, a step is sqrt((1 + b1) / (1 - b1))
    times that of AdamW (4.4 for b1 = 0.9), and the first step 1 / (1 - b1) times. Compare the two
    at matched learning rates. `Method.on_gradients` sets `masks` and `decay` for each step.
    """

    METHOD: ClassVar[str] = "AST"
    decay: float = 0.0
    masks: dict[Tensor, Tensor] | None = None

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        fused: bool | None = None,  # ignored; it changes only the speed
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.masks is None and any(group["lr"] for group in self.param_groups):
            raise RuntimeError("call method.on_gradients(step, optimizer) before optimizer.step()")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, (self.masks or {}).get(parameter), group)
        self.masks = None  # on_gradients must set them again for the next step
        return loss

    def _update(self, weight: Tensor, mask: Tensor | None, group: dict[str, Any]) -> None:
        lr, eps, (beta1, beta2) = group["lr"], group["eps"], group["betas"]
        state, grad = self.state[weight], weight.grad
        assert grad is not None
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(weight)
            state["exp_avg_sq"] = torch.zeros_like(weight)
        state["step"] += 1
        weight.mul_(1 - lr * group["weight_decay"])
        first = state["exp_avg"].lerp_(grad, 1 - beta1)
        update, measured = first, grad
        if mask is not None:
            update = measured = first + self.decay_of(weight, mask)
        second = state["exp_avg_sq"].mul_(beta2).addcmul_(measured, measured, value=1 - beta2)
        correction1, correction2 = (1 - beta ** state["step"] for beta in (beta1, beta2))
        denominator = (second / correction2).sqrt_().add_(eps)
        weight.addcdiv_(update, denominator, value=-lr / correction1)

    def decay_of(self, weight: Tensor, mask: Tensor) -> Tensor:
        """The decay term lambda (1 - M) W."""
        return self.decay * torch.where(mask, 0.0, weight)
