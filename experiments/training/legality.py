"""Measures the density of a model's linears, and counts the groups that violate their pattern."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from common_kernels import check_nm


@dataclass(frozen=True)
class LinearSparsity:
    """The sparsity of one linear with weight [out, in] = `shape`.

    pattern: (n, m), at most n non-zeros in m consecutive inputs. groups: number of groups of m
    inputs; illegal_groups: number of those with more than n non-zeros.
    """

    name: str
    shape: tuple[int, int]
    pattern: tuple[int, int]
    nonzeros: int
    groups: int
    illegal_groups: int

    @property
    def density(self) -> float:
        return self.nonzeros / (self.shape[0] * self.shape[1])

    def as_dict(self) -> dict[str, Any]:
        own = {"shape": list(self.shape), "pattern": ":".join(map(str, self.pattern))}
        counts = {"groups": self.groups, "illegal_groups": self.illegal_groups}
        return {"name": self.name, **own, "density": self.density, **counts}


@torch.no_grad()
def measure(model: nn.Module, patterns: Mapping[str, tuple[int, int]]) -> list[LinearSparsity]:
    """The sparsity of the linears named in `patterns`, each against its own pattern (n, m)."""
    rows = []
    for name, (n, m) in patterns.items():
        weight = model.get_parameter(f"{name}.weight")
        outputs, inputs = weight.shape
        rows.append(
            LinearSparsity(
                name=name,
                shape=(outputs, inputs),
                pattern=(n, m),
                nonzeros=int(torch.count_nonzero(weight)),
                groups=weight.numel() // m,
                illegal_groups=int(check_nm(weight, n, m)),
            )
        )
    return rows


def total(rows: Sequence[LinearSparsity]) -> dict[str, Any]:
    """`density`, `illegal_groups` and `groups` over all rows, as in `result.json`."""
    entries = sum(row.shape[0] * row.shape[1] for row in rows)
    return {
        "density": sum(row.nonzeros for row in rows) / max(1, entries),
        "illegal_groups": sum(row.illegal_groups for row in rows),
        "groups": sum(row.groups for row in rows),
    }


def table(rows: Sequence[LinearSparsity], dense: bool = False) -> str:
    """A Markdown table of the rows, their sum last. dense: leave the patterns out."""
    summed = total(rows)
    lines = [["linear", "shape", "density", "N:M", "illegal groups"], ["---"] * 5]
    for row in rows:
        (outputs, inputs), (n, m) = row.shape, row.pattern
        illegal = f"{row.illegal_groups} of {row.groups}"
        lines.append([row.name, f"{outputs} x {inputs}", f"{row.density:.4f}", f"{n}:{m}", illegal])
    illegal = f"{summed['illegal_groups']} of {summed['groups']}"
    lines.append([f"all {len(rows)}", "", f"{summed['density']:.4f}", "", illegal])
    return "\n".join(f"| {' | '.join(cells[: 3 if dense else 5])} |" for cells in lines)
