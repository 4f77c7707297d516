"""The hooks of every 2:4 training method, with a default for each.

A driver, ours or the user's, calls a method in this order and nothing else:

    method = methods.build("s_ste", **options)
    report = method.convert(model)
    optimizer = method.optimizer(model.parameters(), lr=1e-3)  # or, for most methods, any other
    for step in range(steps):
        method.on_step_begin(step)
        for batch in micro_batches:
            (method.loss(model, batch) / len(micro_batches)).backward()
        # unscale and clip the gradients here; if one is not finite, so that a GradScaler will skip
        # the step, leave the next call out
        method.on_gradients(step, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        method.on_step_end(step)
        print(method.metrics())
    method.finalize(model)

Everything that depends only on the weights (masks, thresholds, scales, quantised copies) is
computed once per optimizer step, in `on_step_begin` or `on_step_end`, not in a forward pass.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from . import conversion, delayed, metrics, ranks, sharding
from .config import Capabilities as Capabilities
from .config import Config as Config
from .config import NMConfig as NMConfig
from .config import PartialConfig as PartialConfig
from .config import check_pattern as check_pattern
from .config import choice as choice
from .config import number as number
from .conversion import Report as Report
from .converter import Converter
from .linear import SparseLinear
from .optimizer import FusedAdamW, Optimizers, StepWork, each
from .order import CallOrder


def loss_of(output: Any) -> Tensor:
    """The loss in a model's output."""
    loss = output.loss if hasattr(output, "loss") else output[1]
    if loss is None or loss.ndim:
        raise TypeError(
            "model(**batch) must return (logits, scalar loss) or an object with .loss; with "
            "another model call open_micro_batch() before each forward pass instead of loss()"
        )
    return loss


class Method(Converter):
    """A training method; see the module docstring for the order of calls. Subclasses set `Config`
    and `Linear`, say in `abilities`, or in `capabilities` where it depends on options, what drivers
    must know, and override the hooks that they need."""

    saved: ClassVar[tuple[str, ...]] = ()  # attributes in `state_dict`

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.micro_batch = 0
        self.flips = metrics.FlipRates()
        self._order = CallOrder()
        self._had_gradients = False  # True once on_gradients was called
        self._works: dict[str, StepWork] = {}  # work that the optimizer has taken over, by layer

    def optimizer(self, groups: Any, **options: Any) -> torch.optim.Optimizer:
        """The optimizer that drivers use: AdamW, unless the method has its own update rule.

        Call it after `convert`, which may replace parameters.

        Args:
            groups, options: as for `torch.optim.AdamW`.
        """
        return torch.optim.AdamW(groups, **options)

    def on_step_begin(self, step: int) -> None:
        """Prepare optimizer step `step`; call it before the step's first micro-batch."""
        self._begin(step)
        self.micro_batch = 0
        self.select_bits(step)
        for layer in self.sparse_layers.values():
            if layer.shards is None:
                layer.draw()
        if self._measures(step):
            self.flips.begin(self.layers)
        self._remember(step)

    def _begin(self, step: int) -> None:
        if self._model is None:
            raise RuntimeError(
                "the method has no model: call convert(model) before the first step; finalize ends "
                "a training, so copy.deepcopy((model, method)) first to go on"
            )
        self._shard()
        # Loops that count from 1 have not trained before that step.
        if step > 1 and self._order.new and any(m.was_loaded for m in self.sparse_layers.values()):
            self._check_state(step)
        self._order.check_ended(self._trained(), step)
        total = self.config.total_steps
        if step == total > 0:
            warnings.warn(
                f"on_step_begin({step}) with total_steps={total}, of which {total - 1} is the last "
                "one; total_steps is the number of the optimizer's steps, all epochs together",
                stacklevel=3,
            )

    def _check_state(self, step: int) -> None:
        """Raise RuntimeError, or warn, if the method's own state matters in a training that goes on
        from a checkpoint at this step; called if only the model's state was loaded."""

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> Tensor:
        """The loss of one micro-batch, whose backward pass draws new random bits."""
        self.open_micro_batch()
        return self.micro_batch_loss(model, batch)

    def micro_batch_loss(self, model: nn.Module, batch: dict[str, Any]) -> Tensor:
        """The part of `loss` after `open_micro_batch`: by default the model's own loss, where
        `model(**batch)` returns (logits, loss) or an object with `.loss`. Methods with another loss
        override it. CUDA graphs replay it, so it must neither wait for the GPU nor depend on the
        step number."""
        if not isinstance(batch, Mapping):
            raise TypeError(
                "loss(model, batch) calls model(**batch), so a batch is a dict of the model's "
                f"arguments, not a {type(batch).__name__}; with another model call "
                "open_micro_batch() before each forward pass and compute the loss yourself"
            )
        return loss_of(model(**batch))

    def open_micro_batch(self) -> None:
        """Select new random bits for the next forward and backward pass."""
        if torch.is_grad_enabled():
            self._order.check_step_begun(self._trained())
        rank, size = ranks.place()
        number = self.micro_batch * size + rank
        self._set_keys(1, lambda _: number)
        self.micro_batch += 1

    def select_bits(self, step: int) -> None:
        """Set the part of the layers' keys that depends on the step; `open_micro_batch` sets that
        of the micro-batch."""
        seed = self.config.seed
        self._set_keys(0, lambda name: ranks.layer_seed(seed, name, step))

    def _set_keys(self, place: int, value: Callable[[str], int]) -> None:
        """Set entry `place` of the keys of all layers that draw random bits, given a layer's name,
        in three launches on each device."""
        on: dict[torch.device, list[tuple[SparseLinear, int]]] = {}
        for name, layer in self.sparse_layers.items():
            if "key" in layer._buffers:
                on.setdefault(layer.key.device, []).append((layer, value(name)))
        for given in on.values():
            keys = [layer.key for layer, _ in given]
            numbers = [key[place] for key in keys]
            torch._foreach_zero_(numbers)
            torch._foreach_add_(numbers, [value for _, value in given])
            for (layer, _), drawn in zip(given, torch.stack(keys).unbind(), strict=True):
                vars(layer)["drawn"] = drawn

    def on_gradients(self, step: int, optimizer: Optimizers = None) -> None:
        """Do the method's work on the gradients (masked decay, for example). Call it after
        unscaling and clipping, and before `optimizer.step()`. `optimizer`, or a list of all if
        there are several, is needed by options that use the learning rate, and by `FusedAdamW`,
        which takes over work of the method."""
        self._had_gradients = True
        self._order.check_step_begun((), changing=self.micro_batch > 0)
        if not self.micro_batch and any(layer.mvue for layer in self.sparse_layers.values()):
            raise RuntimeError(
                f"no micro-batch was opened in step {step}, so that all would draw equal random "
                "bits: call open_micro_batch() before each forward pass, or use loss(model, batch)"
            )
        self._works.clear()
        fused = next((own for own in each(optimizer) if isinstance(own, FusedAdamW)), None)
        if fused:
            works = {
                name: self.step_work(layer, step)
                for name, layer in self.sparse_layers.items()
                if layer._buffers.get("grouped_columns") is None  # its pass chooses whole rows
            }
            self._works = fused.accept({n: work for n, work in works.items() if work})

    def step_work(self, layer: Any, step: int) -> StepWork | None:
        """The work of `on_gradients` and `on_step_end` on the weight of `layer` in this step, for
        an optimizer that can do it in its own pass; None if only those hooks can do it. A method
        whose layer chooses masks or derives operands in a special way returns None, or a `StepWork`
        that describes it."""
        return None

    @torch.no_grad()
    def on_step_end(self, step: int) -> None:
        """Choose masks that are due and derive all operands; call it after `optimizer.step()`."""
        self._shard()
        self._order.check_step_begun(self._trained())
        self._order.end(step)
        if self.capabilities.acts_on_gradients and not self._had_gradients:
            self._order.check_on_gradients(self._trained(), step)
        self._derive(self._chooses(step))
        self._works.clear()
        delayed.update(self.sparse_layers.values())
        self.flips.count(self.layers, self.capabilities.mask_period, self.config.flips_by_layer)
        self._remember(None)

    def _derive(self, due: bool) -> None:
        """Derive the operands of all layers after a step, from new masks if these are due."""
        done = {name: work for name, work in self._works.items() if work.done}
        if due:
            for layer in (own for name, own in self.sparse_layers.items() if name not in done):
                layer.refresh_mask()
        sharding.gather_masks(self.sparse_layers.values())
        for name, layer in self.sparse_layers.items():
            if name not in done:
                layer.refresh()
            elif not done[name].derives:
                layer.refresh(done[name].amax)

    def _remember(self, begun: int | None) -> None:
        """Remember the weights' versions, so that later changes count as an optimizer step.

        begun: the step that has begun and not ended, if any.
        """
        self._order.remember(self._trained(), begun)
        for layer in self.sparse_layers.values():
            layer.mark_fresh()

    def _trained(self) -> Iterator[nn.Parameter]:
        for layer in self.layers.values():  # they have no submodules
            yield from (p for p in layer._parameters.values() if p is not None and p.requires_grad)

    def _chooses(self, step: int) -> bool:
        """True if masks are chosen at the end of this step."""
        return (step + 1) % self.capabilities.mask_period == 0

    def _measures(self, step: int) -> bool:
        every = self.config.measure_every
        # True if a multiple of `every` lies among the steps since the last choice.
        return every > 0 and self._chooses(step) and step % every < self.capabilities.mask_period

    def phase(self) -> str:
        """The name of the current training phase."""
        return "sparse"

    @property
    def unfinished(self) -> bool:
        """True if a phase that `total_steps` leads to has not begun yet."""
        return False

    @property
    def holds_pattern(self) -> bool:
        """True if the weights in use are meant to be n:m now."""
        return self.Linear is not None and self.phase() not in ("dense", "pruning")

    def finetuning(self, total_steps: int) -> Any | None:
        """The config with which this method continues in a fine-tuning of `total_steps` steps, from
        the layers as training left them. None if it has nothing to continue; a 2:4 model is then
        fine-tuned under its last mask.
        """
        return None

    def metrics(self) -> dict[str, float | int | str]:
        """The current metrics over all layers of the method.

        flip_rate_refresh: fraction of mask bits that changed at the last measured choice of masks;
            it stays as it is between two measurements (`measure_every`).
        flip_rate: the same divided by the number of steps between two choices; with
            `flips_by_layer`, `flip_rate.<name>` is that of one layer.
        density: fraction of non-zeros in the weights in use.
        illegal_groups: number of groups of m inputs with more than n non-zeros, where n:m is the
            layer's pattern; left out while the weights are not meant to have it.

        Raises:
            ValueError: the model is not converted, or already finalized.
        """
        if not self.layers:
            raise ValueError(
                "there are no converted layers to measure: call metrics() after convert(model) and "
                "before finalize(model)"
            )
        self._shard()
        patterns = {name: self.pattern(name) for name in self.layers}
        nonzeros, illegal, entries = metrics.weights(self.layers, patterns)
        of_layers = {f"flip_rate.{name}": rate for name, rate in self.flips.of_layers.items()}
        return {
            "flip_rate": self.flips.per_step,
            "flip_rate_refresh": self.flips.per_refresh,
            **of_layers,
            "density": nonzeros / max(1, entries),
            **({"illegal_groups": illegal} if self.holds_pattern else {}),
            "phase": self.phase(),
        }

    @torch.no_grad()
    def finalize(self, model: nn.Module) -> nn.Module:
        """Turn the converted layers back into plain `nn.Linear` in place, with explicit zeros.

        Raises:
            ValueError: `model` is another one than was converted.
            RuntimeError: the weights changed and no hook followed.
        """
        ended, total = self._order.ended, self.config.total_steps
        if ended is not None and ended + 1 < total and self.unfinished:
            warnings.warn(
                f"finalize after step {ended} with total_steps={total}: the training is still in "
                f"its phase '{self.phase()}', another one was to follow; total_steps is the number "
                "of the optimizer's steps, not of micro-batches",
                stacklevel=3,
            )
        self._shard()
        own, there = set(self.layers.values()), set(model.modules())
        if not own <= there or any(isinstance(m, SparseLinear) for m in there - own):
            raise ValueError(
                "finalize(model) takes the model that this method converted, not a copy, nor one "
                "whose linears were replaced; copy both together, as in "
                "copy.deepcopy((model, method)), or load the copy's state dict, and quantise after "
                "finalize"
            )
        for layer in self.sparse_layers.values():
            layer.check_fresh()
        for layer in self.sparse_layers.values():
            with sharding.rows(layer):
                layer.restore()
            conversion.from_linear(layer)
        for module, flag, value in self._fast:
            setattr(module, flag, value)
        self.layers, self.sparse_layers, self._model = {}, {}, None
        return model

    def state_dict(self) -> dict[str, Any]:
        """The method's state that is not in the model's parameters or buffers, as plain values."""
        own = {name: getattr(self, name) for name in self.saved}
        return {"method": type(self).__module__, **self.flips.state_dict(), **own}

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise ValueError if the state is that of another method."""
        saved, own = state.get("method"), type(self).__module__
        if saved not in (None, own):  # None: of an older version
            raise ValueError(
                f"this state was saved by {saved} and cannot continue with {own}: build the method "
                "that it was saved with"
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.check_state(state)
        self._order = CallOrder(resumed=True)
        self.flips.load_state_dict(state)
        for name in self.saved:
            setattr(self, name, state[name])
