"""Delayed scaling as in TransformerEngine: the FP8 scales of inputs and gradients come from the
largest magnitudes of earlier steps, so that a tensor is read only once to be quantised.

A layer keeps these fp32 buffers, with X first and dY second:

    amax_history  [2, HISTORY], saved: the largest magnitudes of the last optimizer steps, the most
                  recent first, over all micro-batches and ranks
    amax          [2], saved: the largest of these, from which the scales are computed
    amax_seen     [2], saved: the largest magnitudes in this step's micro-batches so far

The history begins when both X and dY have had a finite magnitude. Until then, in the first step and
skipped steps after it, the scales come from the current tensors. An entry that exceeds the whole
history saturates at the largest code.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common_kernels.fp8.cpu import record

HISTORY = 16  # optimizer steps
_SHAPES = {"amax_history": (2, HISTORY), "amax": (2,), "amax_seen": (2,)}


def given(place: int, x: Tensor, amax: Tensor | None, seen: Tensor | None) -> tuple[Tensor, ...]:
    """The arguments (amax, seen) for an operator that quantises x. Empty if x is to be scaled by
    its own magnitude, which is then recorded here. place: 0 for X, 1 for dY."""
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
    """Find out from the buffers, after they were loaded or cast, whether there is a history."""
    if "amax" not in layer._buffers:
        return
    for name in _SHAPES:
        held = getattr(layer, name).float()
        setattr(layer, name, held.masked_fill_(~held.isfinite(), 0.0))
    layer.has_history = bool(layer.amax.all())


def of(layer: Any) -> tuple[Tensor | None, Tensor | None]:
    """The state of `layer` for a pass, `amax` and `seen`, [2] each: the magnitudes that give the
    scales (None before there is a history), and the place where the current magnitudes are recorded
    (None without delayed scaling)."""
    if "amax" not in layer._buffers:
        return None, None
    return layer.amax if layer.has_history else None, layer.amax_seen


@torch.no_grad()
def update(layers: Iterable[nn.Module]) -> None:
    """Move the magnitudes seen in an optimizer step into the history, equally on all ranks. A
    magnitude that is not finite (the step is then skipped) is left out; if there is no other, the
    last scale stays. Once all layers have a history, nothing waits for the device, and each launch
    serves all layers."""
    # Layers in a dense phase have recorded nothing.
    delayed: list[Any] = [m for m in layers if "has_history" in vars(m) and m.fp8]
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
