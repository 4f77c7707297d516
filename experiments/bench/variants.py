"""The methods that the training benchmarks compare, and models converted by them."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

import methods
from experiments.bench import dense_fp8
from experiments.bench.report import Report
from experiments.bench.timing import Call
from experiments.support.memory import buffer_bytes
from methods.nn.gemms import Products

PRODUCTS = ("fprop", "dgrad", "wgrad")
SIMULATED = "s_ste, fp8=paper simulated"
REPACKED = "slope, packed in backward"
DELAYED = "fst, fp8 delayed"
TORCHAO = "dense fp8, torchao"
ON_UNITS = "hopper"  # the value of the option `fp8` whose formats FP8 units can multiply
# The formats of X and W in fprop, of dY, of W in dgrad, and of X in wgrad.
FORMATS = {
    "paper": ("e4m3", "e5m2", "e5m2", "e5m2"),
    "hybrid": ("e4m3", "e5m2", "e4m3", "e4m3"),
    "hopper": ("e4m3", "e5m2", "e4m3", "e5m2"),
}


@dataclass(frozen=True)
class Setup:
    """A method with the options of one row. fp8: the recipe of its FP8 products, a key of FORMATS,
    or "". simulated: its products run dense. repack: as for `methods.Method.accelerate`."""

    method: str
    options: dict[str, Any] = field(default_factory=dict)
    fp8: str = ""
    simulated: bool = False
    repack: bool = False


# No time depends on where the zeros are, and drawing a random mask takes longer than measuring.
SLOPE = {"mask": "magnitude"}
BF16 = {
    "dense": Setup("dense"),
    "ste": Setup("ste"),
    "semi_sparse": Setup("semi_sparse"),
    "fst, no mvue": Setup("fst", {"mvue": "off", "dense_fraction": 0.0, "alpha": 1e-4}),
    "fst": Setup("fst", {"dense_fraction": 0.0, "alpha": 1e-4}),
    "s_ste": Setup("s_ste"),
    "slope": Setup("slope", SLOPE),
    REPACKED: Setup("slope", SLOPE, repack=True),
}


ON_FP8_UNITS = {
    f"{name}, fp8": Setup(own.method, {**own.options, "fp8": ON_UNITS}, fp8=ON_UNITS)
    for name, own in BF16.items()
    if name == own.method != "dense"
}
RELU2, RELU2_FP8 = "relu2", "relu2, dense fp8"  # dense, with the activation in one kernel
NETWORKS = {  # of two linears with a squared ReLU between them, in the place of one linear
    RELU2: Setup("act24", {"dense_fraction": 1.0}),
    RELU2_FP8: Setup("dense", fp8="hybrid"),
    "act24": Setup("act24"),
    "act24, tokens sampled": Setup("act24", {"dense_features": 0.05}),
    "act24, all sampled": Setup("act24", {"dense_features": 0.0}),
    "act24, fp8": Setup("act24", {"fp8": ON_UNITS}, fp8=ON_UNITS),
    "act24, fp8 delayed": Setup("act24", {"fp8": "hopper_delayed"}, fp8=ON_UNITS),
}
VARIANTS = {
    **BF16,
    "ste, dense columns": Setup("ste", {"dense_columns": 0.25}),
    "dense fp8": Setup("dense", fp8="hybrid"),
    TORCHAO: Setup("dense", fp8="hybrid"),
    **ON_FP8_UNITS,
    DELAYED: Setup("fst", {**BF16["fst"].options, "fp8": "hopper_delayed"}, fp8=ON_UNITS),
    SIMULATED: Setup("s_ste", {"fp8": "paper"}, fp8="paper", simulated=True),
    **NETWORKS,
}


def variant(name: str) -> Setup:
    """The setup of this name; a method without one has its default options in a long training."""
    return VARIANTS.get(name) or Setup(name, {"total_steps": 10_000})


def chosen(report: Report, names: Iterable[str]) -> list[str]:
    """The requested `names` that can be measured here; the report says why others cannot."""
    found = report.chosen(names)
    if TORCHAO in found:
        try:
            import torchao.float8  # noqa: F401
        except ImportError as error:
            found.remove(TORCHAO)
            report.leave_out(f"{TORCHAO}: {error}; pip install torchao")
    return found


@dataclass
class Converted:
    """A converted model. used: what runs its products. sparse: which of them, by linear."""

    model: nn.Module
    method: methods.Method
    used: str
    sparse: dict[str, Products]

    def before(self, step: int) -> None:
        """Call the hooks before a micro-batch."""
        self.method.on_step_begin(step)
        self.method.open_micro_batch()

    def after(self, step: int) -> None:
        """Call the hooks around the optimizer's step; there is no optimizer here."""
        self.method.on_gradients(step)
        self.method.on_step_end(step)

    @property
    def layers(self) -> dict[str, nn.Linear]:
        """The converted layers by name."""
        return self.method.layers

    @property
    def searching(self) -> int:
        """The number of a step after which all masks are chosen anew."""
        return self.method.capabilities.mask_period - 1


def convert(
    name: str,
    model: nn.Module,
    include: str | tuple[str, ...],
    dtype: torch.dtype,
    tokens: int,
    matmul: str,
    **options: Any,
) -> Converted:
    """Convert the matching linears of `model`, in place. tokens: in a micro-batch. matmul: as for
    `methods.Method.accelerate`. options: further ones of the method."""
    own = variant(name)
    # All convert the same linears. Flip rates are not measured: that waits for the GPU.
    fixed = {"include": include, "exclude": (), "measure_every": 0}
    method = methods.build(own.method, **{**fixed, **own.options, **options})
    method.convert(model, dtype)
    if name in ("dense fp8", RELU2_FP8):
        dense_fp8.convert(method.layers.values())
        return Converted(model, method, "scaled_mm", {})
    if name == TORCHAO:
        from torchao.float8 import convert_to_float8_training  # with its recipe for training

        convert_to_float8_training(model, module_filter_fn=lambda _, name: name in method.layers)
        return Converted(model, method, "torchao", {})
    if own.method == "dense" or name == RELU2:
        return Converted(model, method, "dense", {})
    dense = matmul == "dense" or own.simulated
    sparse = {} if dense else method.accelerate(tokens, matmul, own.repack)
    used = {used_by(products) for products in sparse.values()} or {"dense"}
    if own.fp8 and not any(products.fp8 for products in sparse.values()):
        used = {"simulated"}
    return Converted(model, method, "; ".join(sorted(used)), sparse)


def used_by(products: Products) -> str:
    """A description of what runs the products, for example `cusparselt fprop dgrad`."""
    by: dict[str, list[str]] = {"cusparselt": [], "cuda": [], "fp8": []}
    for name in PRODUCTS:
        by[products.kernels(name) or "fp8"].append(name)
    if not products.fp8:
        del by["fp8"]
    return ", ".join(" ".join([kernels, *of]) for kernels, of in by.items() if of) or "dense"


def bytes_held(
    converted: Converted, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, int]:
    """The bytes held between steps: parameters (their gradients take the same), optimizer state,
    and the converted layers' masks, packed and dense operands."""
    held = {"weights": sum(p.nbytes for p in converted.model.parameters())}
    if optimizer is not None:
        state = [t for s in optimizer.state.values() for t in s.values()]
        held["optimizer"] = sum(t.nbytes for t in state if isinstance(t, Tensor))
    for kind in ("masks", "packed", "operands"):
        held[kind] = sum(buffer_bytes(layer, kind) for layer in converted.layers.values())
    return held


def dtype_of(device: torch.device) -> torch.dtype:
    """The dtype in which products are measured."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


class Bench:
    """The calls to time on a converted model, which take its inputs and gradients in rotation."""

    def __init__(self, converted: Converted, inputs: list[Tensor], gradients: list[Tensor]) -> None:
        self.converted, self.gradients = converted, gradients
        self.inputs = [x.detach().requires_grad_() for x in inputs]
        self.parameters = list(converted.model.parameters())

    @cached_property
    def zeros(self) -> list[Tensor]:
        """A gradient of zeros for each parameter."""
        return [torch.zeros_like(p) for p in self.parameters]

    def clear(self) -> None:
        """Drop all gradients."""
        for tensor in (*self.inputs, *self.parameters):
            tensor.grad = None

    def found(self) -> list[Tensor | None]:
        """The gradients of inputs and parameters."""
        return [tensor.grad for tensor in (*self.inputs, *self.parameters)]

    def forward_backward(self, i: int) -> Tensor:
        """Run both passes and return the output; parameters and input keep their gradients."""
        self.inputs[i].grad = None
        for parameter in self.parameters:
            parameter.grad = None
        y = self.converted.model(self.inputs[i])
        y.backward(self.gradients[i])
        return y.detach()

    def whole(self, i: int, step: int = 0) -> None:
        """Run a step of one micro-batch without the optimizer, if possible choosing no masks."""
        self.converted.before(step)
        self.forward_backward(i)
        self.converted.after(step)

    def hooks(self, step: int) -> None:
        """Run all hooks of a step, with zero gradients."""
        for parameter, zero in zip(self.parameters, self.zeros, strict=True):
            parameter.grad = zero
        self.converted.before(step)
        self.converted.after(step)

    def calls(self) -> dict[str, Call]:
        """The calls to time by name: the whole step and its parts, and hooks that choose masks."""
        calls: dict[str, Call] = {
            "whole": self.whole,
            "products": self.forward_backward,
            "hooks": lambda _: self.hooks(0),
        }
        if self.converted.searching:
            calls["hooks, masks chosen"] = lambda _: self.hooks(self.converted.searching)
        return calls


def compiling() -> Any:
    """A context in which dynamo raises an error instead of silently running uncompiled code."""
    import torch._dynamo

    return torch._dynamo.config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True)
