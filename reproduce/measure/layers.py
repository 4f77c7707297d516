"""Training of layers and whole models under a method."""

from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common_kernels.matmul import mm24
from common_kernels.pack import Packed24
from common_kernels.pack.operands import sample_pack24
from experiments.bench import jobs, linear
from experiments.bench.step import Step
from experiments.bench.timing import Call
from experiments.bench.variants import Bench, bytes_held
from methods.nn.gemms import groups_of, sample_tokens
from methods.nn.linear import MaskedLinear
from models.gpt2 import MLP, Block
from reproduce.measure import base
from reproduce.measure.base import Base, Layer, MethodLayer, Metrics, Report, Result

MICRO_STEPS = 64  # forward and backward passes in one iteration of the logs of FST's authors


def linears(config: MethodLayer) -> tuple[Bench, Bench]:
    """A linear width -> inner, dense and under the config's method, after its products agreed."""
    of = ((config.tokens, config.width, config.ffn), config.dtype, config.on, config.matmul)
    base.gate(config.method, *of)
    return linear.build("dense", *of, base.BUFFERS), linear.build(config.method, *of, base.BUFFERS)


@dataclass(frozen=True, kw_only=True)
class Linear(MethodLayer):
    """Speed of one linear, forward and backward. `prune_ms`: to choose masks and pack alone."""

    what: ClassVar[str] = "linear"

    def measure(self, _: Report) -> Result:
        dense, sparse = linears(self)
        calls: dict[str, Call] = {"dense": dense.forward_backward, "sparse": sparse.whole}
        calls["prune"] = lambda _: sparse.hooks(sparse.converted.searching)
        times = self.in_turns(calls)
        metrics: Metrics = {f"{name}_ms": ms for name, ms in times.items()}
        metrics["speedup"] = times["dense"] / times["sparse"]
        return metrics | times.load, f"{sparse.converted.used}, {times.launched}"


@dataclass(frozen=True, kw_only=True)
class GPT2Block(MethodLayer):
    """Speed of a feed-forward network (`ffn`) and of a whole GPT-2 block (`block`), in training and
    at inference. `<part>_speedup` is that of forward and backward alone, as in FST's logs, where
    masks are chosen and weights packed in the first iteration only. `<part>_step_speedup` includes
    the hooks of a step with one micro-batch, and the step's share of the mask search."""

    what: ClassVar[str] = "gpt2"

    def measure(self, _: Report) -> Result:
        built = {
            "ffn": lambda: nn.Sequential(OrderedDict(mlp=MLP(self.block))),  # as the globs name it
            "block": lambda: Block(self.block),
        }
        sparse: dict[str, Bench] = {}
        calls: dict[str, Call] = {}
        for part, build in built.items():
            names = ("dense", self.method)
            dense, sparse[part] = (base.bench(self, n, build, ("*mlp.*",)) for n in names)
            trained = {} if self.ends_dense else {"sparse": sparse[part]}
            named = base.to_compare(dense, sparse[part], trained).items()
            calls |= {f"{part} {name}": call for name, call in named}
        found = self.in_turns(calls)
        metrics = found.load
        for part in sparse:
            times = {n.removeprefix(f"{part} "): t for n, t in found.items() if n.startswith(part)}
            metrics |= {
                f"{part}_dense_ms": MICRO_STEPS * times["dense"],
                f"{part}_sparse_ms": MICRO_STEPS * times["products"],
                f"{part}_speedup": times["dense"] / times["products"],
                f"{part}_step_speedup": times["dense"] / base.step_ms(times, sparse[part]),
                f"{part}_inference_speedup": base.inference_speedup(times, "sparse"),
            }
        return metrics, f"{sparse[part].converted.used}, {found.launched}"


@dataclass(frozen=True, kw_only=True)
class Decoder(MethodLayer):
    """Speed and memory of a decoder layer over dense, in training and at inference.

    Memory is what stays allocated, without activations: in training weights, gradients, AdamW's
    moments in fp32, masks, packed and dense operands; at inference the weights as stored.
    """

    what: ClassVar[str] = "decoder"
    kv_heads: int | None = None  # of a LLaMA layer; null = a GPT-2 block, which has OPT's shapes
    ranks: tuple[float, ...] = ()  # of adapters at inference, in percent of the width

    def measure(self, _: Report) -> Result:
        include = ("*",) if self.method == "slope" else ("*mlp.*",)

        def build() -> nn.Module:
            return base.LlamaLayer(self) if self.kv_heads else Block(self.block)

        dense, sparse = (base.bench(self, name, build, include) for name in ("dense", self.method))
        ranks = base.ranks_of(self.width, self.ranks)
        trained = {} if self.ends_dense else {"": sparse}
        for end, rank in ranks.items() if trained else ():
            trained[end] = base.bench(self, self.method, build, include, **base.adapting(rank))
        times = self.in_turns(base.to_compare(dense, sparse, trained))
        metrics: Metrics = {
            "train_speedup": times["dense"] / base.step_ms(times, sparse),
            "train_memory": training_bytes(sparse) / training_bytes(dense),
            **times.load,
        }
        for end in ("", *ranks):
            metrics[f"inference_speedup{end}"] = base.inference_speedup(times, end)
            memory = stored_bytes(trained[end]) / stored_bytes(dense) if trained else 1.0
            metrics[f"inference_memory{end}"] = memory
        return metrics, f"{sparse.converted.used}, {times.launched}"


def training_bytes(built: Bench) -> int:
    """Bytes that stay in training: two fp32 moments, weights, gradients, and layers' own."""
    trained = [p for p in built.converted.model.parameters() if p.requires_grad]
    gradients = sum(p.nbytes for p in trained)
    moments = 2 * 4 * sum(p.numel() for p in trained)
    return sum(bytes_held(built.converted).values()) + gradients + moments


def stored_bytes(built: Bench) -> int:
    """Bytes of the model after training: its parameters, and the row masks of SLoPe's layers."""
    model = built.converted.model
    masks = [b for name, b in model.named_buffers() if name.endswith("row_mask")]
    return sum(t.nbytes for t in [*model.parameters(), *masks])


@dataclass(frozen=True, kw_only=True)
class SlowDown(Layer):
    """Time of a training step of one GPT-2 block under Bi-Mask over that of a dense one, including
    the choice of masks and the step's share of the search for permutations."""

    what: ClassVar[str] = "slow_down"
    products: ClassVar[tuple[str, ...]] = ()

    def measure(self, _: Report) -> Result:
        both = ("dense", "bi_mask")
        dense, sparse = (base.bench(self, n, lambda: Block(self.block), ("*",)) for n in both)
        converted, period = sparse.converted, sparse.converted.method.config.permute_every
        steps: dict[str, Call] = {"step": partial(sparse.whole, step=1)}
        steps["step with a search"] = partial(sparse.whole, step=0)
        times = self.in_turns({"dense": dense.forward_backward, **steps})
        search = max(0.0, times["step with a search"] - times["step"])
        slow_down = (times["step"] + search / period) / times["dense"]
        metrics = {"dense_ms": times["dense"], "step_ms": times["step"], "search_ms": search}
        return metrics | times.load | {"slow_down": slow_down}, converted.used


@dataclass(frozen=True, kw_only=True)
class Parts(MethodLayer):
    """Times of the parts of a training step of one linear width -> inner under a method with masks.
    The parts are the three products, dense and as the method runs them, the sample of dY, and the
    decay, the packing and the mask search, which are done once in a step of `accumulate`
    micro-batches or once in a mask period. `step` and `dense_step` are the sums over a step."""

    what: ClassVar[str] = "parts"
    accumulate: int = 1

    def measure(self, _: Report) -> Result:
        dense, sparse = linears(self)
        method = sparse.converted.method
        (layer,) = method.sparse_layers.values()
        assert isinstance(layer, MaskedLinear)
        fprop, dgrad = layer.operands(self.dtype)
        weight = next(iter(dense.converted.layers.values())).weight.detach()
        xs, dys = [x.detach() for x in sparse.inputs], sparse.gradients
        sparse.hooks(0)  # with a gradient to add the decay to
        sparse.converted.before(0)  # a step in which the decay can be repeated

        def sample(i: int) -> Packed24 | Tensor:
            if layer.products.wgrad:
                layout = layer.products.layouts.wgrad
                return sample_pack24(dys[i], layer.key, groups_of(dys[i]), layout=layout)
            return sample_tokens(dys[i], layer.key, layer.mvue) if layer.mvue else dys[i]

        once_sampled = sample(0)

        def wgrad(i: int) -> Tensor:
            if isinstance(once_sampled, Packed24):
                return mm24(once_sampled, xs[i])
            return once_sampled.t() @ xs[i]

        calls: dict[str, Call] = {
            "dense_fprop": lambda i: F.linear(xs[i], weight),
            "dense_dgrad": lambda i: dys[i] @ weight,
            "dense_wgrad": lambda i: dys[i].t() @ xs[i],
            "fprop": lambda i: fprop.linear(xs[i], None),
            "dgrad": lambda i: dgrad.grad(dys[i]),
            "wgrad": wgrad,
            "sample": sample,
            "decay": lambda _: method.on_gradients(0),
            "pack": lambda _: layer.update_operands(),
            "search": lambda _: layer.refresh_mask(),
        }
        ms = self.in_turns(calls)
        products = sum(ms[name] for name in ("fprop", "dgrad", "wgrad", "sample"))
        once = ms["decay"] + ms["pack"] + ms["search"] / method.capabilities.mask_period
        step = self.accumulate * products + once
        dense_step = self.accumulate * sum(ms[f"dense_{n}"] for n in ("fprop", "dgrad", "wgrad"))
        metrics = ms.load | {f"{name}_ms": figure for name, figure in ms.items()}
        metrics |= {"step_ms": step, "dense_step_ms": dense_step, "speedup": dense_step / step}
        return metrics, sparse.converted.used


@dataclass(frozen=True, kw_only=True)
class Training(Base):
    """Speed of a whole optimizer step of `accumulate` micro-batches, dense and under the method,
    and the hours that a training of `steps` such steps takes.

    The time of a step is the sum of what is timed: a step of one micro-batch with all hooks and
    AdamW, the further micro-batches, and the step's share of the mask search. For `run_speedup` the
    last sixth of the steps is dense, as in FST's trainings.
    """

    what: ClassVar[str] = "train"
    method: str
    model: str  # a size of GPT-2, `transformer_SIZE` or `deit_base`
    batch: int = 1
    length: int = 1
    accumulate: int = 1  # micro-batches per step
    steps: int = 0  # of a whole training

    def measure(self, report: Report) -> Result:
        family, _, size = self.model.partition("_")
        if family == "deit":
            job = jobs.vit("deit_base_patch16_224", self.batch, 768, 196)
        elif family == "transformer":
            job = jobs.translation(size, self.batch, self.length)
        else:
            job = jobs.gpt2(self.model, self.batch, self.length)
        built: dict[str, Step] = {}
        for name in ("dense", self.method):
            for widths in job.linears if name != "dense" else ():
                base.gate(name, (job.tokens, *widths), self.dtype, self.on, self.matmul)
            built[name] = Step(name, job, self.on, self.matmul)
            for _ in range(2):  # warm up; its blocks are not compiled
                built[name].ordinary(0)
        calls: dict[str, Call] = {}
        for name, step in built.items():
            calls |= {name: step.ordinary, f"{name}, micro-batch": micro_batch(step)}
            if step.converted.searching:
                calls[f"{name}, masks chosen"] = step.searching
        times = self.in_turns(calls, 1, graphs=False)
        metrics, found = times.load, []
        for key, (name, step) in zip(("dense", "sparse"), built.items(), strict=True):
            ms, further = times[name], times[f"{name}, micro-batch"]
            search = times.get(f"{name}, masks chosen", ms) - ms
            share = max(0.0, search) / (step.converted.searching + 1)
            found.append(ms + share + (self.accumulate - 1) * further)
            metrics |= {f"{key}_ms": found[-1], f"{key}_micro_batch_ms": further}
            metrics[f"{key}_hours"] = self.steps * found[-1] / 3.6e6
        dense, sparse = found
        metrics |= {"speedup": dense / sparse, "run_speedup": dense / (sparse * 5 / 6 + dense / 6)}
        used = built[self.method].used
        for step in built.values():
            step.close()
        return metrics, used


def micro_batch(step: Step) -> Call:
    """A call that runs the forward and backward pass of one micro-batch and adds its gradients to
    existing ones, as every micro-batch of a step but the first does."""
    gradients = [torch.zeros_like(p) for p in step.parameters]

    def call(_: int) -> None:
        for parameter, gradient in zip(step.parameters, gradients, strict=True):
            parameter.grad = gradient
        step.converted.method.open_micro_batch()
        step.loss().backward()
        step.optimizer.zero_grad()

    return call
