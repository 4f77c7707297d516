"""Forward and backward passes that are replayed from CUDA graphs.

Where layers are small, Python takes longer to launch a pass than the GPU to run it. A graph holds
all launches of a pass and is started by one call. What happens in between (hooks, clipping, the
optimizer) is launched as ever, so phases, refreshes of masks and loss scaling need no care: they
write to the tensors that the graphs read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from experiments.data.source import Batch
from experiments.support.errors import UserError
from models.hf import CausalLM

# Steps of one kind that are launched before it is captured: in them torch compiles and libraries
# allocate their workspaces, which a capture does not allow.
LAUNCHED = 3

Part = tuple[Batch, float]  # a micro-batch on the device and its share of the step's samples
Kind = tuple[object, ...]


def require_graphs(device: torch.device, ranks: int, model: nn.Module) -> None:
    """Refuse what graphs cannot serve.

    Raises:
        UserError: there is no GPU, there are several processes, or the model is of transformers.
    """
    if isinstance(model, CausalLM):
        raise UserError(
            "impl.cuda_graphs=true with a model of transformers: while it is captured, it takes an "
            "explicit mask and with it a slower attention; set impl.cuda_graphs=false"
        )
    if device.type != "cuda":
        raise UserError("impl.cuda_graphs=true needs a GPU; set impl.cuda_graphs=false")
    if ranks > 1:
        raise UserError(
            f"impl.cuda_graphs=true with {ranks} processes: gradients are exchanged during the "
            "backward pass, which is not captured; set impl.cuda_graphs=false"
        )


def capture(part: Callable[[], Tensor], pool: object) -> tuple[Callable[[], None], Tensor]:
    """A function that replays `part`, and the tensor in which each replay leaves its result.

    Args:
        part: launches work on the GPU and never waits for it. It is called once and not executed.
        pool: of memory; graphs that are replayed in the order of their capture may share one.
    """
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    # What another thread does (pinning memory, say) does not disturb the capture.
    with torch.cuda.graph(graph, pool, capture_error_mode="thread_local"):  # type: ignore[arg-type]
        result = part()
    return graph.replay, result


class _Graph(NamedTuple):
    inputs: Batch  # where a replay reads its micro-batch
    replay: Callable[[], None]
    loss: Tensor  # where it writes the loss

    def run(self, batch: Batch) -> Tensor:
        """Replay on a micro-batch; returns its loss."""
        for name, value in self.inputs.items():
            value.copy_(batch[name], non_blocking=True)
        self.replay()
        return self.loss


class Replays:
    """The passes of a step, replayed once enough steps of its kind have been launched.

    Steps are of one kind if the method is in the same phase, the micro-batches have the same shapes
    and shares, and no parameter or buffer has moved in memory. Graphs of one kind are kept at a
    time.

    Args:
        backward: forward and backward of a micro-batch of a given share; adds to the gradients and
            returns the loss.
    """

    def __init__(self, model: nn.Module, backward: Callable[[Batch, float], Tensor]) -> None:
        self.backward = backward
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        modules = list(model.modules())
        self._held = [d for m in modules for d in (m._parameters, m._buffers) if d]
        self.steps = 0  # that were replayed
        self._forget(())

    def _forget(self, kind: Kind) -> None:
        self._kind, self._launched = kind, 0
        self._graphs: dict[Kind, _Graph] = {}
        self._gradients: list[Tensor | None] = []

    def of(self, parts: Sequence[Part], phase: str) -> Iterator[Callable[[], Tensor]]:
        """For each micro-batch of a step a function that runs its passes and returns its loss.

        Gradients must be None before the first; they are complete after the last.
        """
        kind = (phase, tuple(map(_kind, parts)), self._places())
        if kind != self._kind:
            self._forget(kind)
        if self._launched < LAUNCHED:
            self._launched += 1
            for batch, share in parts:
                yield partial(self.backward, batch, share)
            return
        if not self._graphs:
            self._capture(parts)
        for parameter, gradient in zip(self.parameters, self._gradients, strict=True):
            parameter.grad = gradient
        self.steps += 1
        for number, part in enumerate(parts):
            yield partial(self._graphs[number == 0, *_kind(part)].run, part[0])

    def _places(self) -> tuple[int, ...]:
        """Addresses of all that a graph reads of the model."""
        tensors = (tensor for held in self._held for tensor in held.values())
        return tuple(tensor.data_ptr() for tensor in tensors if tensor is not None)

    def _capture(self, parts: Sequence[Part]) -> None:
        """A graph for each kind of micro-batch: the first of a step writes the gradients, the
        others add to them."""
        pool = torch.cuda.graph_pool_handle() if torch.cuda.is_available() else None
        for number, part in enumerate(parts):
            kind = (number == 0, *_kind(part))
            if kind in self._graphs:
                continue
            batch, share = part
            inputs = {name: value.clone() for name, value in batch.items()}
            replay, loss = capture(partial(self.backward, inputs, share), pool)
            self._graphs[kind] = _Graph(inputs, replay, loss)
            if number == 0:
                self._gradients = [p.grad for p in self.parameters]


def _kind(part: Part) -> Kind:
    """The form of a micro-batch, on which a graph depends besides the values."""
    batch, share = part
    return (share, *((name, value.shape, value.dtype) for name, value in batch.items()))
