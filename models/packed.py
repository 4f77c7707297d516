"""Runs the 2:4 linears of a finished model with packed weights where this is faster.

With few tokens, as in decoding, a product spends its time on reading the weight and on launching
kernels; a packed weight has 9/16 of the bytes, of integers (`models.quantized.quantize`) a third or
a fifth. `few_tokens24` is for this alone. With many tokens the time goes to arithmetic, of which a
sparse product (`linear24`) has half; on a GPU for which we have kernels of our own it is faster
than dense from a few tokens on, elsewhere from a larger number. The number of tokens from which on
it is faster is called the crossover. Both limits are measured for each shape of weight on the
present GPU, with the layers launched from Python or replayed from a CUDA graph, as they will run.

A layer with a low-rank term beside its 2:4 weight, as SLoPe and SLoRB leave it and as an export
keeps it, has a method `low_rank`: (left [r, in], or None for sums of in / r neighbours; right
[r, out]; scale). In bf16 `left` is packed below the weight, as two 2:4 matrices whose sum it is, so
that one product serves both; `lowrank_addmm` follows it. Beside integers, and without a `left`, the
first half of the term has a product of its own.

Linears without bias that transformers calls one after the other with the same input (TOGETHER) run
as one product with few tokens: a long matrix is read faster than several short ones.

A weight of which some input columns stayed dense (`dense_columns`, columns.py) is multiplied as
[2:4 | dense]: the packed product of the inputs of the 2:4 columns, to which the dense product of
the others is added.

In between a layer multiplies with its dense weight, so it has it too: each packed form in use takes
9/16 of the dense weight's memory in addition, and 9/8 of that of `left`. All layers of a shape are
packed in the layout of the kernel, cuSPARSELt's or our own, that was fastest with `COMPARED`
tokens.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common_kernels import Fragments24, Packed24, few_tokens24, fragments24, lowrank_addmm, pack24
from common_kernels.decode import MOST, has_fragments, serves
from common_kernels.matmul import fastest, library_layout, linear24, unavailable
from common_kernels.matmul.cusparselt import Problem
from common_kernels.pack import VENDOR, check_form, of_library
from common_kernels.pack.operands import fill_up, pack24_
from models.columns import linears_and_divisions
from models.limits import Limits, measured
from models.linears import matrix_of, shape_of
from models.quantized import integers_of

# cuSPARSELt makes a plan for each number of tokens. To limit the number of plans, tokens are padded
# to multiples: of STEP if there are more, else of LEAST, which it needs for 16-bit types.
STEP, LEAST = 64, 8
COMPARED = 64  # the number of tokens with which the kernels of a shape are compared
HELD = "values", "meta", "scales"  # the tensors of fragments
TOGETHER = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")  # in the order of their calls


class Joined:
    """Linears with the same input, whose product with few tokens is made by the first of them."""

    def __init__(self, layers: Sequence[PackedProduct]) -> None:
        forms = [layer.fragments for layer in layers if layer.fragments is not None]
        self.rows = [form.shape[0] for form in forms]
        first, held = forms[0], [name for name in HELD if getattr(forms[0], name) is not None]
        whole = {name: torch.cat([getattr(form, name) for form in forms]) for name in held}
        shape = sum(self.rows), first.shape[1]
        self.fragments = Fragments24(**whole, shape=shape, dtype=first.dtype)
        # Views of the whole, to free the memory that the parts had.
        for name, parts in whole.items():
            lengths = [len(getattr(form, name)) for form in forms]
            forms = [
                replace(f, **{name: v}) for f, v in zip(forms, parts.split(lengths), strict=True)
            ]
        for place, (layer, form) in enumerate(zip(layers, forms, strict=True)):
            layer.fragments, layer.joined = form, (self, place)
        # The input and its version, the products, and who took one last.
        self.made: tuple[Tensor, int, tuple[Tensor, ...], int] | None = None

    def product(self, place: int, x: Tensor, rows: Tensor) -> Tensor:
        """The product of one layer. x: its input as it is, by which a product made for another
        layer is recognised; it is made anew if that was no earlier one, or if x was changed since,
        which is not seen in `inference_mode` or a compiled model. rows: x as [tokens, in]."""
        made = self.made  # read once, since other threads may use the model
        unseen = torch.compiler.is_compiling() or x.is_inference()
        version = 0 if unseen else x._version
        if made is None or made[0] is not x or made[1] != version or made[3] >= place:
            made = x, version, few_tokens24(self.fragments, rows).split(self.rows, -1), place
        self.made = (*made[:3], place) if place + 1 < len(self.rows) else None
        return made[2][place]


class Beside(NamedTuple):
    """The dense columns of a weight that is packed without them.

    order: the inputs, first those of the packed columns; None if they are in that order.
    """

    weight: Tensor  # [out, dense]
    order: Tensor | None

    def split(self, rows: Tensor) -> Sequence[Tensor]:
        """rows [tokens, in] -> those of the packed columns, and those of the dense ones."""
        dense = self.weight.shape[1]
        sizes = [rows.shape[1] - dense, dense]
        if self.order is None:
            return rows.split(sizes, 1)
        if len(rows) == 1:  # one kernel, and both are contiguous
            return rows.index_select(1, self.order).split(sizes, 1)
        return [rows.index_select(1, part) for part in self.order.split(sizes)]


class PackedProduct(nn.Module):
    """A linear with packed copies of its 2:4 weight, for inference: within its `limits` it uses
    `fragments` with few tokens and `packed` with many.

    It multiplies dense if a gradient is needed, if the input has another dtype or device than the
    packed copy, in a copy of the layer, and after the weight, or the left factor that was packed
    with it, was changed, replaced, cast or moved.
    Changes that bypass autograd are not noticed (`weight.data += ...`, as peft merges adapters),
    and in a compiled model no change is: call `pack` again.
    """

    packed: Packed24  # None without a crossover
    fragments: Fragments24 | None
    limits: Limits
    joined: tuple[Joined, int] | None  # and the layer's place in it
    beside: Beside | None
    below: int  # rows of each part of the low-rank term's left factor, packed below the weight
    weight: Tensor
    bias: Tensor | None
    # What was packed, the weight and perhaps the left factor, and the versions then.
    source: list[tuple[weakref.ref[Tensor], int]]

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        tokens = x.numel() // x.shape[-1]
        if not self.runs_packed(x, tokens):
            return self.dense(x)
        rows, low_rank = x.reshape(tokens, x.shape[-1]), getattr(self, "low_rank", None)
        if low_rank is None:
            y = self.product(x, rows, self.bias)
        else:
            left, right, scale = low_rank()
            y, below = self.product(x, rows, None), self.below
            if below:
                y, y2 = y[:, : -2 * below], y[:, -2 * below :].unflatten(1, (2, below))
                y2 = y2[..., : len(right)]
            else:
                y2 = reduced(rows, left, len(right))
            y = lowrank_addmm(y, y2, right, self.bias, scale)
        return y.reshape(*x.shape[:-1], -1)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Moved or cast, the layer is the linear that it was: its packed copies do not follow."""
        before = self.weight.data_ptr()
        super()._apply(fn, recurse)
        if self.weight.data_ptr() != before:
            _restore(self)
        return self

    def product(self, x: Tensor, rows: Tensor, bias: Tensor | None) -> Tensor:
        """rows [tokens, in], those of x -> [tokens, out] with the packed weight."""
        if self.beside is None:
            return self.product_24(x, rows, bias)
        rows, others = self.beside.split(rows)
        return self.product_24(x, rows, bias).addmm_(others, self.beside.weight.t())

    def product_24(self, x: Tensor, rows: Tensor, bias: Tensor | None) -> Tensor:
        """`product` without the dense columns, whose inputs `rows` lack."""
        tokens = len(rows)
        if tokens <= self.limits.few:
            if self.joined is not None:
                joined, place = self.joined
                return joined.product(place, x, rows)
            assert self.fragments is not None
            return few_tokens24(self.fragments, rows, bias)
        rows = fill_up(rows, -tokens % (STEP if tokens > STEP else LEAST))
        return linear24(self.packed, rows, bias)[:tokens]

    def runs_packed(self, x: Tensor, tokens: int) -> bool:
        """True if `x`, which has so many tokens, is multiplied with the packed weight."""
        form: Any = self.fragments if tokens <= self.limits.few else self.packed
        if not tokens or not self.limits.includes(tokens) or x.dtype != form.dtype:
            return False
        layer: Any = self
        packs: list[Any] = [self.weight, *([layer.low_rank()[0]] if self.below else [])]
        needed = any(t is not None and t.requires_grad for t in (x, self.bias, *packs))
        if torch.is_grad_enabled() and needed:
            return False
        if x.device != form.values.device:
            return False
        if torch.compiler.is_compiling():  # a compiled graph cannot read versions
            return True
        pairs = zip(self.source, packs, strict=True)  # another tensor may have the same version
        return all(one._version == version and was() is one for (was, version), one in pairs)

    def dense(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out], with the dense weight."""
        return super().forward(x)

    def problem(self, tokens: int) -> Problem:
        """The product for this number of tokens after padding."""
        step = STEP if tokens > STEP else LEAST
        padded, dtype, biased = -(-tokens // step) * step, self.packed.dtype, self.bias is not None
        of = *self.packed.shape, padded, dtype, dtype, True, True, biased
        return Problem(*of, layout=self.packed.layout)


def reduced(x: Tensor, left: Tensor | None, rank: int) -> Tensor:
    """x left^T [..., rank]; without `left` the sums of neighbours."""
    return x.unflatten(-1, (rank, -1)).sum(-1) if left is None else F.linear(x, left)


@functools.cache
def _class_of(kind: Any) -> Any:
    """The class of packed layers made from layers of the class `kind`, which it extends."""
    return type(f"Packed{kind.__name__}", (PackedProduct, kind), {})


def layout_for(device: torch.device, dtype: torch.dtype) -> str:
    """The layout of packed weights that `device` can multiply with. Raises ValueError if the device
    has no 2:4 products for this dtype; the reason is named."""
    if reason := unavailable("cusparselt", device, dtype):
        raise ValueError(f"no 2:4 products here: {reason}")
    return library_layout(device)


def _layout_of(module: Any, shape: tuple[int, int], measures: bool) -> str:
    """The layout for the packed weight of a linear, which has this shape. If it `measures`, that of
    the kernels, our own or cuSPARSELt's, that are fastest with some dozens of tokens."""
    weight, found = module.weight, None
    if measures:
        if weight.device.type != "cuda":
            raise ValueError(f"limits cannot be measured on a {weight.device}; pass them as limits")
        dtype, biased = weight.dtype, module.bias is not None
        of = *shape, COMPARED, dtype, dtype, True, True, biased
        found = fastest(Problem(*of), weight.device)
    return layout_for(weight.device, weight.dtype) if found is None else found.layout


@torch.inference_mode(False)  # tensors made in that mode have no version, by which a change shows
@torch.no_grad()
def pack(
    model: nn.Module, limits: Limits | None = None, graphs: bool = False
) -> dict[str, Limits | None]:
    """Let the 2:4 linears of a model, ours or of transformers, run packed where that is faster,
    those with dense columns among them.

    This is for inference and changes the model in place: weights and biases of these linears no
    longer require a gradient. Names and shapes of parameters stay the same, so the model is saved
    as before. Linears that are packed already are packed again. Raises ValueError if the device or
    dtype has no 2:4 products, no linear is 2:4 and can be packed, or the weights were made in
    `inference_mode`.

    Args:
        model: on its device, in bf16 or fp16.
        limits: the numbers of tokens to run packed; None = measure them for each shape.
        graphs: measure them for a model that will be replayed from CUDA graphs, where launching
            costs nothing.
    Returns:
        The limits of each 2:4 linear by name; None if dense products are always faster, or if the
        shape cannot be packed.
    """
    for module in model.modules():
        if isinstance(module, PackedProduct):
            _restore(module)
    linears, divisions = linears_and_divisions(model)
    alike: dict[Any, list[str]] = {}
    lefts: dict[str, Tensor | None] = {}
    unfit = []
    for name, module in linears.items():
        weight: Any = module.weight
        if weight.is_inference():
            raise ValueError(
                f"{name} was made in torch.inference_mode, where changes of a tensor cannot be "
                "noticed; make or load the model outside of that mode"
            )
        layout = layout_for(weight.device, weight.dtype)
        rows, columns = shape_of(module)
        columns = len(divisions[name][0]) if name in divisions else columns
        lefts[name] = None if name in divisions else left_of(module)
        shape = rows + 2 * rows_for(lefts[name]), columns
        try:
            check_form(shape, weight.dtype, layout)
        except ValueError as error:
            unfit.append(f"{name} cannot be packed: {error}")
            continue
        shapes = tuple((key, value.shape) for key, value in module.named_parameters())
        kind = type(module), shape, shapes, weight.dtype, weight.device
        alike.setdefault(kind, []).append(name)
    if not alike:
        raise ValueError(unfit[0])
    found: dict[str, Limits | None] = dict.fromkeys(linears)
    for kind, names in alike.items():
        layout = _layout_of(model.get_submodule(names[0]), kind[1], measures=limits is None)
        layers = [
            _packed(model.get_submodule(n), layout, divisions.get(n), lefts[n]) for n in names
        ]
        with torch.cuda.device_of(layers[0].weight):
            own = measured(layers, graphs) if limits is None else limits
        if layers[0].fragments is None:
            own = own._replace(few=0)
        for name, layer in zip(names, layers, strict=True):
            if own == Limits(0, None):
                _restore(layer)
            else:
                found[name] = layer.limits = own
                # What is not used would only take memory.
                layer.fragments = layer.fragments if own.few else None
                if own.crossover is None:
                    layer.packed = None  # type: ignore[assignment]
    for module in model.modules():
        for group in TOGETHER:
            _join([getattr(module, name, None) for name in group])
    return found


def _join(layers: Sequence[Any]) -> None:
    """Let the layers run as one product with few tokens, if all are packed for as many of them,
    with all columns."""
    packs = [x for x in layers if isinstance(x, PackedProduct) and x.beside is None]
    if len(packs) == len(layers) and all(x.fragments and x.bias is None for x in packs):
        forms = ((x.limits.few, x.fragments) for x in layers)
        if len({(few, form.shape[1], form.dtype, form.bits) for few, form in forms}) == 1:
            Joined(layers)


def limits_of(model: nn.Module) -> dict[str, Limits]:
    """The numbers of tokens with which each packed linear of a model runs packed, by name."""
    layers = model.named_modules()
    return {name: layer.limits for name, layer in layers if isinstance(layer, PackedProduct)}


def _packed(
    module: Any, layout: str, division: tuple[Tensor, Tensor] | None, left: Tensor | None
) -> PackedProduct:
    """The module itself with its weight packed, to be used with any number of tokens, and with its
    `left` below it; of a divided one, the first columns."""
    weight, matrix, beside = module.weight, matrix_of(module), None
    if division is not None:
        order = torch.cat(division)
        moved = not torch.equal(order, torch.arange(len(order), device=order.device))
        beside = Beside(matrix[:, division[1]], order if moved else None)
        matrix = matrix[:, division[0]]
    below = rows_for(left)
    if left is not None:
        matrix = torch.cat([matrix, *halves(left.to(matrix.dtype), below)])
    if of_library(layout):
        packed = pack24(matrix, matrix != 0, layout)
    else:
        shape = tuple(matrix.shape)
        packed = Packed24.empty(shape, weight.dtype, weight.device, layout)
        pack24_(packed, matrix, "mask", matrix != 0)
    module.requires_grad_(False)
    kind: Any = type(module)
    _become(module, _class_of(kind))
    module.packed, module.limits = packed, Limits(MOST, 0)
    module.joined, module.beside, module.below = None, beside, below
    served = matrix.is_cpu or serves(matrix.device)
    module.fragments = None
    if served and has_fragments(packed.shape, packed.dtype):
        readable = pack24(matrix, matrix != 0) if layout == VENDOR else packed
        module.fragments = fragments24(integers_of(readable), packed.dtype)
    packs = [module.weight] if left is None else [module.weight, left]
    module.source = [(weakref.ref(own), own._version) for own in packs]
    return module


def left_of(module: Any) -> Tensor | None:
    """The left factor [r, in] of a linear's low-rank term, if it can be packed with the weight: not
    beside integers, nor in fp16, whose range a half of a sum may leave."""
    left = module.low_rank()[0] if hasattr(module, "low_rank") else None
    if left is None or left.is_inference() or module.weight.dtype != torch.bfloat16:
        return None
    first = matrix_of(module)[:64]  # some rows tell
    made = integers_of(pack24(first, first != 0))
    return left if len(left) and isinstance(made, Packed24) else None


def rows_for(left: Tensor | None) -> int:
    """The rows of each of the `halves` of a left factor."""
    return 0 if left is None else -(-len(left) // 32) * 32


def halves(left: Tensor, rows: int) -> Sequence[Tensor]:
    """Two 2:4 matrices [rows, in] whose sum is `left` [r, in], filled up with zeros: one has the
    first two of each four entries, the other the last two."""
    filled = fill_up(left, rows - len(left))
    first = torch.arange(left.shape[1], device=left.device) % 4 < 2
    return torch.where(first, filled, 0.0), torch.where(first, 0.0, filled)


def _restore(module: Any) -> None:
    """Turn a packed module back into the linear that it was."""
    _become(module, type(module).__mro__[2])
    del module.packed, module.fragments, module.limits
    del module.joined, module.beside, module.below, module.source


def _become(module: Any, kind: Any) -> None:
    module.__class__ = kind
    if "_old_forward" in vars(module):  # accelerate's hooks call that of the former class
        module._old_forward = types.MethodType(kind.forward, module)
