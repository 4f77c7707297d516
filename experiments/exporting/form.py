"""The form in which a run is exported."""

from __future__ import annotations

import re
from dataclasses import dataclass

from experiments.config.settings import DTYPES
from experiments.runs.finished import WEIGHTS_OF
from experiments.support.names import check_choices

FOLDER = "export"  # in the run directory


@dataclass(frozen=True, kw_only=True)
class Form:
    """The form in which a run is written.

    weights: `sparse`, the final weights, or `dense`, the master weights.
    dtype: the dtype to which weights are rounded.
    compressed: write 2:4 weights as values and positions.
    license: the hub's id of a license, for the model card.
    """

    weights: str = "sparse"
    dtype: str = "fp32"
    compressed: bool = False
    license: str | None = None

    def __post_init__(self) -> None:
        check_choices(self, "", {"weights": WEIGHTS_OF, "dtype": DTYPES})
        if self.compressed and self.weights != "sparse":
            raise ValueError("compressed=true holds sparse weights; leave weights=dense out")
        if self.license is not None and not re.fullmatch(r"[\w.-]+", self.license):
            raise ValueError(f"license={self.license}; give an id of the hub, apache-2.0 for one")

    @property
    def folder(self) -> str:
        """The name of the export's folder in the run directory."""
        parts = [FOLDER] + [self.weights] * (self.weights != "sparse")
        parts += [self.dtype] * (self.dtype != "fp32") + ["compressed"] * self.compressed
        return "-".join(parts)
