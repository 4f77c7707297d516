"""Measures the predicted and the actual change of the loss on an optimizer step's own batch.

A step changes the weights from w to w', and the masks, if the method keeps any, from m to m'. Let F
be the loss of the step's batch, in training mode and with equal dropout. Measured are (S-STE, arXiv
2409.09099, section 3; a reduction of the loss is negative):

    predicted_change    <g, w' - w>             the first order, g the gradient at (w, m)
    actual_change       F(w', m') - F(w, m)
    old_masks_change    F(w', m) - F(w, m)      only with masks

g is computed separately. If the method samples, it is another sample than the step's, so that the
step's own noise does not count as predicted descent. The measurement does not affect the training.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from experiments.data.source import Batch
from experiments.training.optimization import Optimization, generators, set_generators
from methods.nn.linear import MaskedLinear


class Descent:
    """The measurement of one step, whose micro-batches are as `Optimization.step` takes them:
    create it before the step and call `after` after the step."""

    def __init__(
        self, optimization: Optimization, batches: Sequence[Batch], shares: Sequence[float]
    ) -> None:
        self.optimization, self.shares = optimization, shares
        self.batches = [optimization.to_device(batch) for batch in batches]
        self.generators = generators(optimization.device)
        layers = optimization.method.layers.values()
        masked = [own for own in layers if isinstance(own, MaskedLinear) and "mask" in own._buffers]
        self.masks = [(layer, layer.mask.clone()) for layer in masked]
        # Magnitudes that delayed scaling has recorded; the extra passes must not add to them.
        delayed: list[Any] = [layer for layer in layers if hasattr(layer, "amax_seen")]
        self.seen: list[Tensor] = [layer.amax_seen for layer in delayed]
        self.loss, self.scale = self._loss(), optimization.scaler.get_scale()
        parameters = [p for p in optimization.model.parameters() if p.grad is not None]
        self.weights = [(p, p.detach().clone(), p.grad) for p in parameters]
        optimization.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def after(self) -> dict[str, Tensor]:
        """The changes on this rank; their mean over the ranks is that of the whole batch."""
        predicted = torch.zeros((), dtype=torch.float64, device=self.optimization.device)
        for parameter, weight, gradient in self.weights:
            assert gradient is not None
            predicted += (gradient.double() * (parameter.detach() - weight)).sum() / self.scale
        changes = {"predicted_change": predicted, "actual_change": self._loss() - self.loss}
        if self.masks:
            new = [layer.mask.clone() for layer, _ in self.masks]
            self._put([mask for _, mask in self.masks])
            changes["old_masks_change"] = self._loss() - self.loss
            self._put(new)
        return changes

    def _put(self, masks: list[Tensor]) -> None:
        for (layer, _), mask in zip(self.masks, masks, strict=True):
            layer.mask.copy_(mask)
            layer.update_operands()

    def _loss(self) -> Tensor:
        """The loss of the batch, always with the same dropout. If gradients are enabled, they are
        added to the parameters' gradients, scaled as in a step."""
        optimization, device = self.optimization, self.optimization.device
        seen = [amax.clone() for amax in self.seen]
        total = torch.zeros((), device=device)
        with torch.random.fork_rng([device] if device.type == "cuda" else ()):
            set_generators(self.generators, device)
            for batch, share in zip(self.batches, self.shares, strict=True):
                with optimization.autocast():
                    loss = optimization.method.micro_batch_loss(optimization.model, batch) * share
                if torch.is_grad_enabled():
                    optimization.scaler.scale(loss).backward()
                total += loss.detach()
        for amax, before in zip(self.seen, seen, strict=True):
            amax.copy_(before)
        return total
