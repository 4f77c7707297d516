"""Linears of a finished model that multiply with packed 2:4 weights, from so many tokens on as that
is faster.

A product of few tokens reads weights and launches kernels, and a sparse one is slower to launch;
one of many tokens computes, half as much where it is sparse. Between them lies a crossover. It is
measured for each shape of weight on the GPU at hand, as the layers run: launched from Python one
after the other, or in a CUDA graph. Below it a layer multiplies with its dense weight, which it
keeps: packed weights take 9/16 of its memory in addition. They lie in one layout, that of the
kernel, cuSPARSELt's or one of our own, that was measured to be the fastest with many tokens.
"""

from __future__ import annotations

import functools
import statistics
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from common_kernels import Packed24, check24, matmul24, pack24
from common_kernels.matmul import fastest, is_faster, linear24, unavailable
from common_kernels.matmul.cusparselt import Problem
from common_kernels.pack import BUFFERED, check_form
from common_kernels.pack.operands import fill_up, pack24_

COUNTS = (1, 8, 64, 256, 1024, 4096, 16384)  # tokens at which products are measured
# Every number of tokens has a plan of its own; beyond this many they are filled up to multiples.
STEP, LEAST = 64, 8  # LEAST: what cuSPARSELt takes of 16-bit types
MANY = 4096  # tokens at which the kernels of a shape are compared
TORCH = "cutlass_sm80"  # the layout of torch's own products
LAYOUTS = {"cusparselt": BUFFERED, "cutlass": TORCH}


class PackedProduct(nn.Module):
    """A linear with a packed copy of its 2:4 weight beside it, used from `crossover` tokens on.

    For inference. Where a gradient is asked for, in another dtype or on another device than that
    of the copy, in a copy of the layer, and once the weight has been changed or replaced, it is the
    dense linear that it was. A change that goes round autograd is not seen (`weight.data += ...`,
    as peft merges), and in a compiled model none is: `pack` again.
    """

    packed: Packed24
    crossover: int
    weight: Tensor
    bias: Tensor | None
    source: tuple[weakref.ref[Tensor], int]  # the weight that was packed, and its version

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        tokens = x.numel() // x.shape[-1]
        if not self.runs_packed(x, tokens):
            return super().forward(x)
        rows = x.reshape(tokens, x.shape[-1])
        rows = fill_up(rows, -tokens % (STEP if tokens > STEP else LEAST))
        if self.packed.layout == TORCH:
            y = matmul24(self.packed, rows, self.bias, backend="cutlass")
        else:
            y = linear24(self.packed, rows, self.bias)
        return y[:tokens].reshape(*x.shape[:-1], -1)

    def runs_packed(self, x: Tensor, tokens: int) -> bool:
        """True if the product with `x`, of so many tokens, is the packed one."""
        if tokens < max(1, self.crossover) or x.dtype != self.packed.dtype:
            return False
        if torch.is_grad_enabled() and (x.requires_grad or self.weight.requires_grad):
            return False
        if x.device != self.packed.values.device:
            return False
        if torch.compiler.is_compiling():  # a graph cannot ask for versions
            return True
        weight, version = self.source  # another tensor may have the same version
        return weight() is self.weight and self.weight._version == version

    def problem(self, tokens: int) -> Problem | None:
        """The product for so many tokens, filled up; None if it is torch's, which has no algorithms
        to measure."""
        if self.packed.layout == TORCH:
            return None
        step = STEP if tokens > STEP else LEAST
        filled, dtype, biased = -(-tokens // step) * step, self.packed.dtype, self.bias is not None
        of = *self.packed.shape, filled, dtype, dtype, True, True, biased
        return Problem(*of, layout=self.packed.layout)


@functools.cache
def _class_of(kind: Any) -> Any:
    """The class of packed layers of a `kind`, of which they keep everything else."""
    return type(f"Packed{kind.__name__}", (PackedProduct, kind), {})


def layout_for(device: torch.device, dtype: torch.dtype) -> str:
    """The layout of packed weights that `device` can multiply with.

    Raises:
        ValueError: it can run none, and why.
    """
    reasons = {name: unavailable(name, device, dtype) for name in LAYOUTS}
    for name, layout in LAYOUTS.items():
        if reasons[name] is None:
            return layout
    raise ValueError(f"no 2:4 products here: {'; '.join(map(str, reasons.values()))}")


def _layout_of(module: Any, measures: bool) -> str:
    """The layout for the packed weight of a linear: where it `measures`, that of the kernels, our
    own or cuSPARSELt's, whose products of many tokens are fastest."""
    weight = module.weight
    layout = layout_for(weight.device, weight.dtype)
    if layout == TORCH or weight.device.type != "cuda" or not measures:
        return layout
    dtype, biased = weight.dtype, module.bias is not None
    problem = Problem(*_shape(module), MANY, dtype, dtype, True, True, biased)
    found = fastest(problem, weight.device)
    return layout if found is None else found.layout


@torch.inference_mode(False)  # tensors made in it have no version, which tells that they changed
@torch.no_grad()
def pack(
    model: nn.Module, crossover: int | None = None, graphs: bool = False
) -> dict[str, int | None]:
    """Let the 2:4 linears of a model, ours or of transformers, run packed where that is faster.

    In place, for inference: their weights need no gradient any more. Names and forms of parameters
    stay, so the model is saved as before. What is packed already is packed anew.

    Args:
        model: on its device, in bf16 or fp16.
        crossover: the least number of tokens to run packed; None measures it for each shape.
        graphs: measure it for a model that will be replayed from CUDA graphs, where launching
            costs nothing.
    Returns:
        For each 2:4 linear by name its crossover; None where dense products are always faster, and
        for a shape that cannot be packed.
    Raises:
        ValueError: the device or dtype has no 2:4 products, no linear is 2:4 and can be packed, or
            the weights were made in `inference_mode`.
    """
    for module in model.modules():
        if isinstance(module, PackedProduct):
            _restore(module)
    linears = {name: m for name, m in model.named_modules() if _is_24(m)}
    if not linears:
        raise ValueError("no linear of this model is 2:4, so there is nothing to pack")
    for name, module in linears.items():
        if module.get_parameter("weight").is_inference():
            raise ValueError(
                f"{name} was made in torch.inference_mode, and does not tell when it is changed; "
                "make or load the model outside of it"
            )
    alike: dict[Any, list[str]] = {}
    unfit: dict[str, str] = {}
    for name, module in linears.items():
        weight: Any = module.weight
        layout = layout_for(weight.device, weight.dtype)
        try:
            check_form(_shape(module), weight.dtype, layout)
        except ValueError as error:
            unfit[name] = f"{name} cannot be packed: {error}"
            continue
        kind = type(module), weight.shape, module.bias is None, weight.dtype, weight.device
        alike.setdefault(kind, []).append(name)
    if len(unfit) == len(linears):
        raise ValueError(next(iter(unfit.values())))
    found: dict[str, int | None] = dict.fromkeys(linears)
    for names in alike.values():
        layout = _layout_of(model.get_submodule(names[0]), measures=crossover is None)
        layers: list[PackedProduct] = []
        try:
            for name in names:
                layers.append(_packed(model.get_submodule(name), layout))
            count = _measured(layers, graphs) if crossover is None else crossover
        except BaseException:
            for layer in layers:
                _restore(layer)
            raise
        for name, layer in zip(names, layers, strict=True):
            found[name] = count
            if count is None:
                _restore(layer)
            else:
                layer.crossover = count
    return found


def crossovers(model: nn.Module) -> dict[str, int]:
    """From how many tokens on each packed linear of a model runs packed, by name."""
    layers = model.named_modules()
    return {name: layer.crossover for name, layer in layers if isinstance(layer, PackedProduct)}


def _is_conv1d(module: nn.Module) -> bool:
    """True for GPT-2's linears in transformers, whose weight is [in, out]."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")


def _shape(module: Any) -> tuple[int, int]:
    """(outputs, inputs) of a linear."""
    shape = tuple(module.weight.shape)
    return shape[::-1] if _is_conv1d(module) else shape


def _is_24(module: nn.Module) -> bool:
    if type(module) is not nn.Linear and not _is_conv1d(module):
        return False
    weight: Any = module.weight
    along = 0 if _is_conv1d(module) else 1
    return weight.shape[along] % 4 == 0 and not int(check24(weight, dim=along))


def _packed(module: Any, layout: str) -> PackedProduct:
    """The module itself, with packed weights, which it uses for any number of tokens."""
    weight = module.weight.detach()
    matrix = weight.t().contiguous() if _is_conv1d(module) else weight
    if layout in LAYOUTS.values():
        packed = pack24(matrix, matrix != 0, layout)
    else:
        shape = tuple(matrix.shape)
        packed = Packed24.empty(shape, weight.dtype, weight.device, layout)
        pack24_(packed, matrix, "mask", matrix != 0)
    module.weight.requires_grad_(False)
    kind: Any = type(module)
    module.__class__ = _class_of(kind)
    module.packed, module.crossover = packed, 0
    module.source = weakref.ref(module.weight), module.weight._version
    return module


def _restore(module: Any) -> None:
    """Make a packed module the linear that it was."""
    module.__class__ = type(module).__mro__[2]
    del module.packed, module.crossover, module.source


def _measured(layers: Sequence[PackedProduct], graphs: bool) -> int | None:
    """The crossover of layers of one shape."""
    device = layers[0].weight.device
    if device.type != "cuda":
        raise ValueError(f"nothing is measured on a {device.type}; give the crossover")
    return least(functools.partial(_faster, layers, graphs))


def _faster(layers: Sequence[PackedProduct], graphs: bool, tokens: int) -> bool:
    """True if layers of one shape are faster packed with so many tokens."""
    packed, device, problem = layers[0].packed, layers[0].weight.device, layers[0].problem(tokens)
    # It finds the fastest algorithm, and its verdict is of a weight that stays in the cache.
    if problem is not None and not is_faster(problem, device) and not graphs:
        return False
    x = torch.randn(tokens, packed.shape[1], dtype=packed.dtype, device=device)
    variants = [[functools.partial(run, layer, x) for layer in layers] for run in (_dense, _sparse)]
    dense_ms, sparse_ms = times_ms(variants, graphs)
    return sparse_ms < dense_ms


def _sparse(layer: PackedProduct, x: Tensor) -> Tensor:
    return layer(x)


def _dense(layer: PackedProduct, x: Tensor) -> Tensor:
    return super(PackedProduct, layer).forward(x)


def least(faster: Callable[[int], bool]) -> int | None:
    """The least number of tokens from which on `faster` holds, to a factor of 2; None if it does
    not hold for the largest of `COUNTS`."""
    found = None
    for tokens in reversed(COUNTS):
        if not faster(tokens):
            if found is not None and found >= 4 * tokens and faster(found // 2):
                return found // 2
            return found
        found = tokens
    return found


def times_ms(
    variants: Sequence[Sequence[Callable[[], Any]]], graphs: bool, repeats: int = 5
) -> list[float]:
    """Median milliseconds of a call of each variant, launched from Python one after the other, or
    replayed from a CUDA graph of all.

    The calls of a variant work on memory of their own, as the layers of a model do; the variants
    take turns, so that the GPU's clock is the same for all.
    """
    runs = [_captured(calls) if graphs else functools.partial(_launch, calls) for calls in variants]
    samples: list[list[float]] = [[] for _ in variants]
    for turn in range(repeats + 1):
        for calls, run, found in zip(variants, runs, samples, strict=True):
            rounds = -(-16 // len(calls))
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(rounds):
                run()
            torch.cuda.synchronize()
            if turn:  # the first one plans and allocates
                found.append(1e3 * (time.perf_counter() - start) / rounds / len(calls))
    return [statistics.median(found) for found in samples]


def _launch(calls: Sequence[Callable[[], Any]]) -> None:
    for call in calls:
        call()


@functools.cache  # cuSPARSELt's plans are kept for each stream
def _stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _captured(calls: Sequence[Callable[[], Any]]) -> Callable[[], None]:
    """A function that replays the calls from a CUDA graph."""
    stream = _stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        _launch(calls)  # plans, which nothing can while a graph is captured
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # What another thread does (pinning memory, say) does not disturb the capture.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            _launch(calls)
    return graph.replay
