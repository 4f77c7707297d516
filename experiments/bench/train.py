"""A whole optimizer step: `python -m experiments.bench train`.

Gradients to zero, forward, backward, clipping, the hooks of the method, fused AdamW; on a GPU under
bf16 autocast with fp32 weights, each transformer block compiled, and the loss. Only the linears of
the FFNs are converted, in all arms. A step that chooses masks is a figure of its own where not all
steps do, and so is the step with its parts in CUDA graphs: launched from Python, a model of this
size may wait for the CPU. All methods are held at once and measured in turns.
"""

from __future__ import annotations

import argparse
import gc
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.bench import arms, linear
from experiments.bench.arms import Converted
from experiments.bench.report import MIB, Report, Row
from experiments.bench.timing import Time, in_turns
from experiments.support.errors import UserError
from models.gpt2 import GPT, GPTConfig

NAMES = ("dense", "s_ste", "t_sr_ste", "slope")
SIMULATION = ("dense", "s_ste", arms.SIMULATED)
INCLUDE = ("*mlp.*",)
WARM_UP = 2


@dataclass(frozen=True)
class Job:
    """A model and its batch.

    build: the model and a function that computes its loss on one batch, always the same; called
        in the context of the device. tokens: that a linear sees. items, unit: of throughput.
    linears: [(in, out), ...] of those that are converted. names: of the arms.
    """

    build: Callable[[], tuple[nn.Module, Callable[[], Tensor], list[nn.Module]]]
    tokens: int
    items: int
    unit: str
    linears: tuple[tuple[int, int], ...]
    names: tuple[str, ...] = NAMES


def gpt2(size: str, batch: int, length: int, names: tuple[str, ...] = NAMES) -> Job:
    config = GPTConfig.of_size(size)

    def build() -> tuple[nn.Module, Callable[[], Tensor], list[nn.Module]]:
        model = GPT(config)
        ids = torch.randint(config.vocab_size, (2, batch, length))
        head = Head(model)
        blocks: list[nn.Module] = [*model.transformer.h, head]
        return model, lambda: head(model.transformer(ids[0]), ids[1]), blocks

    widths = (config.n_embd, config.ffn_width)
    return Job(build, batch * length, batch * length, "tokens", (widths, widths[::-1]), names)


class Head(nn.Module):
    """Hidden states [B, T, C] and targets [B, T] to the loss. A module, to be compiled as one."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.linear = model.lm_head

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.linear(hidden).flatten(0, 1), target.flatten())


def vit(name: str, batch: int, width: int, patches: int) -> Job:
    def build() -> tuple[nn.Module, Callable[[], Tensor], list[nn.Module]]:
        import timm

        model: Any = timm.create_model(name)
        size = model.default_cfg["input_size"]
        images, classes = torch.randn(batch, *size), torch.randint(1000, (batch,))
        return model, lambda: F.cross_entropy(model(images), classes), list(model.blocks)

    widths = (width, 4 * width)
    return Job(build, batch * (patches + 1), batch, "images", (widths, widths[::-1]))


CPU_JOBS = {"GPT-2 nano, 4 x 128": gpt2("nano", 4, 128)}
GPU_JOBS = {
    "GPT-2 774M, 16 x 1024": gpt2("774M", 16, 1024),
    "GPT-2 124M, 32 x 1024": gpt2("124M", 32, 1024, SIMULATION),  # half a step of the driver's
    "ViT-L/16, 64 images": vit("vit_large_patch16_224", 64, 1024, 196),
}


@dataclass
class BlockCall:
    """A call of a block: its arguments, and the gradient of its output."""

    block: nn.Module
    args: tuple[Any, ...]
    options: dict[str, Any]
    gradient: Tensor | None = None

    def run(self, step: Step, forward: Callable[..., Tensor]) -> list[Tensor | None]:
        """The output of `forward`, and the gradients of arguments and parameters."""
        floats = [torch.is_tensor(a) and a.is_floating_point() for a in self.args]
        args = [
            a.detach().requires_grad_() if f else a for a, f in zip(self.args, floats, strict=True)
        ]
        self.block.zero_grad()
        with step.autocast():
            output = forward(*args, **self.options)
        output.backward(self.gradient)
        inputs = [a.grad for a, f in zip(args, floats, strict=True) if f]
        return [output.detach(), *inputs, *(p.grad for p in self.block.parameters())]


class Step:
    """A model under a method with its optimizer, at one step after another."""

    def __init__(self, name: str, job: Job, device: torch.device, matmul: str) -> None:
        torch.manual_seed(0)
        self.device, self.name = device, name
        self.others = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        with device:
            self.model, self.forward, self.blocks = job.build()
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.converted: Converted = arms.convert(
            name, self.model, INCLUDE, dtype, job.tokens, matmul
        )
        self.parameters = list(self.model.parameters())
        method = self.converted.method
        self.optimizer = method.optimizer(self.parameters, lr=1e-4, weight_decay=0.1, fused=True)
        self.numbers = itertools.count()

    def compile(self, backend: str = "inductor") -> None:
        """The blocks, one by one: they share their code, so one compilation serves them all."""
        for block in self.blocks:
            block.compile(fullgraph=True, backend=backend)

    def gradients(self) -> list[Tensor | None]:
        """Of the first micro-batch of step 0."""
        self.optimizer.zero_grad()
        self.converted.before(0)
        self.loss().backward()
        return [p.grad for p in self.parameters]

    def recorded(self) -> list[BlockCall]:
        """What each block is given in the first micro-batch of step 0, forward and backward."""
        calls: list[BlockCall] = []

        def record(block: nn.Module, args: Any, options: Any, output: Tensor) -> None:
            calls.append(call := BlockCall(block, args, options))
            output.register_hook(lambda gradient: setattr(call, "gradient", gradient))

        hooks = [b.register_forward_hook(record, with_kwargs=True) for b in self.blocks]
        self.gradients()
        for hook in hooks:
            hook.remove()
        return calls

    def loss(self) -> Tensor:
        with self.autocast():
            return self.forward()

    def autocast(self) -> Any:
        on_gpu = self.device.type == "cuda"
        return torch.autocast("cuda", torch.bfloat16) if on_gpu else nullcontext()

    def run(self, number: int) -> None:
        method = self.converted.method
        self.optimizer.zero_grad()
        self.converted.before(number)
        self.loss().backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        method.on_gradients(number, self.optimizer)
        self.optimizer.step()
        method.on_step_end(number)

    def ordinary(self, _: int) -> None:
        """The next step that chooses no masks, if there are such."""
        period = self.converted.searching + 1
        number = next(n for n in self.numbers if period == 1 or (n + 1) % period)
        self.run(number)

    def searching(self, _: int) -> None:
        self.run(self.converted.searching)

    def capture(self, pool: Any) -> Callable[[int], None]:
        """An ordinary step of which all but the optimizer and clipping is replayed from graphs.

        pool: of memory for what no graph keeps beyond its replay; the graphs may share it.
        UserError if the gradients of a replay are not those of the step itself.
        """
        method, graphs = self.converted.method, []
        parts = (
            lambda: self.loss().backward(),
            lambda: method.on_gradients(0, self.optimizer),
            lambda: method.on_step_end(0),
        )
        want = [None if g is None else g.clone() for g in self.gradients()]
        # Sums whose order is left to chance differ in a last bit, and that grows (compile_checked).
        noise = arms.deviation(self.name, self.gradients(), want)
        self.optimizer.zero_grad()
        torch.cuda.synchronize()
        for part in parts:
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1], pool):
                part()
        self.converted.before(0)
        graphs[0].replay()
        arms.check_same(self.name, [p.grad for p in self.parameters], want, noise)

        def step(_: int) -> None:
            self.converted.before(0)
            graphs[0].replay()
            torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
            graphs[1].replay()
            self.optimizer.step()
            graphs[2].replay()

        return step

    def close(self) -> None:
        """Free what a compiled model of 774M would keep from the next one."""
        del self.model, self.forward, self.blocks, self.converted, self.parameters, self.optimizer
        gc.collect()
        torch.compiler.reset()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def bench(options: argparse.Namespace, report: Report) -> None:
    found, matmul = jobs(options, report), arms.default_matmul(options)
    chosen = report.chosen(dict.fromkeys(n for job in found.values() for n in job.names))
    for shape, job in found.items():
        names = [name for name in job.names if name in chosen]
        if not names:
            continue
        gate(names, job, options.device, matmul)
        report.note(f"correctness of the linears of {shape}: green")
        try:
            measure(shape, job, names, matmul, options, report)
        except torch.cuda.OutOfMemoryError as error:
            raise UserError(
                f"{shape}: {', '.join(names)} together do not fit this GPU's memory; choose fewer "
                "with --only"
            ) from error


def measure(
    shape: str,
    job: Job,
    names: list[str],
    matmul: str,
    options: argparse.Namespace,
    report: Report,
) -> None:
    """The rows of a job."""
    on_gpu = options.device.type == "cuda"
    steps, peaks, calls = {}, {}, {}
    for name in names:
        steps[name] = step = ready(name, job, options.device, matmul)
        peaks[name] = peak(step)
        report.note(f"{name}: {'compiled and ' if on_gpu else ''}warm")
        calls[name] = step.ordinary
        if step.converted.searching:
            calls[f"{name}, masks chosen"] = step.searching
    times = in_turns(calls, options.device, options.repeats, graphs=False)
    replays: dict[str, Time] = {}
    if on_gpu:
        pool = torch.cuda.graph_pool_handle()
        captured = {name: step.capture(pool) for name, step in steps.items()}
        replays = in_turns(captured, options.device, options.repeats, graphs=False)
    for name, step in steps.items():
        figures = {
            "step, masks chosen ms": times.get(f"{name}, masks chosen"),
            "step in CUDA graphs ms": replays.get(name),
        }
        report.add(
            Row(
                name, precision(options.device), shape, step.converted.used, times[name],
                peers={"dense": times["dense"].ms} if "dense" in times else {},
                figures={
                    f"{job.unit}/s": 1e3 * job.items / times[name].ms,
                    **{part: time.ms for part, time in figures.items() if time is not None},
                    **peaks[name],
                },
            )
        )  # fmt: skip
        step.close()


def jobs(options: argparse.Namespace, report: Report) -> dict[str, Job]:
    """Those that this device is for and whose packages are there."""
    if options.device.type == "cpu":
        report.leave_out(f"without a GPU: {'; '.join(GPU_JOBS)}; compiled, in bf16")
        return CPU_JOBS
    found = dict(GPU_JOBS)
    try:
        import timm  # noqa: F401
    except ImportError as error:
        for shape in [shape for shape in found if shape.startswith("ViT")]:
            report.leave_out(f"{shape}: {error}")
            del found[shape]
    return found


def precision(device: torch.device) -> str:
    return "bfloat16 autocast" if device.type == "cuda" else "float32"


def gate(names: list[str], job: Job, device: torch.device, matmul: str) -> None:
    """UserError if the products of a linear of the model are wrong."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for name in names:
        for widths in job.linears:
            linear.gate(name, (job.tokens, *widths), dtype, device, matmul)


def ready(name: str, job: Job, device: torch.device, matmul: str) -> Step:
    """A step, on a GPU compiled and warm."""
    step = Step(name, job, device, matmul)
    if device.type == "cuda":
        compile_checked(step)
    for _ in range(WARM_UP):
        step.ordinary(0)
    return step


def compile_checked(step: Step, backend: str = "inductor") -> None:
    """Compile; UserError if a block, given what it is given in a step, has other gradients than
    uncompiled.

    Block by block and matrix by matrix, because a last bit grows on its way through a model: it
    flips codes of FP8, and these flip what MVUE keeps. With FP8 in all linears of GPT-2 a last bit
    in the input of each block moves the gradients by 0.19 after 2 blocks, by 0.28 after 12 and 0.30
    after 36 (emulated, width 256), as far as FP8 itself moves them from those of bf16; a last bit
    of each tensor within a block moves those of its matrices by 0.09 to 0.19.
    """
    calls = step.recorded()
    step.compile(backend)
    with arms.compiling():
        for call in calls:
            want, got = (call.run(step, run) for run in (call.block.forward, call.block))
            vectors = [i for i, g in enumerate(want) if g is not None and g.ndim == 1]
            others = [[i] for i in range(len(want)) if i not in vectors]
            for group in (vectors, *others):
                arms.check_same(step.name, [got[i] for i in group], [want[i] for i in group])


def peak(step: Step) -> dict[str, float]:
    """Peak of what torch allocated for this step beside what was there before it was built, over
    steps of each kind, as a figure; nothing on a CPU."""
    if step.device.type == "cpu":
        return {}
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        step.ordinary(0)
    if step.converted.searching:
        step.searching(0)
    return {"peak MiB": (torch.cuda.max_memory_allocated() - step.others) / MIB}
