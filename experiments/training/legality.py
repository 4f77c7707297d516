"""Measures the density of a model's linears, and counts the groups that violate their pattern."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from common_kernels import check_nm

Row = dict[str, Any]


@torch.no_grad()
def measure(model: nn.Module, patterns: Mapping[str, tuple[int, int]]) -> list[Row]:
    """The sparsity of each linear named in `patterns`, against its own pattern (n, m): at most n
    non-zeros in m consecutive inputs. Its weight has `shape` [out, in] and `groups` of m inputs, of
    which `illegal_groups` have more than n non-zeros."""
    rows = []
    for name, (n, m) in patterns.items():
        weight = model.get_parameter(f"{name}.weight")
        rows.append(
            {
                "name": name,
                "shape": list(weight.shape),
                "pattern": f"{n}:{m}",
                "density": int(torch.count_nonzero(weight)) / weight.numel(),
                "groups": weight.numel() // m,
                "illegal_groups": int(check_nm(weight, n, m)),
            }
        )
    return rows


def total(rows: Sequence[Row]) -> Row:
    """`density`, `illegal_groups` and `groups` over all rows, as in `result.json`."""
    sizes = [math.prod(row["shape"]) for row in rows]
    nonzeros = sum(round(row["density"] * size) for row, size in zip(rows, sizes, strict=True))
    counts = {key: sum(row[key] for row in rows) for key in ("illegal_groups", "groups")}
    return {"density": nonzeros / max(1, sum(sizes)), **counts}


def table(rows: Sequence[Row], dense: bool = False) -> str:
    """A Markdown table of the rows, their sum last. dense: leave the patterns out."""
    lines = [["linear", "shape", "density", "N:M", "illegal groups"], ["---"] * 5]
    summed = {"name": f"all {len(rows)}", "shape": (), "pattern": "", **total(rows)}
    for row in [*rows, summed]:
        shape, illegal = (" x ".join(map(str, row["shape"])), f"{row['illegal_groups']} of")
        density = f"{row['density']:.4f}"
        lines.append([row["name"], shape, density, row["pattern"], f"{illegal} {row['groups']}"])
    return "\n".join(f"| {' | '.join(cells[: 3 if dense else 5])} |" for cells in lines)
