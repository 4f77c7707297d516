"""Forward and backward passes that are replayed from CUDA graphs.

With small layers Python takes longer to launch a pass than the GPU to run it. A CUDA graph holds
all kernel launches of a pass and is started by one call. Everything between the passes (hooks,
clipping, the optimizer) is launched as usual. Phases, mask refreshes and loss scaling therefore
need no special handling: they write to the tensors that the graphs read.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from experiments.config.settings import TrainConfig
from experiments.data.source import Batch
from experiments.support.errors import UserError
from experiments.training.blocks import recomputes
from experiments.training.distributed import World
from models.bert import BertLM

# Steps of one kind that are launched before it is captured. In these torch compiles and libraries
# allocate workspaces, which is not possible during a capture.
LAUNCHED = 3
MARGIN = 1.1  # allowance for fragmented memory
LAUNCHES = "passes are launched from Python: no CUDA graphs "

Form = tuple[object, ...]


def choose(
    setting: bool | str, world: World, model: nn.Module, train: TrainConfig, one_shape: bool
) -> tuple[bool, str | None]:
    """Decide whether passes are replayed from graphs, by `impl.cuda_graphs`: (the decision, the
    line to report for `auto`). one_shape: batches of equally many samples have equal shapes."""
    if setting is False:
        return False, None
    why = _obstacle(world, model, train, one_shape)
    if setting is True and why is not None:
        raise UserError(f"impl.cuda_graphs=true {why}; set impl.cuda_graphs=false")
    if why is not None:
        return False, LAUNCHES + why
    return True, None if setting is True else "passes are replayed from CUDA graphs"


def _obstacle(world: World, model: nn.Module, train: TrainConfig, one_shape: bool) -> str | None:
    """The reason why graphs cannot be used or do not help; None if they do."""
    if any(type(module).__module__.startswith("transformers.") for module in model.modules()):
        return (
            "with a model of transformers: during a capture it uses an explicit mask, and so a "
            "slower attention"
        )
    if isinstance(model, BertLM):
        return "with the head for masked words: every pass reads their number back from the GPU"
    if world.device.type != "cuda":
        return "without a GPU"
    if world.size > 1:
        return (
            f"with {world.size} processes: gradients are exchanged during the backward pass, which "
            "cannot be captured"
        )
    if not one_shape:
        return "with batches of different shapes: a graph serves only one"
    if recomputes(model):
        return "with impl.activation_checkpointing=true: recomputation cannot be captured"
    if train.descent_every:
        return "with train.descent_every, which needs extra passes"
    return None


def capture(part: Callable[[], Any], pool: object) -> tuple[Callable[[], None], Any]:
    """A function that replays `part`, which launches work on the GPU and never waits for it, and
    the tensor in which each replay leaves its result. `part` is called once, to record its
    launches. Graphs that are replayed in the order of capture may share the memory `pool`."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    # The error mode lets other threads (which pin memory, for example) work during the capture. The
    # outer context restores the current stream if the capture fails.
    with (
        torch.cuda.stream(torch.cuda.current_stream()),
        torch.cuda.graph(graph, pool, capture_error_mode="thread_local"),  # type: ignore[arg-type]
    ):
        result = part()
    return graph.replay, result


class Replays:
    """Replays the passes of steps, once enough steps of the same kind have been launched: with the
    same phase of the method, flags of the layers, shapes and shares of the micro-batches, and
    places of parameters and buffers in memory. Only the graphs of one kind are kept.

    backward: runs the passes of a micro-batch with a given share, and returns the loss.
    report: called if there is no memory for graphs, after which passes are launched.
    """

    def __init__(
        self,
        model: nn.Module,
        backward: Callable[[Batch, float], Tensor],
        report: Callable[[str], None],
    ) -> None:
        self.backward, self.report = backward, report
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        modules = list(model.modules())
        self._held = [d for m in modules for d in (m._parameters, m._buffers) if d]
        # Python flags choose branches, which a graph would freeze.
        self._flags = [
            (vars(module), name)
            for module in modules
            for name, value in vars(module).items()
            if isinstance(value, bool) and name != "training"
        ]
        self.steps = 0  # number of replayed steps
        self.given_up = False
        self._state: tuple[object, ...] = ()
        self._forms: dict[int, Form] = {}  # the micro-batches' shapes and shares, by index
        self.forget()

    def forget(self) -> None:
        """Free the graphs and their memory; the next steps are launched."""
        self._count = 0  # steps of this kind so far
        self._graphs: dict[tuple[bool, Form], Callable[[Batch], Tensor]] = {}
        self._gradients: list[Tensor | None] = []
        self._pool: object = None

    def of(
        self, batches: Iterator[Batch], shares: Sequence[float], phase: str
    ) -> Iterator[Callable[[], Tensor]]:
        """Yield for each micro-batch of a step, on the device, a function that runs its passes and
        returns its loss; the next one is taken after these were started. Gradients must be None
        before the first call; they are complete after the last."""
        # The addresses of all tensors of the model that a graph reads.
        tensors = (tensor for held in self._held for tensor in held.values())
        places = tuple(tensor.data_ptr() for tensor in tensors if tensor is not None)
        state = phase, tuple(held[name] for held, name in self._flags), places
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
            first, replays = number == 0, self._count >= LAUNCHED and not self.given_up
            if replays and (first, form) not in self._graphs:
                replays = self._captured(first, form, batch, share)
            if not replays:
                yield partial(self.backward, batch, share)
                continue
            if first:  # it writes the gradients, and the others add to them
                for parameter, gradient in zip(self.parameters, self._gradients, strict=True):
                    parameter.grad = gradient
            yield partial(self._graphs[first, form], batch)
        self.steps += bool(self._graphs)
        self._count += 1

    def _captured(self, first: bool, form: Form, batch: Batch, share: float) -> bool:
        """Capture the passes of a micro-batch; False, and no change, if memory was short."""
        device = self.parameters[0].device
        before = [p.grad for p in self.parameters]
        try:
            if device.type == "cuda":
                # The graphs' memory pool lies beside that of launched steps, which took `peak`
                # bytes at most and hold `held` between steps.
                free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
                peak = torch.cuda.max_memory_allocated(device)
                held = torch.cuda.memory_allocated(device)
                if held + 2 * MARGIN * (peak - held) > free:
                    raise torch.OutOfMemoryError(f"{peak=} {held=} {free=}")
            if self._pool is None and torch.cuda.is_available():
                self._pool = torch.cuda.graph_pool_handle()
            inputs = {name: value.clone() for name, value in batch.items()}
            replay, loss = capture(partial(self.backward, inputs, share), self._pool)
        except torch.OutOfMemoryError:
            self.report(f"{LAUNCHES}in the free memory: they need as much again as the passes take")
            self.given_up = True
            self.forget()
            for parameter, gradient in zip(self.parameters, before, strict=True):
                parameter.grad = gradient
            return False
        except RuntimeError as error:  # afterwards torch's generator cannot serve launched steps
            raise UserError(
                f"the passes cannot be captured in a CUDA graph ({str(error).splitlines()[0]}); "
                "nothing in them may wait for the GPU or read back from it; set "
                "impl.cuda_graphs=false and start again to continue from the last checkpoint"
            ) from error

        def run(batch: Batch) -> Tensor:
            for name, value in inputs.items():  # from which a replay reads its micro-batch
                value.copy_(batch[name], non_blocking=True)
            replay()
            return loss

        self._graphs[first, form] = run
        if first:
            self._gradients = [p.grad for p in self.parameters]
        return True
