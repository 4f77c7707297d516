"""Measures what 2:4 weights give where nothing is trained: decoding, SAM's encoder, single kernels.

Packed weights have agreed with the masked dense ones on the shapes that are timed. Every function
of `MEASURES` is one as in speed.py.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common_kernels import matmul24, nm_mask
from common_kernels.matmul import is_faster
from common_kernels.pack import Packed24
from common_kernels.pack.operands import pack_both24_
from experiments.bench import arms
from experiments.bench.timing import Call, Time, in_turns
from experiments.support.errors import UserError
from models import packed
from models.gpt2 import MLP, GPTConfig
from models.packed import PackedProduct
from reproduce import sam, speed
from reproduce.speed import BUFFERS, Metrics, Told, clock_and_power

if TYPE_CHECKING:
    from reproduce.bench import Config

CLOCKS = {"graph": "in a CUDA graph", "events": "launched from Python", "host": "not in a graph"}


# --- models with packed weights ------------------------------------------------------------------


@torch.no_grad()
def to_packed(
    model: nn.Module, chosen: Callable[[str], bool], tokens: Iterable[int], device: torch.device
) -> str:
    """Make the linears of `model` whose names are chosen 2:4 by magnitude and pack them for any
    number of tokens, in place; returns what multiplies. Without sparse products here they stay
    dense.

    tokens: numbers of tokens that will be multiplied; the fastest products for them are looked for.

    Raises:
        UserError: a packed product is not that of the masked weight.
    """
    for name, module in model.named_modules():
        if type(module) is nn.Linear and chosen(name):
            module.weight.mul_(nm_mask(module.weight))
    try:
        packed.layout_for(device, next(model.parameters()).dtype)
    except ValueError:
        return "dense"
    packed.pack(model, crossover=0)
    seen: dict[tuple[int, ...], PackedProduct] = {}
    for layer in packed_layers(model):
        seen.setdefault(layer.packed.shape, layer)
    for layer in seen.values():
        for count in tokens:
            check(layer, count, device)
    return ", ".join(sorted({layer.packed.layout for layer in seen.values()}))


def packed_layers(model: nn.Module) -> list[PackedProduct]:
    """The linears of a model that run packed."""
    return [module for module in model.modules() if isinstance(module, PackedProduct)]


def check(layer: PackedProduct, tokens: int, device: torch.device) -> None:
    """Find the fastest sparse product of so many tokens, and raise a `UserError` if it is wrong."""
    (rows, columns), dtype, bias = layer.packed.shape, layer.packed.dtype, layer.bias
    if (problem := layer.problem(tokens)) is not None:
        is_faster(problem, device)
    x = torch.randn(tokens, columns, dtype=dtype, device=device)
    want = F.linear(x.float(), layer.weight.float(), None if bias is None else bias.float())
    error = arms.relative_error(layer(x), want)
    allowed = arms.tolerance(arms.arm("dense"), dtype, columns)
    if not error <= allowed:
        raise UserError(
            f"the packed product {tokens} x {columns} -> {rows} is off by {error:.2g} (allowed "
            f"{allowed:.2g}): no time is reported; run `pytest tests/common_kernels`"
        )


def used(what: str, times: dict[str, Time]) -> str:
    """A description of what multiplied, and how it was launched."""
    return f"{what}, {' and '.join(sorted({CLOCKS[time.clock] for time in times.values()}))}"


# --- decoding ------------------------------------------------------------------------------------


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Decoding:
    """A LLaMA with a cache of `length` tokens for one sequence, and the calls of a generation:
    `prefill` of the prompt, and `step`, one token more at the last place of the cache.

    A step costs the same at every place but for attention: with a cache as long as the text is on
    average, all of it is attended to.
    """

    def __init__(self, model: Any, prompt: int, length: int) -> None:
        first = next(model.parameters())
        shape = model.config
        heads, kept = shape.num_attention_heads, shape.num_key_value_heads
        size = (2, shape.num_hidden_layers, 1, kept, length, shape.hidden_size // heads)
        with first.device:
            self.model = model.eval()
            self.cache = cache_type()(torch.zeros(size, dtype=first.dtype))
            self.ids = torch.randint(shape.vocab_size, (1, length))
            self.places = torch.arange(length)
        self.prompt, self.length = prompt, length

    @torch.no_grad()
    def logits(self, start: int, end: int) -> Tensor:
        """Logits [V] after token number end - 1, from the tokens start to end, which go into
        the cache."""
        at = self.places[start:end]
        self.cache.at = at
        visible = self.places[None, None, None, :] <= at[None, None, :, None]
        output = self.model(
            input_ids=self.ids[:, start:end],
            attention_mask=visible,
            position_ids=at[None],
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[0, -1]

    def prefill(self, _: int = 0) -> Tensor:
        """Read the prompt; returns its most likely next token."""
        return self.logits(0, self.prompt).argmax()

    def step(self, _: int = 0) -> Tensor:
        """Read one token more; returns the most likely next one."""
        return self.logits(self.length - 1, self.length).argmax()


def cache_type() -> Any:
    """A class of caches of fixed size, which CUDA graphs can hold, for models of transformers."""
    from transformers import Cache

    class FixedCache(Cache):
        """Keys and values [2, layers, 1, heads, length, dim]; `at` are the places written to."""

        def __init__(self, states: Tensor) -> None:
            self.states, self.at, self.layers = states, torch.empty(0), []

        def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any) -> Any:
            for own, new in zip(self.states[:, layer_idx], (keys, values), strict=True):
                own.index_copy_(2, self.at, new)
            return self.states[0, layer_idx], self.states[1, layer_idx]

    return FixedCache


def llama(config: Config) -> Any:
    """A LLaMA of the config's shape with random weights."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise UserError(
            "a LLaMA needs transformers: pip install -e '.[hf]' in the checkout"
        ) from error
    shape = LlamaConfig(
        hidden_size=config.width,
        intermediate_size=config.ffn,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads or config.heads,
        num_hidden_layers=config.layers,
        vocab_size=32_000 if config.on.type == "cuda" else 320,
    )
    torch.manual_seed(config.seed)
    with config.on, default_dtype(config.dtype):
        return LlamaForCausalLM(shape)


def of_decode(config: Config, _: Told) -> tuple[Metrics, str]:
    """Tokens a second of one sequence, dense and with all linears of the layers packed: `new`
    tokens after a prompt of `length`, from the time of the prompt and that of one more token."""
    length = config.length + config.new // 2
    dense = llama(config)
    sparse = copy.deepcopy(dense)
    what = to_packed(sparse, lambda name: ".layers." in name, (1, config.length), config.on)
    built = {"dense": dense, "sparse": sparse}
    runs = {name: Decoding(model, config.length, length) for name, model in built.items()}
    for run in runs.values():
        run.ids = runs["dense"].ids
    calls: dict[str, Call] = {}
    for name, run in runs.items():
        calls |= {f"{name} prompt": run.prefill, f"{name} step": run.step}
    times = in_turns(calls, config.on, config.repeats)
    metrics = clock_and_power(times)
    for name in built:
        prompt, step = (times[f"{name} {part}"].ms for part in ("prompt", "step"))
        metrics |= {f"{name}_prompt_ms": prompt, f"{name}_step_ms": step}
        metrics[f"{name}_rate"] = 1e3 * config.new / (prompt + config.new * step)
    metrics["speedup"] = rate(metrics, "sparse") / rate(metrics, "dense")
    return metrics, used(what, times)


def rate(metrics: Metrics, name: str) -> float:
    found = metrics[f"{name}_rate"]
    assert found is not None
    return found


# --- the image encoder of SAM --------------------------------------------------------------------


def of_sam_inference(config: Config, _: Told) -> tuple[Metrics, str]:
    """Images a second of SAM's encoder with the linears of `packed` 2:4, its speed over dense, and
    MiB at the peak of a pass."""
    changed: dict[str, Any] = {"img_size": config.image}
    if config.width:
        changed |= {"embed_dim": config.width, "num_heads": config.heads}
    torch.manual_seed(config.seed)
    with config.on:
        images = torch.randn(config.batch, 3, config.image, config.image, dtype=config.dtype)
        dense: Any = sam.encoder(config.model, **changed).to(config.dtype).eval()
    tokens = config.batch * (config.image // 16) ** 2
    built, what = {"dense": dense}, "dense"
    if config.packed:
        built["sparse"] = copy.deepcopy(dense)
        chosen = re.compile(rf"\.({'|'.join(config.packed)})\.").search
        what = to_packed(built["sparse"], lambda name: bool(chosen(name)), (tokens,), config.on)

    @torch.no_grad()
    def run(model: Any, _: int) -> Any:
        return model(images)

    calls: dict[str, Call] = {name: partial(run, model) for name, model in built.items()}
    times = in_turns(calls, config.on, config.repeats)
    own = "sparse" if config.packed else "dense"
    metrics = clock_and_power(times) | {
        "rate": 1e3 * config.batch / times[own].ms,
        "speedup": times["dense"].ms / times[own].ms,
        "mib": peak(lambda: run(built[own], 0), built[own]) if config.on.type == "cuda" else None,
    }
    return metrics, used(what, times)


def peak(call: Callable[[], Any], model: nn.Module) -> float:
    """MiB that torch has allocated at most during a call on a GPU, with the weights of the model as
    they are stored (packed ones alone) and none of others."""
    own = sum(p.nbytes for p in model.parameters())
    own += sum(m.packed.buffer.nbytes - m.weight.nbytes for m in packed_layers(model))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    return (torch.cuda.max_memory_allocated() - before + own) / 2**20


# --- kernels -------------------------------------------------------------------------------------


def of_kernels(config: Config, _: Told) -> tuple[Metrics, str]:
    """Microseconds of one product x [tokens, width] W^T, dense and 2:4, of pruning and packing W
    [inner, width] both ways, of cuSPARSELt's own packing, and of a copy of W."""
    generator = torch.Generator(config.on).manual_seed(config.seed)

    def normal(*size: int) -> list[Tensor]:
        size = (BUFFERS, *size)
        return list(torch.randn(size, device=config.on, generator=generator).to(config.dtype))

    xs, ws = normal(config.tokens, config.width), normal(config.ffn, config.width)
    linears = []
    for w in ws:
        model = nn.Sequential(nn.Linear(config.width, config.ffn, bias=False, device="meta"))
        model[0].weight = nn.Parameter(w.clone())
        what = to_packed(model, lambda _: True, (config.tokens,), config.on)
        linears.append(model[0])

    @torch.no_grad()
    def product(i: int) -> Tensor:
        layer = linears[i]
        if isinstance(layer, PackedProduct):  # which would fill the tokens up to multiples of STEP
            return matmul24(layer.packed, xs[i])
        return layer(xs[i])

    calls: dict[str, Call] = {"dense": lambda i: F.linear(xs[i], ws[i]), "sparse": product}
    calls |= packing(ws)
    times = in_turns(calls, config.on, config.repeats, BUFFERS)
    return microseconds(times) | clock_and_power(times), what


def packing(matrices: list[Tensor]) -> dict[str, Call]:
    """The calls that choose a transposable mask of a matrix and pack it both ways (`pack`), that
    pack a 2:4 matrix by cuSPARSELt's library (`library`, on a GPU), and that copy it (`copy`)."""
    first = matrices[0]
    packs = first.dtype.itemsize == 2
    calls: dict[str, Call] = {"copy": lambda i: matrices[i].clone()}
    if packs:
        out = Packed24.empty(tuple(first.shape), first.dtype, first.device)
        turned = Packed24.empty(tuple(first.shape[::-1]), first.dtype, first.device)
        calls["pack"] = lambda i: pack_both24_(out, turned, matrices[i])
    if packs and first.is_cuda:
        pruned = [w * nm_mask(w) for w in matrices]
        calls["library"] = lambda i: torch.ops.aten._cslt_compress(pruned[i])
    return calls


def microseconds(times: dict[str, Time]) -> Metrics:
    """The times, None where there is none, and how many times as fast as dense 2:4 is."""
    metrics: Metrics = {f"{name}_us": None for name in ("pack", "library", "copy")}
    metrics |= {f"{name}_us": 1e3 * time.ms for name, time in times.items()}
    return metrics | {"speedup": times["dense"].ms / times["sparse"].ms}


def of_mlp(config: Config, _: Told) -> tuple[Metrics, str]:
    """Microseconds of forward and backward of an MLP, dense and with 2:4 weights that are chosen
    and packed in every step; of pruning and packing its input both ways, and of a copy of that."""
    shape = GPTConfig(1, 1, config.width, vocab_size=1, n_inner=config.inner)
    for widths in ((config.width, config.ffn), (config.ffn, config.width)):
        speed.gate(config, widths)
    built = {
        label: speed.bench(config, name, lambda: MLP(shape), ("*",))
        for label, name in {"dense": "dense", "sparse": config.method}.items()
    }
    inputs = [x.detach().flatten(0, 1) for x in built["dense"].inputs]
    calls: dict[str, Call] = {
        "dense": built["dense"].forward_backward,
        "sparse": built["sparse"].whole,
        **packing(inputs),
    }
    times = in_turns(calls, config.on, config.repeats, BUFFERS)
    return microseconds(times) | clock_and_power(times), built["sparse"].converted.used


MEASURES = {
    "decode": of_decode,
    "sam_inference": of_sam_inference,
    "kernels": of_kernels,
    "mlp": of_mlp,
}
