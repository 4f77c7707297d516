"""Packs the linears of models for inference, and times packing itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common_kernels import nm_mask
from common_kernels.matmul import is_faster
from common_kernels.pack import Packed24
from common_kernels.pack.operands import pack_both24_
from experiments.bench import variants
from experiments.bench.timing import Call, Time
from experiments.support.errors import UserError
from models import packed
from models.packed import PackedProduct
from reproduce.measure.base import Metrics

SERVED = ("cusparselt", "cutlass")  # torch's own products, those of Ampere, are enough


@torch.no_grad()
def to_packed(
    model: nn.Module, chosen: Callable[[str], bool], tokens: Iterable[int], device: torch.device
) -> str:
    """Prune the chosen linears of `model` to 2:4 by magnitude and pack them, in place; return the
    name of the packed layout. Where the device has no sparse products, they are pruned but multiply
    dense, and the name is `dense`.

    Args:
        chosen: True for the names of linears to pack.
        tokens: numbers of tokens that will be multiplied; the fastest product for each is searched.
    Raises:
        UserError: a packed product differs from that of the masked weight.
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
    """Search the fastest sparse product for this number of tokens, and raise a `UserError` if it is
    wrong."""
    (rows, columns), dtype, bias = layer.packed.shape, layer.packed.dtype, layer.bias
    if (problem := layer.problem(tokens)) is not None:
        is_faster(problem, device)  # for its search: the answer is not needed
    x = torch.randn(tokens, columns, dtype=dtype, device=device)
    want = F.linear(x.float(), layer.weight.float(), None if bias is None else bias.float())
    error = variants.relative_error(layer(x), want)
    allowed = variants.tolerance(variants.variant("dense"), dtype, columns)
    if not error <= allowed:
        raise UserError(
            f"the packed product {tokens} x {columns} -> {rows} is off by {error:.2g} (allowed "
            f"{allowed:.2g}): no time is reported; run `pytest tests/common_kernels`"
        )


def packing(matrices: list[Tensor]) -> dict[str, Call]:
    """The calls to time on these matrices, by name.

    pack: choose a transposable mask, and pack the matrix and its transpose. library: pack a 2:4
    matrix by cuSPARSELt itself; on a GPU only. copy: copy the matrix.
    """
    first = matrices[0]
    packs = first.dtype.itemsize == 2  # other types have no packed form
    calls: dict[str, Call] = {"copy": lambda i: matrices[i].clone()}
    if packs:
        out = Packed24.empty(tuple(first.shape), first.dtype, first.device)
        transposed = Packed24.empty(tuple(first.shape[::-1]), first.dtype, first.device)
        calls["pack"] = lambda i: pack_both24_(out, transposed, matrices[i])
    if packs and first.is_cuda:
        pruned = [w * nm_mask(w) for w in matrices]
        calls["library"] = lambda i: torch.ops.aten._cslt_compress(pruned[i])
    return calls


def microseconds(times: dict[str, Time]) -> Metrics:
    """The times in microseconds, None for what was not timed, and the speedup of 2:4 over dense."""
    metrics: Metrics = {f"{name}_us": None for name in ("pack", "library", "copy")}
    metrics |= {f"{name}_us": 1e3 * time.ms for name, time in times.items()}
    return metrics | {"speedup": times["dense"].ms / times["sparse"].ms}
