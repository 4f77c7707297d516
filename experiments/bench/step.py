"""Runs a whole optimizer step of a model under a method, launched or replayed from CUDA graphs.

A step is that of the trainer: hooks, forward, backward, clipping, hooks, AdamW, hooks. On a GPU it
runs under bf16 autocast with fp32 weights, and the blocks and the loss are compiled.
"""

import itertools
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import methods
from experiments.bench import gates, linear, variants
from experiments.bench.jobs import Workload
from experiments.bench.report import MIB
from experiments.bench.variants import Converted
from experiments.support import memory
from experiments.training.graphs import capture

WARM_UP = 2


def precision(device: torch.device) -> str:
    return "bfloat16 autocast" if device.type == "cuda" else "float32"


def gate(name: str, job: Workload, device: torch.device, matmul: str) -> None:
    """Raise a `UserError` if the products of a linear of the model are wrong."""
    for widths in job.linears if name != "dense" else ():
        linear.gate(name, (job.tokens, *widths), variants.dtype_of(device), device, matmul)


class Step:
    """A model under a method with its optimizer, whose steps are run one after the other. fused:
    use `methods.FusedAdamW`. dtype: of autocast, fp32 means none.
    first_s: seconds to the end of the first step, including building the model and compilation."""

    first_s = 0.0

    def __init__(
        self,
        name: str,
        job: Workload,
        device: torch.device,
        matmul: str,
        fused: bool = False,
    ) -> None:
        torch.manual_seed(0)
        self.device, self.name = device, name
        self.others = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        with device:
            self.model, self.forward, self.blocks = job.build()
        self.dtype = variants.dtype_of(device)
        self.converted: Converted = variants.convert(
            name, self.model, job.include, self.dtype, job.tokens, matmul
        )
        self.distribute()
        self.parameters = list(self.model.parameters())
        usual: Any = partial(self.converted.method.optimizer, fused=True)
        self.optimizer: torch.optim.Optimizer = (methods.FusedAdamW if fused else usual)(
            self.parameters, lr=1e-4, weight_decay=0.1, capturable=device.type == "cuda"
        )
        self.used = f"{self.converted.used}; FusedAdamW" if fused else self.converted.used
        self.numbers = itertools.count()

    def distribute(self) -> None:
        """Share the converted model with other ranks, before its optimizer is made."""

    def gradients(self) -> list[Tensor | None]:
        """The gradients of the first micro-batch of step 0."""
        self.optimizer.zero_grad()
        self.converted.before(0)
        self.loss().backward()
        return [p.grad for p in self.parameters]

    def results(
        self, block: nn.Module, args: tuple[Any, ...], forward: Callable[..., Tensor]
    ) -> list[Tensor | None]:
        """The output of `forward` for these arguments of a block, and the gradients of arguments
        and parameters, of a loss that weighs each entry of the output by its value."""
        floats = {
            i: a.detach().requires_grad_()
            for i, a in enumerate(args)
            if torch.is_tensor(a) and a.is_floating_point()
        }
        block.zero_grad()
        with self.autocast():
            output = forward(*(floats.get(i, a) for i, a in enumerate(args)))
        output.backward(output.detach())
        return [output.detach(), *(t.grad for t in (*floats.values(), *block.parameters()))]

    def loss(self) -> Tensor:
        with self.autocast():
            return self.forward()

    def autocast(self) -> Any:
        mixed = self.dtype is not torch.float32
        return torch.autocast(self.device.type, self.dtype) if mixed else nullcontext()

    def run(self, number: int) -> None:
        """Run step `number`, of one micro-batch."""
        self.converted.before(number)
        self.loss().backward()
        self.update(number)
        self.optimizer.zero_grad()

    def clip(self) -> None:
        """Clip the gradients to the norm 1."""
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)

    def update(self, number: int) -> None:
        """Do everything after the backward pass of step `number`, except dropping the gradients."""
        self.clip()
        self.converted.method.on_gradients(number, self.optimizer)
        self.optimizer.step()
        self.converted.method.on_step_end(number)

    def next(self, _: int = 0) -> None:
        """Run the next step."""
        self.run(next(self.numbers))

    def ordinary(self, _: int = 0) -> None:
        """Run the next step that chooses no masks, or simply the next one if every step does."""
        period = self.converted.searching + 1
        self.run(next(n for n in self.numbers if period == 1 or (n + 1) % period))

    def searching(self, _: int) -> None:
        """Run a step after which all masks are chosen anew."""
        self.run(self.converted.searching)

    def capture(self, pool: Any) -> Callable[[int], None]:
        """Capture an ordinary step, without the hooks at its beginning, in two CUDA graphs that may
        share `pool`, and return a function that replays it. Raises a `UserError` if the gradients
        of a replay differ from those of the step itself."""
        want = [None if g is None else g.clone() for g in self.gradients()]
        # Sums with a random order differ in the last bit, and such errors grow (check_compiled).
        noise = gates.deviation(self.name, self.gradients(), want)
        self.optimizer.zero_grad()
        backward, _ = capture(lambda: self.loss().backward(), pool)
        gradients = [p.grad for p in self.parameters]  # every replay writes these tensors
        rest, _ = capture(lambda: self.update(0), pool)
        self.converted.before(0)
        backward()
        gates.check_same(self.name, gradients, want, noise)
        self.optimizer.zero_grad()

        def step(_: int) -> None:
            assert gradients  # keeps their memory alive as long as this function
            self.converted.before(0)
            backward()
            rest()
            # A replay does not tell the method that the step has ended.
            self.converted.method._remember(None)

        return step

    def wait(self) -> None:
        """Wait for the GPU, if there is one."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def close(self) -> None:
        """Free the memory that a compiled model would otherwise keep."""
        del self.model, self.forward, self.blocks, self.converted, self.parameters, self.optimizer
        memory.free(self.device)


def ready(name: str, job: Workload, device: torch.device, matmul: str, fused: bool = False) -> Step:
    """A warmed-up step; on a GPU its blocks are compiled and checked."""
    start = time.perf_counter()
    step = Step(name, job, device, matmul, fused)
    on_gpu = device.type == "cuda"
    for block in step.blocks if on_gpu else ():  # they share their code: one compilation serves all
        block.compile(fullgraph=True)
    with variants.compiling() if on_gpu else nullcontext():
        step.ordinary()
    step.wait()
    step.first_s = time.perf_counter() - start
    if on_gpu:
        check_compiled(step)
    for _ in range(WARM_UP):
        step.ordinary()
    return step


def check_compiled(step: Step) -> None:
    """Raise a `UserError` unless each block has equal gradients compiled and uncompiled in a step.

    Blocks and matrices are checked separately, because an error in the last bit grows through a
    model: it changes FP8 codes, and these what MVUE keeps. With FP8 in all linears of GPT-2
    (emulated, width 256) it changes the gradients by 0.19 after 2 blocks and 0.30 after 36, as much
    as FP8 itself, and within a block those of its matrices by 0.09 to 0.19."""
    arguments: list[tuple[nn.Module, tuple[Any, ...]]] = []
    hooks = [
        block.register_forward_pre_hook(lambda module, args: arguments.append((module, args)))
        for block in step.blocks
    ]
    step.converted.before(0)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        step.loss()
    for hook in hooks:
        hook.remove()
    with variants.compiling():
        for block, args in arguments:
            want, got = (step.results(block, args, run) for run in (block.forward, block))
            vectors = [i for i, g in enumerate(want) if g is not None and g.ndim == 1]
            others = [[i] for i in range(len(want)) if i not in vectors]
            for group in (vectors, *others):
                gates.check_same(step.name, [got[i] for i in group], [want[i] for i in group])
    step.optimizer.zero_grad()


def held(step: Step) -> dict[str, float]:
    """Memory as figures of a row: the parts of `bytes_held`, `trained` (weights, gradients and
    optimizer state), `held` (also masks, packed and dense operands), and on a GPU the peak of
    torch's allocations over steps of each kind, above what was allocated before it was built."""
    parts = variants.bytes_held(step.converted, step.optimizer)
    trained = 2 * parts["weights"] + parts["optimizer"]
    parts["held"] = trained + sum(parts[kind] for kind in ("masks", "packed", "operands"))
    parts["trained"] = trained
    figures = {f"{part} MiB": size / MIB for part, size in parts.items()}
    if step.device.type == "cpu":
        return figures
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        step.ordinary()
    if step.converted.searching:
        step.searching(0)
    return {"peak MiB": (torch.cuda.max_memory_allocated() - step.others) / MIB, **figures}
