"""The form in which a run is exported."""

from __future__ import annotations

import re
from dataclasses import dataclass

from experiments.config.settings import DTYPES
from experiments.runs.finished import WEIGHTS_OF
from experiments.support.names import check_choices

FOLDER = "export"  # in the run directory
BITS = {"int8": 8, "int4": 4}


@dataclass(frozen=True, kw_only=True)
class Form:
    """The form in which a run is written.

    weights: `sparse`, the final weights, or `dense`, the master weights.
    dtype: the dtype to which weights are rounded.
    quantize: null, or int8 or int4 to round 2:4 weights to such integers times scales.
    compressed: write 2:4 weights as values and positions.
    license: the hub's id of a license, for the model card.
    """

    weights: str = "sparse"
    dtype: str = "fp32"
    quantize: str | None = None
    compressed: bool = False
    license: str | None = None

    def __post_init__(self) -> None:
        check_choices(self, "", {"weights": WEIGHTS_OF, "dtype": DTYPES})
        if self.quantize is not None:
            check_choices(self, "", {"quantize": BITS})
        if self.compressed and self.weights != "sparse":
            raise ValueError("compressed=true holds sparse weights; leave weights=dense out")
        if self.license is not None and not re.fullmatch(r"[\w.-]+", self.license):
            raise ValueError(f"license={self.license}; give an id of the hub, apache-2.0 for one")

    @property
    def bits(self) -> int:
        """The bits of the integers; 0 without."""
        return BITS.get(self.quantize or "", 0)

    @property
    def folder(self) -> str:
        """The name of the export's folder in the run directory."""
        parts = [FOLDER] + [self.weights] * (self.weights != "sparse")
        parts += [self.dtype] * (self.dtype != "fp32") + [self.quantize or ""] * bool(self.quantize)
        parts += ["compressed"] * self.compressed
        return "-".join(parts)
