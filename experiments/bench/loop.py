"""A user's own loop, as in docs/own_loop.md: `python -m experiments.bench loop`.

A transformers LLaMA with random weights, whose linears are all converted, or timm's ViT-L/16, whose
MLPs are, trains step by step from Python, without CUDA graphs, in fp32 with bf16 autocast on a GPU:
hooks, loss, clipping, optimizer. Each method takes turns with the dense model in the same loop, and
`transformers.Trainer` with the callback takes turns with the own loop of the same method. The rows
`host, METHOD` time the host alone, which often decides: one layer's forward and backward pass with
few tokens, and `nn.Linear`'s, without waiting for the device.
"""

import argparse
import statistics
import tempfile
import time
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from common_kernels.matmul import linear24
from experiments.bench import variants
from experiments.bench.jobs import Built, Workload, mlp, vit
from experiments.bench.report import Report, Row
from experiments.bench.step import Step, gate, precision
from experiments.bench.timing import SETTLE_LIMIT_S, SUSTAINED_S, Time, in_turns, quantiles, settled
from experiments.support.errors import UserError
from methods.nn.linear import SparseLinear
from methods.nn.operands import Packed

COMPILED, ADAMW, TRAINER = ", compiled", ", torch's AdamW", ", Trainer"
WIDE, IMAGES = "wide, ", "ViT-L, "  # rows of other models than the first LLaMA
METHODS = ("fst", "s_ste", "slope")
FP8 = tuple(f"{name}, fp8{COMPILED}" for name in ("s_ste", "fst"))
# The rows by name. A row without ADAMW has methods.FusedAdamW, and dense torch's fused AdamW.
NAMES = (
    *(name + COMPILED for name in METHODS),
    *METHODS,
    *FP8,
    f"fst{ADAMW}{COMPILED}",
    f"fst{TRAINER}{COMPILED}",
    *(WIDE + name for name in (f"fst{COMPILED}", *FP8)),
    *(f"{IMAGES}{name}{COMPILED}" for name in ("fst", "slope")),
)
HOSTS = tuple(f"host, {name}" for name in (*METHODS, "s_ste, fp8"))
TOKENS, CALLS = 64, 20  # of the rows of the host
BLOCK = 4  # steps in a sample of the Trainer


def llama(
    layers: int, hidden: int, intermediate: int, vocabulary: int, batch: tuple[int, int]
) -> tuple[str, Workload]:
    """The shape of a LLaMA with its batch, in words, and its workload."""

    def build() -> Built:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=vocabulary, hidden_size=hidden, num_hidden_layers=layers,
            intermediate_size=intermediate, num_attention_heads=max(2, hidden // 128),
            use_cache=False,
        )  # fmt: skip
        model: Any = LlamaForCausalLM(config)
        ids = torch.randint(vocabulary, batch)
        return model, lambda: model(input_ids=ids, labels=ids).loss, list(model.model.layers)

    (sequences, length), linears = batch, mlp(hidden, intermediate)
    shape, tokens = f"{layers} x {hidden} -> {intermediate}", sequences * length
    job = Workload(build, tokens, tokens, "tokens", linears, include="all")
    return f"LLaMA, {shape}, {sequences} x {length}", job


BATCH, QUICK_BATCH = (8, 1024), (2, 32)
LARGE = {
    "": llama(12, 2048, 8192, 32000, BATCH),
    WIDE: llama(4, 4096, 14336, 32000, BATCH),
    IMAGES: ("ViT-L/16, 64 images", vit("vit_large_patch16_224", 64, 1024, 196)),
}
QUICK = {
    **LARGE,
    "": llama(2, 64, 128, 320, QUICK_BATCH),
    WIDE: llama(1, 128, 256, 320, QUICK_BATCH),
}


def bench(options: argparse.Namespace, report: Report) -> None:
    on_gpu = options.device.type == "cuda"
    small = options.quick or not on_gpu
    chosen = report.chosen([*HOSTS, *NAMES])
    if options.missing:
        chosen = report.lacking(chosen)
    for name in [name for name in HOSTS if name in chosen]:
        report.add(host(name, 64 if small else 4096, options))
    jobs, batch = (QUICK, QUICK_BATCH) if small else (LARGE, BATCH)
    groups: dict[tuple[str, bool], list[str]] = {}
    for name in [name for name in NAMES if name in chosen]:
        kind = next((kind for kind in (WIDE, IMAGES) if name.startswith(kind)), "")
        groups.setdefault((kind, name.endswith(COMPILED)), []).append(name)
    for (kind, compiled), names in groups.items():
        if compiled and not on_gpu:
            report.leave_out(f"without a GPU: {', '.join(names)}")
            continue
        loop, dense = partial(Loop, *jobs[kind], compiled, options.matmul, options.device), None
        of = options.device, options.repeats
        for name in names:
            try:
                own = loop(name)
                if TRAINER in name:
                    report.add(in_the_trainer(own, loop(name), batch, options))
                    continue
                dense = dense or loop("dense")
                calls = {"own": own.next, "dense": dense.next}
                with own.compiling():
                    times = in_turns(calls, *of, graphs=False, steps=True)
                report.add(own.result(times["own"], {"dense": times["dense"].ms}))
            except UserError as error:  # its products are wrong; the others are measured
                report.refuse(str(error))
        if dense:
            dense.close()


class Loop(Step):
    """A model in the loop of docs/own_loop.md, with a row's setup and checked products."""

    def __init__(
        self, shape: str, job: Workload, compiled: bool, matmul: str, device: torch.device, row: str
    ) -> None:
        setup = row.removeprefix(WIDE).removeprefix(IMAGES).removesuffix(COMPILED)
        setup = setup.removesuffix(ADAMW).removesuffix(TRAINER)
        gate(setup, job, device, matmul)
        super().__init__(setup, job, device, matmul, fused=setup != "dense" and ADAMW not in row)
        self.shape, self.job, self.row = shape, job, row
        self.compiling = variants.compiling if compiled else nullcontext
        for block in self.blocks if compiled else ():
            block.compile()

    def result(self, own: Time, peers: dict[str, float]) -> Row:
        """The row; then the model's memory is freed."""
        found, used = self.converted.method.acceleration, self.converted.used
        figures = {
            f"{self.job.unit}/s": 1e3 * self.job.items / own.ms,
            "promised saving ms": found.saved_ms if found else 0.0,
        }
        self.close()
        return Row(self.row, precision(self.device), self.shape, used, own, peers, figures=figures)


def in_the_trainer(
    own: Loop, plain: Loop, batch: tuple[int, int], options: argparse.Namespace
) -> Row:
    """The row of the Trainer with the model of `own`, in turns with the loop of `plain`."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from methods.integrations.trainer import MethodCallback

    on_gpu = own.device.type == "cuda"
    turns: list[tuple[float, float]] = []  # milliseconds of a step, in the Trainer and in the loop
    warm: dict[str, Any] = {}

    def milliseconds(start: float) -> float:
        own.wait()
        return 1e3 * (time.perf_counter() - start) / BLOCK

    class Turns(TrainerCallback):
        """Runs BLOCK steps of the loop after each BLOCK of the Trainer, until there are enough."""

        begun = started = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % BLOCK:
                return
            trained, start = milliseconds(self.started), time.perf_counter()
            for _step in range(BLOCK):
                plain.next()
            turns.append((trained, milliseconds(start)))
            seconds = time.perf_counter() - self.begun
            steady = settled([sum(turn) for turn in turns])
            limit = seconds >= SETTLE_LIMIT_S
            if not warm and (not on_gpu or limit or (steady and seconds >= SUSTAINED_S)):
                warm.update(warm_s=seconds, settled=steady)
                turns.clear()
            control.should_training_stop = bool(warm) and len(turns) == options.repeats
            self.started = time.perf_counter()

    (sequences, _), model = batch, own.model
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(300, batch)]
    with tempfile.TemporaryDirectory() as folder, own.compiling():
        arguments = TrainingArguments(
            folder, max_steps=10_000, per_device_train_batch_size=sequences, learning_rate=1e-4,
            lr_scheduler_type="constant", bf16=on_gpu, use_cpu=not on_gpu, report_to=[],
            logging_strategy="no", save_strategy="no", disable_tqdm=True,
            logging_nan_inf_filter=False,  # which makes the host wait for the loss of every step
        )  # fmt: skip
        callbacks = [MethodCallback(own.converted.method, model, arguments), Turns()]
        data: Any = rows * 1000
        given: Any = {"callbacks": callbacks, "optimizers": (own.optimizer, None)}
        Trainer(model, arguments, train_dataset=data, **given).train()
    plain.close()
    mine, loop = zip(*turns, strict=True)
    return own.result(quantiles(list(mine), **warm), {"own loop": statistics.median(loop)})


# --- the host alone ------------------------------------------------------------------------------


def host(name: str, width: int, options: argparse.Namespace) -> Row:
    """The host's time of a layer's passes and `nn.Linear`'s, and of a product and `F.linear`'s."""
    on, dtype = options.device, variants.dtype_of(options.device)
    plain = nn.Linear(width, width, bias=False, device=on)
    model = nn.Sequential(nn.Linear(width, width, bias=False, device=on))
    # Every product that can be sparse is, even if that is slower for the device.
    matmul = "cusparselt" if (on.type, options.matmul) == ("cuda", "auto") else options.matmul
    converted = variants.convert(name.removeprefix("host, "), model, ("*",), dtype, TOKENS, matmul)
    converted.before(0)
    x = torch.randn(TOKENS, width, device=on, dtype=dtype, requires_grad=True)
    dy = torch.ones(TOKENS, width, device=on, dtype=dtype)

    def passes(layer: nn.Module) -> None:
        x.grad = None
        layer.zero_grad()
        with torch.autocast(on.type, dtype, enabled=on.type == "cuda"):
            y = layer(x)
        y.backward(dy)

    weight, (layer,) = plain.weight.detach().to(dtype), model
    calls = {
        "sparse": lambda: passes(model), "dense": lambda: passes(plain),
        "F.linear": lambda: F.linear(x.detach(), weight),
    }  # fmt: skip
    assert isinstance(layer, SparseLinear)
    packed = layer.packed_operands()[0] if layer.dtype == dtype and layer.packed is not None else 0
    if isinstance(packed, Packed) and not converted.sparse["0"].fp8:
        calls["product"] = lambda: linear24(packed, x.detach())
    samples: dict[str, list[float]] = {call: [] for call in calls}
    for turn in range(options.repeats + 1):
        for call, run in calls.items():
            if on.type == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()  # the host's time, without waiting for the device
            for _ in range(CALLS):
                run()
            if turn:  # the first one compiles
                samples[call].append(1e3 * (time.perf_counter() - start) / CALLS)
    found = {call: statistics.median(own) for call, own in samples.items()}
    figures = {f"{call} us": 1e3 * found[call] for call in ("product", "F.linear") if call in found}
    shape, time_ = f"{TOKENS} x {width} -> {width}", quantiles(samples["sparse"])
    used, peers = converted.used, {"dense": found["dense"]}
    return Row(name, precision(on), shape, used, time_, peers, figures=figures)
