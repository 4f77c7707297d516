"""Measurements of a method's layers: how fast masks change, how many weights are left."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from common_kernels import check_nm, flip_rate, nm_mask

from . import dtensors, sharding
from .conversion import weight_of
from .linear import SparseLinear


class FlipRates:
    """The fractions of mask bits that changed at the last measured choice of masks.

    per_refresh: over all layers. per_step, of_layers: the same, of all and of each layer by name,
    divided by the number of steps between two choices.
    """

    per_step = per_refresh = 0.0
    of_layers: Mapping[str, float] = {}
    _before: list[tuple[str, Tensor]] | None = None

    def begin(self, layers: Mapping[str, nn.Module]) -> None:
        """Remember the masks before a choice that is measured."""
        self._before = [(name, mask.clone()) for name, mask in masks(layers)]

    def count(self, layers: Mapping[str, nn.Module], period: int, by_layer: bool) -> None:
        """Count the bits in which the masks differ from those at `begin`, if it was called."""
        if self._before is None:
            return
        names = [name for name, _ in self._before]
        flips = [
            (layers[name], [float(flip_rate(old, new)) * new.numel(), new.numel()])
            for (_, old), (name, new) in zip(self._before, masks(layers), strict=True)
        ]
        self._before = None
        sums = dtensors.total_each(flips)
        self.per_refresh = sum(n for n, _ in sums) / max(1, sum(n for _, n in sums))
        self.per_step = self.per_refresh / period
        if by_layer:
            rates = (changed / max(1, entries) / period for changed, entries in sums)
            self.of_layers = dict(zip(names, rates, strict=True))

    def state_dict(self) -> dict[str, Any]:
        return {
            "flips_per_step": self.per_step,
            "flips_per_refresh": self.per_refresh,
            "flips_of_layers": self.of_layers,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.per_step, self.per_refresh = state["flips_per_step"], state["flips_per_refresh"]
        self.of_layers = state.get("flips_of_layers", {})


def masks(layers: Mapping[str, nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the mask of each trained layer; of sharded layers this rank's rows."""
    for name, layer in layers.items():
        if not any(p.requires_grad for p in layer.parameters()):
            continue
        with sharding.rows(layer):
            if isinstance(layer, SparseLinear):
                mask = layer.current_mask()
            else:
                mask = nm_mask(weight_of(layer).detach())
        yield name, mask


def weights(layers: Mapping[str, nn.Module], patterns: Mapping[str, tuple[int, int]]) -> list[int]:
    """The numbers of non-zeros, of illegal groups and of entries in the weights in use."""
    counts = []
    for name, layer in layers.items():
        with sharding.rows(layer):  # one at a time: the weight may be computed on demand
            if isinstance(layer, SparseLinear):
                weight = layer.sparse_weight
                grouped = layer.grouped(weight)
            else:
                weight = grouped = weight_of(layer)
            bad = int(check_nm(grouped, *patterns[name]))
            counts.append((layer, [int(weight.count_nonzero()), bad, weight.numel()]))
    return [*map(int, dtensors.total(counts))]
