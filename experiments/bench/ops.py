"""Compare every operator with a copy of its input: `python -m experiments.bench ops`.

On a CPU operators run on the weights of GPT-2 124M in fp32, and memory is measured as well. On a
GPU they run on matrices larger than any cache, in bf16 and fp32, and are compared with plain
formulations, eager and compiled; the packers and the one-pass optimizer step are measured, too.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import common_kernels as ck
from common_kernels import backend
from experiments.bench import packers, passes
from experiments.bench.report import Report, Row
from experiments.bench.timing import Call, in_turns
from experiments.support.errors import UserError

# The attention and FFN weights of GPT-2 124M: 85 million numbers.
LAYERS = 12
SHAPES = ((2304, 768), (768, 768), (3072, 768), (768, 3072))

QUICK_SHAPES = ((16, 32), (8, 32))
GPU_SHAPE, QUICK_SHAPE = (8192, 8192), (64, 128)  # the first is 128 MiB in bf16
GPU_BUFFERS = 2

Arguments = tuple[Any, ...]


@dataclass(frozen=True)
class Op:
    """An operator with the plain formulation that it must agree with, and its goals.

    `prepare` turns a weight into the arguments of `run`; `agrees` checks the output for a weight.

    moved: the least bytes read and written per entry of the weight, given the bytes of an entry.
    limit: goal on a CPU: the largest number of clones of the weights that take as long.
    share: goal on a GPU: the share of a copy's bandwidth.
    plain: another formulation, compared on a GPU; `through` turns it into a counterpart of `run`.
    gpu_only: not measured on a CPU.
    """

    run: Callable[..., Tensor]
    agrees: Callable[[Tensor, Tensor], bool]
    moved: Callable[[float], float]
    limit: float | None = None
    share: float = 0.8
    prepare: Callable[[Tensor], Arguments] = lambda w: (w,)
    plain: Callable[..., Tensor] | None = None
    through: Callable[..., Callable[..., Tensor]] = lambda function: function
    gpu_only: bool = False


# --- checks of results ---------------------------------------------------------------------------


def groups(x: Tensor, m: int = 4) -> Tensor:
    return x.unflatten(-1, (-1, m))


def top(w: Tensor, n: int = 2, m: int = 4) -> Tensor:
    order = groups(w.abs(), m).sort(dim=-1, descending=True, stable=True).indices[..., :n]
    return torch.zeros_like(groups(w, m), dtype=torch.bool).scatter_(-1, order, True).flatten(-2)


def soft(w: Tensor) -> Tensor:
    t = groups(w.abs()).sort(-1).values[..., 1:2]
    return (groups(w).sign() * (groups(w.abs()) - t).relu()).flatten(-2)


def is_best_tile_mask(w: Tensor, mask: Tensor) -> bool:
    """True if `mask` is 2:4 along rows and columns and no pattern of a tile keeps more magnitude,
    up to the rounding of fp32 sums."""
    bits = torch.cartesian_prod(*[torch.arange(2)] * 16).view(-1, 4, 4)
    bits = bits[(bits.sum(1) == 2).all(1) & (bits.sum(2) == 2).all(1)].flatten(1)
    patterns = bits.double().to(w.device)
    magnitude, kept = tiles(w.abs()), tiles(mask)
    best = torch.cat([(part @ patterns.t()).amax(-1) for part in magnitude.flatten(2).split(512)])
    legal = (kept.sum(-1) == 2).all() and (kept.sum(-2) == 2).all()
    return bool(legal and ((magnitude * kept).sum((-1, -2)) >= best * (1 - 1e-6)).all())


def is_greedy_tile_mask(w: Tensor, mask: Tensor) -> bool:
    """True if `mask` may be a greedy one: it keeps at most two per row and column, and at least
    seven per tile."""
    kept = tiles(mask)
    legal = (kept.sum(-1) <= 2).all() and (kept.sum(-2) <= 2).all()
    plain = ck.transposable_mask24(w, "greedy", backend="cpu")
    return bool(legal and (kept.sum((-1, -2)) >= 7).all()) and torch.equal(mask, plain)


def tiles(x: Tensor) -> Tensor:
    """x [4 a, 4 b] as fp64 tiles [a, b, 4, 4]."""
    return groups(x.double().unflatten(0, (-1, 4))).transpose(1, 2)


def is_sample(w: Tensor, out: Tensor) -> bool:
    """True if `out` keeps two entries per group, each max(|w|, H) with w's sign, where H is the
    smaller of half the group's sum and the sum without its largest entry."""
    a = groups(w.double().abs())
    total = a.sum(-1, keepdim=True)
    h = torch.minimum(total / 2, total - a.amax(-1, keepdim=True))
    kept = groups(out) != 0
    want = torch.where(kept, groups(w).sign() * torch.maximum(a, h), 0)
    rtol = max(1e-5, torch.finfo(w.dtype).eps)
    close = torch.isclose(groups(out).double(), want, rtol=rtol, atol=0)
    return bool((kept.sum(-1) == 2).all() and close.all())


def e4m3_codes(w: Tensor) -> tuple[Tensor, Tensor]:
    amax = w.float().abs().amax()
    scale = torch.full_like(amax, 448) / amax  # number / tensor would round differently
    return (w.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def through_e4m3(w: Tensor) -> Tensor:
    codes, scale = e4m3_codes(w)
    return (codes.float() / scale).to(w.dtype)


def gated(w: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    value, gate = w.float().chunk(2, -1)
    return (value * activation(gate)).to(w.dtype)


def gelu(gate: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh")


def is_close(out: Tensor, want: Tensor) -> bool:
    """True if `out` equals `want` up to a few units in the last place."""
    eps = torch.finfo(out.dtype).eps
    return torch.allclose(
        out.float(), want.float(), rtol=4 * eps, atol=4 * eps * want.abs().max().item()
    )


def gradients(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """A function (x, dy) -> gradient of x, which runs forward and backward of `function`."""
    return lambda x, dy: torch.autograd.grad(function(x), x, dy)[0]


def leaf_and_gradient(w: Tensor) -> Arguments:
    return w.detach().clone().requires_grad_(), w.chunk(2, -1)[0].contiguous()


def through_glu(w: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    return gradients(lambda x: gated(x, activation))(*leaf_and_gradient(w.float()))


# --- plain formulations, which a compiler can fuse -----------------------------------------------


def compared(w: Tensor) -> Tensor:
    """The 2:4 mask of w by comparing every pair of a group: an entry is kept if fewer than two
    others beat it."""
    a = groups(w.abs())
    i = torch.arange(4, device=w.device)
    one, other = a.unsqueeze(-1), a.unsqueeze(-2)
    beaten = (other > one) | ((other == one) & (i < i[:, None]))
    return (beaten.sum(-1) < 2).flatten(-2)


def compared_soft(w: Tensor) -> Tensor:
    a, b, c, d = groups(w.abs()).unbind(-1)
    least, most = torch.minimum, torch.maximum
    t = least(most(least(a, b), least(c, d)), least(most(a, b), most(c, d)))
    return (groups(w).sign() * (groups(w.abs()) - t.unsqueeze(-1)).relu()).flatten(-2)


# --- the operators -------------------------------------------------------------------------------


def mask_and_weight(w: Tensor) -> Arguments:
    return torch.zeros_like(w), w, ck.nm_mask(w)


def with_key(offset: int) -> Callable[[Tensor], Arguments]:
    """A function w -> (w, seed, offset) with seed and offset as tensors on w's device, as in a
    training step."""
    return lambda w: (w, *(torch.tensor(k, device=w.device) for k in (1, offset)))


def with_bits(w: Tensor) -> Arguments:
    return w, ck.pack_mask(ck.nm_mask(w))


def compressed(w: Tensor) -> Tensor:
    return w[top(w)].view(len(w), -1)


OPS = {
    "nm_mask": Op(
        ck.nm_mask, lambda w, out: torch.equal(out, top(w)), lambda b: b + 1, limit=1.5,
        plain=compared,
    ),
    "nm_mask, dim 0": Op(
        lambda w: ck.nm_mask(w, dim=0), lambda w, out: torch.equal(out, top(w.t()).t()),
        lambda b: b + 1, gpu_only=True,
    ),
    "nm_mask, 2:8": Op(
        lambda w: ck.nm_mask(w, 2, 8), lambda w, out: torch.equal(out, top(w, 2, 8)),
        lambda b: b + 1, gpu_only=True,
    ),
    "double_prune_mask": Op(
        ck.double_prune_mask, lambda w, out: torch.equal(out, top((w * top(w)).t()).t()),
        lambda b: b + 1, prepare=lambda w: (w * ck.nm_mask(w),),
    ),
    "transposable_mask24": Op(
        ck.transposable_mask24, is_best_tile_mask, lambda b: b + 1, limit=5, share=0.5
    ),
    "transposable_mask24, greedy": Op(
        lambda w: ck.transposable_mask24(w, "greedy"), is_greedy_tile_mask, lambda b: b + 1,
        gpu_only=True,
    ),
    "soft_threshold24": Op(
        ck.soft_threshold24, lambda w, out: torch.equal(out, soft(w)), lambda b: 2 * b, limit=2,
        plain=compared_soft,
    ),
    "mvue24": Op(ck.mvue24, is_sample, lambda b: 2 * b, limit=12, prepare=with_key(0)),
    "mvue24, dim 0": Op(
        lambda w, seed, offset: ck.mvue24(w, seed, offset, dim=0),
        lambda w, out: is_sample(w.t(), out.t()),
        lambda b: 2 * b, prepare=with_key(0),
    ),
    "mvue24, odd offset": Op(
        ck.mvue24, is_sample, lambda b: 2 * b, prepare=with_key(3), gpu_only=True
    ),
    "masked_decay_": Op(
        lambda grad, w, mask: ck.masked_decay_(grad, w, mask, 0.1),
        lambda w, out: torch.equal(out, 0.1 * w * ~top(w)),
        lambda b: 3 * b + 1, prepare=mask_and_weight,
        plain=lambda grad, w, mask: grad.add_(torch.where(mask, 0.0, 0.1 * w)),
    ),
    "fake_fp8": Op(
        lambda w: ck.fake_fp8(w, "e4m3"), lambda w, out: torch.equal(out, through_e4m3(w)),
        lambda b: 3 * b, plain=through_e4m3,
    ),
    "quantize_fp8": Op(
        lambda w: ck.quantize_fp8(w, "e4m3")[0],
        lambda w, out: torch.equal(out.float(), e4m3_codes(w)[0].float()),
        lambda b: 2 * b + 1, plain=lambda w: e4m3_codes(w)[0], gpu_only=True,
    ),
    "geglu": Op(
        ck.geglu, lambda w, out: is_close(out, gated(w, gelu)), lambda b: 1.5 * b,
        plain=lambda w: gated(w, gelu),
    ),
    "geglu, forward and backward": Op(
        gradients(ck.geglu),
        lambda w, out: is_close(out, through_glu(w, gelu)), lambda b: 4 * b,
        prepare=leaf_and_gradient, plain=lambda w: gated(w, gelu), through=gradients,
    ),
    "swiglu": Op(
        ck.swiglu, lambda w, out: is_close(out, gated(w, F.silu)), lambda b: 1.5 * b,
        plain=lambda w: gated(w, F.silu),
    ),
    "swiglu, forward and backward": Op(
        gradients(ck.swiglu),
        lambda w, out: is_close(out, through_glu(w, F.silu)), lambda b: 4 * b,
        prepare=leaf_and_gradient, plain=lambda w: gated(w, F.silu), through=gradients,
    ),
    "compress_nm": Op(
        ck.compress_nm, lambda w, out: torch.equal(out, compressed(w)), lambda b: 1.5 * b + 1 / 8,
        prepare=with_bits,
    ),
    "expand_nm": Op(
        ck.expand_nm, lambda w, out: torch.equal(out, w * top(w)), lambda b: 1.5 * b + 1 / 8,
        prepare=lambda w: (ck.compress_nm(*with_bits(w)), with_bits(w)[1]),
    ),
    # Measures of training.
    "check24": Op(
        ck.check24, lambda w, out: out.item() == w.numel() // 4, lambda b: b
    ),
    "flip_rate": Op(
        ck.flip_rate, lambda w, out: out.item() == 1, lambda b: 2,
        prepare=lambda w: (ck.nm_mask(w), ~ck.nm_mask(w)),
    ),
}  # fmt: skip


def bench(options: argparse.Namespace, report: Report) -> None:
    if options.device.type == "cpu":
        on_cpu(options, report)
    else:
        on_gpu(options, report)


def check(name: str, op: Op, w: Tensor) -> None:
    """Raise a `UserError` if the operator disagrees with its plain formulation."""
    if not op.agrees(w, op.run(*op.prepare(w))):
        raise UserError(
            f"{name} disagrees with its plain formulation on shape {tuple(w.shape)}, {w.dtype}: "
            "no time is reported; run `pytest tests/common_kernels`"
        )


# --- CPU -----------------------------------------------------------------------------------------


def weights(layers: int, quick: bool = False) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (QUICK_SHAPES if quick else SHAPES) * layers
    return [torch.empty(shape).normal_(std=0.02, generator=generator) for shape in shapes]


def on_cpu(options: argparse.Namespace, report: Report) -> None:
    """Measure the operators on the CPU: first agreement, then memory, then time."""
    torch.set_num_threads(options.threads)
    names = report.chosen(name for name, op in OPS.items() if not op.gpu_only)
    quick = options.quick
    for name in names:
        for w in weights(1, quick):
            check(name, OPS[name], w)
    report.note("correctness: green")
    memory = {}
    for name in () if quick else names:
        grown = in_fresh_process(peak_memory, name, options.threads)
        memory[name] = {"peak memory / weights": grown}
    # Use one large matrix: the allocator recycles blocks of a single weight's size, but a block of
    # this size is new in each call and costs the same page faults for clone() and the operator.
    layers = weights(1 if quick else LAYERS, quick)
    w = torch.cat([w.view(-1, layers[0].shape[1]) for w in layers])
    for name in names:
        op = OPS[name]
        arguments = op.prepare(w)
        calls: dict[str, Call] = {
            "clone": lambda _: w.clone(),
            name: lambda _, op=op, arguments=arguments: op.run(*arguments),  # type: ignore[misc]
        }
        times = in_turns(calls, options.device, options.repeats)
        clones = times[name].ms / times["clone"].ms
        moved = w.numel() * op.moved(w.itemsize)
        report.add(
            Row(
                name, "float32", shape_name(w),
                backend.resolve(w.device),
                times[name],
                peers={"clone": times["clone"].ms},
                limit_ms=times["clone"].ms * moved / (2 * w.nbytes),
                bytes=moved,
                figures={"clones": clones, **memory.get(name, {})},
                target="" if op.limit is None else f"at most {op.limit:g} clones",
                met=None if op.limit is None else clones <= op.limit,
            )
        )  # fmt: skip
    left_out = [name for name, op in OPS.items() if op.gpu_only]
    report.leave_out(f"without a GPU: {'; '.join([*left_out, *packers.PACKERS, *passes.PASSES])}")


def peak_memory(name: str, threads: int) -> float:
    """The growth of the peak resident memory while the operator runs over all weights, as a
    multiple of their size.

    The outputs are kept, so they count. Run it in a fresh process, whose peak is its present size.
    """
    torch.set_num_threads(threads)
    op, inputs = OPS[name], weights(LAYERS)
    arguments = [op.prepare(w) for w in inputs]
    op.run(*op.prepare(torch.ones(64, 64)))  # so that the first call's imports are not counted
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outputs = [op.run(*args) for args in arguments]
    growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB on Linux
    del outputs
    return growth * unit / sum(w.nbytes for w in inputs)


def in_fresh_process(function: Callable[..., Any], *args: Any) -> Any:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def shape_name(w: Tensor) -> str:
    return " x ".join(map(str, w.shape))


# --- GPU -----------------------------------------------------------------------------------------


def matrices(dtype: torch.dtype, device: torch.device, quick: bool = False) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    shape = QUICK_SHAPE if quick else GPU_SHAPE
    return [
        torch.empty(shape, device=device).normal_(std=0.02, generator=generator).to(dtype)
        for _ in range(GPU_BUFFERS)
    ]


def on_gpu(options: argparse.Namespace, report: Report) -> None:
    names = report.chosen([*OPS, *packers.PACKERS, *passes.PASSES])
    ops = [name for name in names if name in OPS]
    chosen = [name for name in names if name in packers.PACKERS]
    steps = [name for name in names if name in passes.PASSES]
    for dtype in (torch.bfloat16, torch.float32):
        w = matrices(dtype, options.device, options.quick)[0]
        for name in ops:
            check(name, OPS[name], w)
        for name in chosen:
            packers.check(name, w)
    for name in steps:
        passes.check(name, w)
    report.note("correctness: green")
    for dtype in (torch.bfloat16, torch.float32):
        inputs = matrices(dtype, options.device, options.quick)
        for name in ops:
            time_op(name, inputs, options, report)
        packed = [packers.Inputs(w) for w in inputs] if chosen else []
        for name in chosen:
            calls = packers.calls(name, packed, report)
            moved, used = packers.PACKERS[name].moved, backend.resolve(options.device)
            report.add(beside_copy(name, used, calls, moved, 1 / packers.FLOORS, inputs, options))
    for name in steps:  # the optimizer steps, only for fp32 weights
        report.add(time_pass(name, inputs, options))


def time_pass(name: str, inputs: list[Tensor], options: argparse.Namespace) -> Row:
    step, used = passes.PASSES[name], backend.resolve(options.device)
    calls = passes.calls(name, [passes.inputs(w, name) for w in inputs])
    row = beside_copy(name, used, calls, lambda _: step.moved, step.share, inputs, options)
    row.figures["bytes a weight"] = step.moved
    row.figures["bytes a weight, separate passes"] = step.moved_apart
    return row


def time_op(name: str, inputs: list[Tensor], options: argparse.Namespace, report: Report) -> None:
    """The row of an operator timed together with a copy and its plain formulation, if any."""
    op, w = OPS[name], inputs[0]
    arguments = [op.prepare(x) for x in inputs]
    calls = {name: lambda i: op.run(*arguments[i])}
    if op.plain is not None:
        eager = op.through(op.plain)
        compiled = op.through(torch.compile(op.plain, dynamic=False))
        if report.usable(f"{name}, {w.dtype}: compiled", lambda: compiled(*arguments[0])):
            calls["compiled"] = lambda i: compiled(*arguments[i])
        calls["eager"] = lambda i: eager(*arguments[i])
    used = backend.resolve(w.device)
    report.add(beside_copy(name, used, calls, op.moved, op.share, inputs, options))


def beside_copy(
    name: str,
    used: str,
    calls: dict[str, Call],
    moved: Callable[[float], float],
    share: float,
    inputs: list[Tensor],
    options: argparse.Namespace,
) -> Row:
    """The row of `calls[name]`, with the other calls as peers and a copy of `inputs` as limit."""
    w = inputs[0]
    calls = {"clone": lambda i: inputs[i].clone(), **calls}
    times = in_turns(calls, options.device, options.repeats, len(inputs))
    work = w.numel() * moved(w.itemsize)
    limit_ms = times["clone"].ms * work / (2 * w.nbytes)
    return Row(
        name, str(w.dtype).removeprefix("torch."), shape_name(w), used, times[name],
        peers={peer: time.ms for peer, time in times.items() if peer != name},
        limit_ms=limit_ms,
        bytes=work,
        figures={"GB/s": work / times[name].ms / 1e6},
        target=f"at least {share:.0%} of the limit",
        met=limit_ms / times[name].ms >= share,
    )  # fmt: skip
