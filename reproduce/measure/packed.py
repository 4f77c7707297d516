"""Inference with packed 2:4 weights, and packing itself."""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common_kernels import matmul24, nm_mask
from common_kernels.decode import MOST
from common_kernels.matmul import is_faster, library_layout
from common_kernels.pack import Packed24
from common_kernels.pack.operands import pack_both24_
from experiments.bench import gates, variants
from experiments.bench.timing import Call
from models import packed
from models.decoding import Decoder
from models.gpt2 import MLP
from models.packed import Limits, PackedProduct
from reproduce.measure import base
from reproduce.measure.base import Layer, MethodLayer, Metrics, Report, Result, Times


@torch.no_grad()
def to_packed(
    model: nn.Module,
    chosen: Callable[[str], bool],
    tokens: Iterable[int],
    device: torch.device,
    few: int = 0,
) -> str:
    """Prune the chosen linears of `model` to 2:4 by magnitude and pack them, in place; return the
    name of the packed layout. Without sparse products they multiply dense, and it is `dense`.

    chosen: tells which names to pack. tokens: numbers of tokens for which the fastest product is
    searched. few: up to so many tokens are multiplied by `few_tokens24`, and more run packed only
    where that is faster; the name then begins so.
    """
    for name, module in model.named_modules():
        if type(module) is nn.Linear and chosen(name):
            module.weight.mul_(nm_mask(module.weight))
    try:
        packed.layout_for(device, next(model.parameters()).dtype)
    except ValueError:
        return "dense"
    packed.pack(model, Limits(few, 0))
    seen: dict[tuple[int, ...], list[PackedProduct]] = {}
    for layer in packed_layers(model):
        seen.setdefault(layer.packed.shape, []).append(layer)
    for layers in seen.values():
        faster = [check(layers[0], count, device) for count in tokens]
        for layer in layers if few and not all(faster) else ():
            layer.limits = layer.limits._replace(crossover=None)
    packs = [one for one in packed_layers(model) if one.limits.crossover is not None]
    used = sorted({layer.packed.layout for layer in packs}) or ["dense"]
    return ", ".join([*(["few"] if few else []), *used])


def packed_layers(model: nn.Module) -> list[PackedProduct]:
    """The linears of a model that run packed."""
    return [module for module in model.modules() if isinstance(module, PackedProduct)]


def check(layer: PackedProduct, tokens: int, device: torch.device) -> bool:
    """True if the sparse product is faster with this number of tokens, as far as that can be
    measured; the fastest is searched. Raises a `UserError` if it is wrong."""
    (rows, columns), dtype, bias = layer.packed.shape, layer.packed.dtype, layer.bias
    problem = layer.problem(tokens) if tokens > layer.limits.few else None
    faster = problem is None or is_faster(problem, device)
    x = torch.randn(tokens, columns, dtype=dtype, device=device)
    want = F.linear(x.float(), layer.weight.float(), None if bias is None else bias.float())
    allowed = gates.tolerance(variants.variant("dense"), dtype, columns)
    said = f"the packed product {tokens} x {columns} -> {rows} is"
    gates.agree(said, layer(x), want, allowed)
    return faster


def packing(matrices: list[Tensor]) -> dict[str, Call]:
    """The calls to time on these matrices, by name.

    pack: choose a transposable mask, and pack the matrix and its transpose. library: pack a 2:4
    matrix by cuSPARSELt itself; on a GPU only. copy: copy the matrix.
    """
    first = matrices[0]
    packs = first.dtype.itemsize == 2  # other types have no packed form
    calls: dict[str, Call] = {"copy": lambda i: matrices[i].clone()}
    if packs:
        rest = first.dtype, first.device, library_layout(first.device)
        out = Packed24.empty(tuple(first.shape), *rest)
        transposed = Packed24.empty(tuple(first.shape[::-1]), *rest)
        calls["pack"] = lambda i: pack_both24_(out, transposed, matrices[i])
    if packs and first.is_cuda:
        pruned = [w * nm_mask(w) for w in matrices]
        calls["library"] = lambda i: torch.ops.aten._cslt_compress(pruned[i])
    return calls


def microseconds(times: Times) -> Metrics:
    """The times in microseconds, None for what was not timed, and the speedup of 2:4 over dense."""
    metrics = times.load | {f"{name}_us": None for name in ("pack", "library", "copy")}
    metrics |= {f"{name}_us": 1e3 * ms for name, ms in times.items()}
    return metrics | {"speedup": times["dense"] / times["sparse"]}


@dataclass(frozen=True, kw_only=True)
class Kernels(Layer):
    """Times of one product x [tokens, width] W^T with W [inner, width], dense and 2:4, and of the
    calls of `packing` on W, in microseconds."""

    what: ClassVar[str] = "kernels"

    def measure(self, _: Report) -> Result:
        generator = torch.Generator(self.on).manual_seed(self.seed)

        def normal(*size: int) -> list[Tensor]:
            size = (base.BUFFERS, *size)
            return list(torch.randn(size, device=self.on, generator=generator).to(self.dtype))

        xs, ws = normal(self.tokens, self.width), normal(self.ffn, self.width)
        linears = []
        for w in ws:
            model = nn.Sequential(nn.Linear(self.width, self.ffn, bias=False, device="meta"))
            model[0].weight = nn.Parameter(w.clone())
            layout = to_packed(model, lambda _: True, (self.tokens,), self.on)
            linears.append(model[0])

        @torch.no_grad()
        def product(i: int) -> Tensor:
            layer = linears[i]
            if isinstance(layer, PackedProduct):  # its forward would pad the tokens to multiples
                return matmul24(layer.packed, xs[i])
            return layer(xs[i])

        calls: dict[str, Call] = {"dense": lambda i: F.linear(xs[i], ws[i]), "sparse": product}
        return microseconds(self.in_turns(calls | packing(ws))), layout


@dataclass(frozen=True, kw_only=True)
class PackedMLP(MethodLayer):
    """Microseconds of forward and backward of an MLP width -> inner -> width, dense and with 2:4
    weights chosen and packed in every step, and of the calls of `packing` on its input."""

    what: ClassVar[str] = "mlp"

    def measure(self, _: Report) -> Result:
        both = ("dense", self.method)
        dense, sparse = (base.bench(self, n, lambda: MLP(self.block), ("*",)) for n in both)
        inputs = [x.detach().flatten(0, 1) for x in dense.inputs]
        calls: dict[str, Call] = {"dense": dense.forward_backward, "sparse": sparse.whole}
        return microseconds(self.in_turns(calls | packing(inputs))), sparse.converted.used


@dataclass(frozen=True, kw_only=True)
class Decode(Layer):
    """Generated tokens per second of one sequence, dense and with all linears of the layers packed,
    for `new` tokens after a prompt of `length` by `layers` layers of LLaMA. Computed from the time
    to read the prompt and the time of one further token."""

    what: ClassVar[str] = "decode"
    layers: int = 1
    new: int = 0

    def measure(self, _: Report) -> Result:
        dense = llama(self)
        sparse = copy.deepcopy(dense)
        linears, tokens = (lambda name: ".layers." in name), (1, self.length)
        layout = to_packed(sparse, linears, tokens, self.on, few=MOST)
        built, calls = {"dense": dense, "sparse": sparse}, dict[str, Call]()
        for name, model in built.items():
            run = Decoding(model, self.length, self.length + self.new // 2)
            calls |= {f"{name} prompt": run.prefill, f"{name} step": run.step}
        times = self.in_turns(calls, 1)
        metrics, rates = times.load, {}
        for name in built:
            prompt, step = times[f"{name} prompt"], times[f"{name} step"]
            rates[name] = 1e3 * self.new / (prompt + self.new * step)
            metrics |= {f"{name}_prompt_ms": prompt, f"{name}_step_ms": step}
            metrics[f"{name}_rate"] = rates[name]
        metrics["speedup"] = rates["sparse"] / rates["dense"]
        return metrics, f"{layout}, {times.launched}"


class Decoding:
    """A LLaMA with a cache of `length` tokens for one sequence, and the two calls of a generation:
    `prefill`, which reads the prompt, and `step`, which adds a token at the end of the cache. Only
    attention makes a step slower the longer the text is. All steps are therefore represented by one
    whose cache has the average length of the text."""

    def __init__(self, model: Any, prompt: int, length: int) -> None:
        self.decoder = Decoder(model.eval(), 1, length)
        self.ids = torch.randint(model.config.vocab_size, (1, length), device=model.device)
        self.prompt, self.length = prompt, length

    def prefill(self, _: int = 0) -> Tensor:
        """Read the prompt and return the most likely next token."""
        return self.decoder.read(self.ids[:, : self.prompt])[0].argmax()

    def step(self, _: int = 0) -> Tensor:
        """Read one more token and return the most likely next one."""
        self.decoder.place(self.length - 1)
        return self.decoder.logits(self.ids[:, -1:])[0].argmax()


def llama(config: Decode) -> Any:
    """A LLaMA of the config's shape with random weights."""
    vocab_size = 32_000 if config.on.type == "cuda" else 320
    shape = base.llama_config(config, config.layers, vocab_size)
    from transformers import AutoModelForCausalLM

    torch.manual_seed(config.seed)
    with config.on:
        return AutoModelForCausalLM.from_config(shape, dtype=config.dtype)
