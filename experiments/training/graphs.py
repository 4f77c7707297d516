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

from experiments.config.settings import TrainConfig
from experiments.data.source import Batch
from experiments.support.errors import UserError
from experiments.training.blocks import recomputes
from models.bert import BertLM
from models.hf import CausalLM

# Steps of one kind that are launched before it is captured: in them torch compiles and libraries
# allocate their workspaces, which a capture does not allow.
LAUNCHED = 3
MARGIN = 1.1  # for what lies unused between blocks of memory

Form = tuple[object, ...]


def choose(
    setting: bool | str,
    device: torch.device,
    ranks: int,
    model: nn.Module,
    train: TrainConfig,
    one_shape: bool,
) -> tuple[bool, str | None]:
    """(the passes are replayed, the line that `auto` says about it).

    Args:
        setting: `impl.cuda_graphs`. one_shape: all batches of as many samples are of the same
            shapes.
    Raises:
        UserError: graphs are asked for where they cannot serve.
    """
    if setting is False:
        return False, None
    why = _impossible(device, ranks, model)
    if setting is True:
        if why is not None:
            raise UserError(f"impl.cuda_graphs=true {why}; set impl.cuda_graphs=false")
        return True, None
    why = why or _unsuited(model, train, one_shape)
    return why is None, "passes are replayed from CUDA graphs" if why is None else _launched(why)


def _impossible(device: torch.device, ranks: int, model: nn.Module) -> str | None:
    """The reason for which graphs cannot serve; None if they can."""
    if isinstance(model, CausalLM):
        return _TRANSFORMERS
    if isinstance(model, BertLM):
        return (
            "with the head for masked words: how many a batch has is read back from the GPU in "
            "every pass"
        )
    if device.type != "cuda":
        return "without a GPU"
    if ranks > 1:
        return (
            f"with {ranks} processes: gradients are exchanged during the backward pass, which is "
            "not captured"
        )
    return None


_TRANSFORMERS = (
    "with a model of transformers: while it is captured, it takes an explicit mask and with it a "
    "slower attention"
)
_MEMORY = "in the memory that is left: they need as much again as the passes take"


def _unsuited(model: nn.Module, train: TrainConfig, one_shape: bool) -> str | None:
    """The reason for which somebody who did not ask for graphs does not get them."""
    if any(type(module).__module__.startswith("transformers.") for module in model.modules()):
        return _TRANSFORMERS  # under a head for fine-tuning
    if not one_shape:
        return "with batches of differing shapes: a graph serves one"
    if recomputes(model):
        return "with impl.activation_checkpointing=true: what is computed again is not captured"
    if train.descent_every:
        return "with train.descent_every, which launches passes of its own"
    return None


def _launched(why: str) -> str:
    return f"passes are launched from Python: no CUDA graphs {why}"


def fits(peak: int, held: int, room: int) -> bool:
    """True if a pool of the graphs' own fits beside all that is launched as before.

    Args:
        peak, held: bytes that launched steps took at most, and that stay between them.
        room: bytes that this process can have.
    """
    return held + 2 * MARGIN * (peak - held) <= room


def _check_memory(device: torch.device) -> None:
    """Raise a torch.OutOfMemoryError where graphs might end a run that fits when launched."""
    room = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    peak, held = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
    if not fits(peak, held, room):
        raise torch.OutOfMemoryError(f"{peak=} {held=} {room=}")


def capture(part: Callable[[], Tensor], pool: object) -> tuple[Callable[[], None], Tensor]:
    """A function that replays `part`, and the tensor in which each replay leaves its result.

    Args:
        part: launches work on the GPU and never waits for it. It is called once and not executed.
        pool: of memory; graphs that are replayed in the order of their capture may share one.
    """
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    # What another thread does (pinning memory, say) does not disturb the capture. The outer stream
    # is this one, which is the current one again if the capture fails.
    with (
        torch.cuda.stream(torch.cuda.current_stream()),
        torch.cuda.graph(graph, pool, capture_error_mode="thread_local"),  # type: ignore[arg-type]
    ):
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

    Steps are of one kind if the method is in the same phase and no flag of a layer has changed, the
    micro-batches have the same shapes and shares, and no parameter or buffer has moved in memory.
    Graphs of one kind are kept at a time.

    Args:
        backward: forward and backward of a micro-batch of a given share; adds to the gradients and
            returns the loss.
        report: where to say that there is no memory for graphs, so that passes are launched from
            then on; None: that is an error.
    """

    def __init__(
        self,
        model: nn.Module,
        backward: Callable[[Batch, float], Tensor],
        report: Callable[[str], None] | None = None,
    ) -> None:
        self.backward, self.report = backward, report
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        modules = list(model.modules())
        self._held = [d for m in modules for d in (m._parameters, m._buffers) if d]
        # Flags choose branches, which a graph would freeze.
        self._flags = [
            (vars(module), name)
            for module in modules
            for name, value in vars(module).items()
            if isinstance(value, bool) and name != "training"
        ]
        self.steps = 0  # that were replayed
        self.given_up = False
        self._state: tuple[object, ...] = ()
        self._forms: dict[int, Form] = {}  # of the micro-batches of a step
        self.forget()

    def forget(self) -> None:
        """Give up the graphs and their memory; the next steps are launched."""
        self._count = 0  # of steps of this kind
        self._graphs: dict[tuple[bool, Form], _Graph] = {}
        self._gradients: list[Tensor | None] = []
        self._pool: object = None

    def of(
        self, batches: Iterator[Batch], shares: Sequence[float], phase: str
    ) -> Iterator[Callable[[], Tensor]]:
        """For each micro-batch of a step a function that runs its passes and returns its loss.

        Gradients must be None before the first; they are complete after the last.

        Args:
            batches: on the device. One is taken after the passes of the one before were started.
        """
        state = phase, tuple(held[name] for held, name in self._flags), self._places()
        if state != self._state:
            self._state = state
            self.forget()
        for number, share in enumerate(shares):
            batch = next(batches)
            values = ((name, value.shape, value.dtype) for name, value in batch.items())
            form = (share, *values)
            if form != self._forms.get(number):
                self._forms[number] = form
                self.forget()
            replay = None
            if self._count >= LAUNCHED and not self.given_up:
                replay = self._replay(number == 0, form, batch, share)
            yield partial(self.backward, batch, share) if replay is None else replay
        self.steps += bool(self._graphs)
        self._count += 1

    def _places(self) -> tuple[int, ...]:
        """Addresses of all that a graph reads of the model."""
        tensors = (tensor for held in self._held for tensor in held.values())
        return tuple(tensor.data_ptr() for tensor in tensors if tensor is not None)

    def _replay(
        self, first: bool, form: Form, batch: Batch, share: float
    ) -> Callable[[], Tensor] | None:
        """A function that replays the passes of a micro-batch; None if memory is short.
        Those of the first one of a step write the gradients, those of the others add to them."""
        if (first, form) not in self._graphs and not self._captured(first, form, batch, share):
            return None
        if first:
            for parameter, gradient in zip(self.parameters, self._gradients, strict=True):
                parameter.grad = gradient
        return partial(self._graphs[first, form].run, batch)

    def _captured(self, first: bool, form: Form, batch: Batch, share: float) -> bool:
        """Capture the passes of a micro-batch; False if memory was short, which changes nothing."""
        device = self.parameters[0].device
        before = [p.grad for p in self.parameters]
        try:
            if self.report is not None and device.type == "cuda":
                _check_memory(device)
            if self._pool is None and torch.cuda.is_available():
                self._pool = torch.cuda.graph_pool_handle()
            inputs = {name: value.clone() for name, value in batch.items()}
            replay, loss = capture(partial(self.backward, inputs, share), self._pool)
        except torch.OutOfMemoryError:
            if self.report is None:
                raise
            self.report(_launched(_MEMORY))
            self.given_up = True
            self.forget()
            for parameter, gradient in zip(self.parameters, before, strict=True):
                parameter.grad = gradient
            return False
        except RuntimeError as error:  # after which torch's generator takes no launched steps
            raise UserError(
                f"the passes cannot be captured in a CUDA graph ({str(error).splitlines()[0]}); "
                "nothing in them may wait for the GPU or read back from it; set "
                "impl.cuda_graphs=false and start again, the run goes on where it was last saved"
            ) from error
        self._graphs[first, form] = _Graph(inputs, replay, loss)
        if first:
            self._gradients = [p.grad for p in self.parameters]
        return True
