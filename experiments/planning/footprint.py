"""The memory of a training step, counted on fake tensors.

Model, method and one micro-batch are built as in the trainer, but from PyTorch's fake tensors,
which have shapes, dtypes and storages but take no memory. The forward pass runs on them under
autocast. Every storage that autograd keeps for the backward pass is counted once.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import methods
from common_kernels.pack.operands import MULTIPLE
from experiments.config.settings import ImplConfig, TrainConfig
from experiments.support.memory import buffer_bytes
from experiments.training.blocks import trained_blocks
from experiments.training.optimization import DTYPES
from methods.nn.linear import SparseLinear

# The number of moments that an optimizer keeps for each weight.
MOMENTS = {"adamw": 2, "lamb": 2, "lion": 1}


@dataclass(frozen=True)
class Footprint:
    """Bytes of a model under a method and of one micro-batch, before they are divided among GPUs.
    `packed` and `operands` are what the buffers of converted layers hold."""

    parameters: int  # number of parameters of the plain model
    trained: int  # trained weights
    frozen: int  # weights of a teacher
    moments: int  # the optimizer's moments
    masks: int  # masks in the buffers of the converted layers
    bits: int  # the same masks at one bit per entry
    packed: int  # packed operands
    operands: int  # all other operands
    casts: int  # copies of weights in autocast's dtype, kept from forward to backward
    activations: int  # everything else that autograd keeps
    checkpointed: int  # kept instead with checkpointing: inputs of all blocks, and all of one
    loss: int  # temporary memory of the loss
    passing: int  # operands of the block that has most of them
    block: int  # number of weights of the largest block
    root: int  # number of weights outside of blocks
    width: int  # bytes per number under autocast


def footprint(
    build: Callable[[], nn.Module],
    method: methods.Method,
    loss: Callable[[nn.Module], Tensor],
    train: TrainConfig,
    impl: ImplConfig,
) -> Footprint:
    """The footprint of a training step. build, loss: make the plain model, and from it the loss of
    one micro-batch, of fake tensors. A compiled loss keeps the logits in autocast's dtype, not
    log-probabilities in fp32. Unless products are dense, they use packed forms of 2:4 operands."""
    dtype, repack = DTYPES[train.dtype], impl.repack_backward
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake, _Watch() as watch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of operators about fake tensors
        model = build()
        parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
        method.convert(model, dtype)
        if repack:
            method.check_repacks()
        layers = method.sparse_layers.values()
        for layer in layers if impl.matmul != "dense" else ():
            _hold_packed(layer, repack)
        own = {id(p): p for p in model.parameters()}
        teacher = getattr(method, "teacher", None)
        if teacher is not None:
            own |= {id(p): p for p in teacher.parameters()}
        model.train()
        watch.weights = {_storage(p) for p in own.values()}
        saved = _Saved(model, {*watch.weights, *map(_storage, model.buffers())})
        autocast = torch.autocast("cpu", dtype, enabled=dtype is not None)
        with autocast, saved.counting(), _Fused():
            loss(model)
    tensors = [[t for t in some if _storage(t) not in watch.casts] for some in saved.by_block]
    *of_blocks, outside = [sum(map(_bytes, some)) for some in tensors]
    logits = max(map(_bytes, tensors[-1]), default=0)
    if impl.compile and teacher is None and dtype is not None:
        held, wide = 0, [t for t in tensors[-1] if _bytes(t) == logits]
        outside -= sum(logits - logits // t.itemsize * dtype.itemsize for t in wide)
    else:  # the gradients of log-probabilities and logits; distillation has them for both models
        held = (2 if teacher is None else 4) * logits
    trained = sum(p.nbytes for p in own.values() if p.requires_grad)
    bools = sum(b.nbytes for layer in layers for b in layer.buffers() if b.dtype == torch.bool)
    numbers = [sum(p.numel() for p in block.parameters()) for block in saved.blocks]
    passing = (_held(block.modules(), "packed", "operands") for block in saved.blocks)
    return Footprint(
        parameters=parameters,
        trained=trained,
        frozen=sum(p.nbytes for p in own.values()) - trained,
        moments=MOMENTS[train.optimizer] * trained,
        **{kind: _held(layers, kind) for kind in ("masks", "packed", "operands")},
        bits=_held(layers, "masks") - bools + bools // 8,
        casts=sum(_bytes(t) for some in saved.by_block for t in some if _storage(t) in watch.casts),
        activations=sum(of_blocks) + outside,
        checkpointed=saved.inputs + max(of_blocks, default=0) + outside,
        loss=held,
        passing=max(passing, default=0),
        block=max(numbers, default=0),
        root=sum(p.numel() for p in model.parameters()) - sum(numbers),
        width=4 if dtype is None else dtype.itemsize,
    )


def _held(modules: Iterable[nn.Module], *kinds: str) -> int:
    layers = [module for module in modules if isinstance(module, SparseLinear)]
    return sum(buffer_bytes(layer, kind) for layer in layers for kind in kinds)


def _hold_packed(layer: SparseLinear, repack: bool) -> None:
    """Allocate the operands of the products that could run sparse on a GPU: in half precision and
    in suitable shapes. They are not written, since the tensors are fake."""
    fits = not (layer.in_features % MULTIPLE or layer.out_features % MULTIPLE)
    if layer.dtype.itemsize != 2 or not fits:
        return
    layer.pack = lambda: None  # type: ignore[method-assign]
    try:
        layer.accelerate(replace(layer.candidates(), repack=repack and layer.repacks))
    finally:
        del layer.pack


class _Fused(TorchFunctionMode):
    """Removes the dropout of attention, for which the CPU has no fused kernel. A GPU has one, and
    keeps nothing for it: its backward pass draws the dropout again."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


class _Watch(TorchDispatchMode):
    """Returns 0 when code reads a number from a tensor (such as a count of errors), and records in
    `casts` the storages of copies of `weights` in another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: set[int] = set()
        self.casts: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 0
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and _storage(args[0]) in self.weights:
            self.casts[_storage(result)] = result
        return result


class _Saved:
    """The tensors that autograd keeps from a forward pass, without those of known storages: in
    `by_block` those of each block, and last those outside of blocks."""

    def __init__(self, model: nn.Module, known: set[int]) -> None:
        self.blocks, self.seen, self.inputs = trained_blocks(model), known, 0
        self.by_block: list[list[Tensor]] = [[] for _ in (*self.blocks, None)]
        self.here = -1

    @contextmanager
    def counting(self) -> Iterator[None]:
        def enter(block: nn.Module, args: Any, options: Any) -> None:
            self.here = self.blocks.index(block)
            given = [x for x in (*args, *options.values()) if isinstance(x, Tensor)]
            self.inputs += given[0].nbytes if given and given[0].requires_grad else 0

        def leave(*_: Any) -> None:
            self.here = -1

        def take(tensor: Tensor) -> Tensor:
            if _storage(tensor) not in self.seen:
                self.seen.add(_storage(tensor))
                self.by_block[self.here].append(tensor)
            return tensor

        hooks = [block.register_forward_pre_hook(enter, with_kwargs=True) for block in self.blocks]
        hooks += [block.register_forward_hook(leave) for block in self.blocks]
        with torch.autograd.graph.saved_tensors_hooks(take, lambda tensor: tensor):
            yield
        for hook in hooks:
            hook.remove()


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()
