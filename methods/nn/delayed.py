"""Delayed scaling, after TransformerEngine: FP8 scales of inputs and gradients follow from the
largest magnitudes of the last steps, so that a tensor is read once to be quantised.

A layer with it keeps, all fp32, first of X and then of dY:

    amax_history  [2, HISTORY], saved: the largest magnitudes of the last optimizer steps, the last
                  one first, over all micro-batches and ranks
    amax          [2], saved: the largest of these, which scales follow from
    amax_seen     [2], saved: the largest in the micro-batches of this step so far

Until X and dY have both had a magnitude there is no history: a step takes the scales of its own
tensors, the first one and those behind it that are skipped. What grows from one step to the next
beyond all of its history becomes the largest code.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common_kernels.fp8.cpu import record

HISTORY = 16  # optimizer steps
_SHAPES = {"amax_history": (2, HISTORY), "amax": (2,), "amax_seen": (2,)}


class Amax(NamedTuple):
    """The state that the products of a layer take, each [2]: the magnitudes that scales follow
    from, None before there is a history, and where those that there are go, None for current
    scaling."""

    amax: Tensor | None
    seen: Tensor | None


NONE = Amax(None, None)


def given(place: int, x: Tensor, amax: Tensor | None, seen: Tensor | None) -> tuple[Tensor, ...]:
    """The arguments (amax, seen) of an operator that quantises x, none for a scale of its own; what
    that one has seen is taken down here. place: 0 for X, 1 for dY."""
    if seen is None:
        return ()
    if amax is None:
        record(seen[place], x)
        return ()
    return amax[place], seen[place]


def setup(layer: Any, device: torch.device) -> None:
    """Give `layer` an empty history."""
    for name, shape in _SHAPES.items():
        layer.register_buffer(name, torch.zeros(shape, device=device))
    layer.has_history = False


def reload(layer: Any) -> None:
    """Read from the buffers, which came from elsewhere or were cast, whether there is a history."""
    for name in _SHAPES:
        held = getattr(layer, name).float()
        setattr(layer, name, held.masked_fill_(~held.isfinite(), 0.0))
    layer.has_history = bool(layer.amax.all())


def of(layer: Any) -> Amax:
    """The state of `layer`."""
    return Amax(layer.amax if layer.has_history else None, layer.amax_seen)


@torch.no_grad()
def update(layers: Iterable[nn.Module]) -> None:
    """At the end of an optimizer step: take what was seen into the history, on all ranks alike.

    A magnitude that is not finite, that of a step which is skipped, is left out; where there is
    none the last scale stays. Once all layers have a history nothing waits for the device, in
    launches for all layers together.
    """
    # Those in a dense phase have seen nothing.
    delayed: list[Any] = [m for m in layers if hasattr(m, "has_history") and m.fp8]
    if not delayed:
        return
    seen = torch.stack([layer.amax_seen for layer in delayed])
    seen.masked_fill_(~seen.isfinite(), 0.0)
    if dist.is_initialized():
        dist.all_reduce(seen, dist.ReduceOp.MAX)
    old = torch.stack([layer.amax_history for layer in delayed])
    history = torch.cat([seen[..., None], old[..., :-1]], -1)
    amax, before = history.amax(-1), torch.stack([layer.amax for layer in delayed])
    amax = torch.where(amax > 0, amax, before)
    torch._foreach_copy_([layer.amax_history for layer in delayed], list(history.unbind()))
    torch._foreach_copy_([layer.amax for layer in delayed], list(amax.unbind()))
    torch._foreach_zero_([layer.amax_seen for layer in delayed])
    if not all(layer.has_history for layer in delayed):
        for layer, has_history in zip(delayed, amax.all(-1).tolist(), strict=True):
            layer.has_history = has_history
