"""Counts the zeros that SLoPe's second mask adds: its Figure B.4."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from common_kernels import double_prune_mask, nm_mask
from methods.slope import parse_pattern
from reproduce.measure.base import Base, Metrics, Report, Result


@dataclass(frozen=True, kw_only=True)
class Settings(Base):
    """A weight width x width; pattern: N:M."""

    products: ClassVar[tuple[str, ...]] = ()
    width: int
    pattern: str = "2:4"


def measure(config: Settings, _: Report) -> Result:
    """Share of all weights that the second mask, along the columns, sets to zero in addition to the
    first, along the rows.

    For a normal weight [width, width] whose first mask is `random` or keeps the largest entries
    (`magnitude`), and by the formula of the paper's lemma (`closed_form`).
    """
    _glob, n, m = parse_pattern(f"*={config.pattern}")
    generator = torch.Generator(config.on).manual_seed(config.seed)
    weight, other = (
        torch.randn(config.width, config.width, generator=generator, device=config.on)
        for _ in range(2)
    )
    metrics: Metrics = {"sm_mhz": None, "watts": None, "closed_form": imposed(n, m)}
    for name, scores in {"random": other, "magnitude": weight}.items():
        once = torch.where(nm_mask(scores, n, m), weight, 0.0)
        twice = torch.where(double_prune_mask(once, n, m), once, 0.0)
        before, after = ((pruned != 0).double().mean().item() for pruned in (once, twice))
        metrics |= {name: before - after, f"{name}_density": after}
    return metrics, "masks alone"


def imposed(n: int, m: int) -> float:
    """The share by the lemma: E[max(B - n, 0)] / m, where B has the binomial distribution of m
    draws with probability n / m."""
    share = n / m
    surplus = (
        math.comb(m, j) * share**j * (1 - share) ** (m - j) * (j - n) for j in range(n + 1, m + 1)
    )
    return sum(surplus) / m
