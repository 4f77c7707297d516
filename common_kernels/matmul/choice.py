"""Which backend serves a product of a packed matrix, and in which layout it is fastest."""

import functools
import os
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from common_kernels import backend as backends
from common_kernels.matmul import cuda, cuda_build, table
from common_kernels.matmul.cusparselt import Problem
from common_kernels.pack import BUFFERED, VENDOR, check_form, cpu, cusparselt, learn, pack24

BACKENDS = ("dense", "cusparselt", "cuda")
# For tests on GPUs whose order of the metadata is known: `learnt`, it is learnt all the same;
# `cusparselt`, the library packs. It does so, too, where no order can be learnt.
PACKER_VARIABLE = "SPARSE24_PACKER"


def library_layout(device: torch.device) -> str:
    """The layout of the matrices that cuSPARSELt multiplies on `device`: the one that our packers
    write where the order of its metadata is known or can be learnt, else the library's own."""
    return _library_layout(device)


# torch.compiler.assume_constant_result without the import of torch._dynamo, which takes a second.
library_layout._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache  # every product asks
def _library_layout(device: torch.device) -> str:
    asked = os.environ.get(PACKER_VARIABLE)
    if _order_is_known(device) and not asked:
        return BUFFERED
    return (None if asked == "cusparselt" else learn.layout_on(device)) or VENDOR


def library_layout_for(problem: Problem, device: torch.device) -> str:
    """The layout of the matrix of one product: `library_layout`, or the library's own with a
    warning where the library packs this matrix in another way than was learnt."""
    layout = library_layout(device)
    if layout in (BUFFERED, VENDOR):
        return layout
    moved = in_layout(problem, layout)
    given = () if moved is None else (layout, moved.rows, moved.columns, moved.dtype, device)
    return layout if given and as_learnt(*given) else VENDOR


@functools.cache  # so that it warns once
def as_learnt(
    layout: str, rows: int, columns: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """True if our packers and the library write a [rows, columns] alike; a warning says if not."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.rand(rows, columns // 4, 4, device=device, generator=generator)
    kept = torch.zeros_like(x, dtype=torch.bool).scatter_(-1, x.topk(2, -1).indices, True)
    x, kept = ((1 + x) * kept).view(rows, columns).to(dtype), kept.view(rows, columns)
    try:
        ours = pack24(x, kept, layout).buffer
        agrees = torch.equal(ours, cpu.by_library(x)[: len(ours)])
    except (cusparselt.CuSparseLtError, ValueError):  # the library needs more room, or ours rows
        agrees = False
    if not agrees:
        warnings.warn(
            f"cuSPARSELt packs {dtype} [{rows}, {columns}] in another way than was learnt on this "
            "GPU, so it packs such matrices itself, which takes longer",
            stacklevel=2,
        )
    return agrees


def _order_is_known(device: torch.device) -> bool:
    return device.type != "cuda" or backends.capability(device) == (9, 0)


def layouts_on(device: torch.device) -> tuple[str, ...]:
    """The layouts that the products of training take on `device`."""
    layout = library_layout(device)
    return (layout, *cuda.LAYOUTS) if layout == BUFFERED else (layout,)


def unavailable(backend: str, device: torch.device | str, dtype: torch.dtype) -> str | None:
    """The reason why `backend` cannot multiply matrices of `dtype` on `device`; None if it can.

    Raises ValueError for an unknown backend.
    """
    if backend not in BACKENDS:
        raise ValueError(f"unknown matmul backend {backend!r}: choose one of {', '.join(BACKENDS)}")
    device, own = torch.device(device), backend == "cuda"
    emulated = device.type == "cpu" and backends.interpreted()
    if backend == "dense":
        return None
    if not emulated and (reason := _lacking(own, device, dtype.itemsize == 1)):
        return reason
    if dtype not in (cuda.TYPES if own else cusparselt.TYPES):
        named = "our own products take bf16" if own else "cuSPARSELt takes bf16, fp16"
        return f"{named} and FP8 here, not {dtype}"
    return cuda_build.missing() if own and not emulated else None


def _lacking(own: bool, device: torch.device, codes: bool) -> str | None:
    """The reason why `device` cannot run our own products, or cuSPARSELt's; None if it can."""
    least = (9, 0) if own else (8, 9) if codes else (8, 0)
    what = "our own products need" if own else "FP8 needs" if codes else "cuSPARSELt needs"
    which = "9.x" if own else f"8.{least[1]} or later"
    needs = f"{what} a GPU of compute capability {which}"
    if device.type != "cuda":
        return f"{needs}, not a {device.type}"
    found = backends.capability(device)
    if found < least or (own and found[0] != 9):
        return f"{needs}, this GPU has {found}"
    try:
        if not own:
            cusparselt.library()
            if found != (9, 0):  # does this version of the library know the GPU?
                cusparselt.handle(device.index or 0)
    except cusparselt.CuSparseLtError as error:
        return str(error)
    return None


# As for `library_layout`: torch.compile shall not trace these questions.
_lacking._dynamo_marked_constant = True  # type: ignore[attr-defined]


def check_available(problem: Problem, device: torch.device) -> None:
    name = "cuda" if problem.layout in cuda.LAYOUTS else "cusparselt"
    reason = unavailable(name, device, problem.dtype)
    if not reason and problem.layout == BUFFERED and not _order_is_known(device):
        reason = f"layout {BUFFERED!r} is for compute capability 9.0; pack in {VENDOR!r}"
    if reason:
        raise RuntimeError(f"matmul backend {name!r} cannot serve: {reason}")


class Measured(NamedTuple):
    """The measured times of a product by itself, in milliseconds.

    ms: time of the sparse product, infinite if no kernel gives the correct result.
    dense_ms: time of the dense product.
    """

    layout: str
    ms: float
    dense_ms: float

    @property
    def share(self) -> float:
        """The time of the sparse product divided by that of the dense one."""
        return self.ms / self.dense_ms

    @property
    def wins(self) -> bool:
        """True if the sparse product is the faster one."""
        return self.ms < self.dense_ms


def in_layout(problem: Problem, layout: str) -> Problem | None:
    """The product with its sparse matrix in another layout; None if no kernel serves it.

    In wgrad the sparse matrix's columns are tokens; they are rounded up to what the layout needs.
    """
    if layout in cuda.LAYOUTS and problem.dtype not in cuda.TYPES:
        return None
    columns = problem.columns
    try:
        if not problem.result_transposed:
            columns += -columns % check_form((0, 0), problem.dtype, layout).columns
        check_form((problem.rows, columns), problem.dtype, layout)
    except ValueError:
        return None
    moved = replace(problem, layout=layout, columns=columns)
    return moved if layout not in cuda.LAYOUTS or cuda.configs(moved) else None


def _served(problem: Problem, layouts: Sequence[str], device: torch.device) -> list[Problem]:
    """The product in each layout that kernels serve. A layout that needs more tokens is left out
    unless all do: padded copies of dY and X cost more than another kernel gains."""
    common = library_layout(device)
    named = (library_layout_for(problem, device) if x == common else x for x in layouts)
    found = [moved for layout in named if (moved := in_layout(problem, layout))]
    return [moved for moved in found if moved.columns == problem.columns] or found


def fastest(
    problem: Problem, device: torch.device, layouts: Sequence[str] | None = None
) -> Measured | None:
    """The layout in which the product is fastest relative to the dense one, with its times; None if
    no layout serves it. Products that the table lacks are measured now. Without `layouts` all are
    considered that the device takes. If our own kernels cannot be compiled, only cuSPARSELt's are
    considered, with one warning."""
    index = torch.cuda.current_device() if device.index is None else device.index
    found, layouts = [], layouts or layouts_on(device)
    with torch.autocast(device.type, enabled=False), torch.cuda.device(index):
        for moved in _served(problem, layouts, device):
            layout = moved.layout
            if layout in cuda.LAYOUTS and (reason := unavailable("cuda", device, problem.dtype)):
                _do_without(reason)
                continue
            try:
                entry = table.entry(moved, index, within=2.0)
            except cuda_build.BuildError as error:
                if BUFFERED not in layouts:
                    raise
                _do_without(str(error))
                continue
            found.append(Measured(layout, entry.ms, entry.dense_ms))
    return min(found, key=lambda one: one.share, default=None)


def is_faster(problem: Problem, device: torch.device) -> bool:
    """True if the sparse product, in the layout that `problem` names, is faster than the dense one.
    It is measured now if the table lacks it."""
    found = fastest(problem, device, (problem.layout,))
    return found is not None and found.wins


def own_layout(problem: Problem, device: torch.device) -> str:
    """The layout of our own fastest kernel for a product; cuSPARSELt's if none serves it.

    On a CPU, where products are emulated, it is the first layout that serves it.
    """
    served = [layout for layout in cuda.LAYOUTS if in_layout(problem, layout)]
    if device.type == "cpu" or not served:
        return served[0] if served else library_layout(device)
    best = fastest(problem, device, served)
    return library_layout(device) if best is None else best.layout


def measured(
    problem: Problem, device: torch.device, layouts: Sequence[str] | None = None
) -> Measured | None:
    """The result of `fastest` from existing measurements only; None without any, or on a CPU."""
    if device.type != "cuda":
        return None
    index, found = torch.cuda.current_device() if device.index is None else device.index, []
    for moved in _served(problem, layouts or layouts_on(device), device):
        try:
            entry = table.known(moved, index)
        except (cuda_build.BuildError, cusparselt.CuSparseLtError):
            continue  # these kernels cannot be compiled here, so there are no measurements
        if entry is not None:
            found.append(Measured(moved.layout, entry.ms, entry.dense_ms))
    return min(found, key=lambda one: one.share, default=None)


@functools.cache  # so that it warns once
def _do_without(reason: str) -> None:
    warnings.warn(f"{reason}: sparse products use cuSPARSELt only", stacklevel=4)
