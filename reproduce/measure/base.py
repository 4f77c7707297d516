"""The settings that measures share, and what a measure returns."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from common_kernels.matmul import unavailable
from experiments.bench.timing import SUSTAINED_S, Call, Time, in_turns
from experiments.config.run import digest
from experiments.support import results

Report = Callable[[str], None]
Metrics = dict[str, float | None]  # None: it cannot be measured on this device
Result = tuple[Metrics, str]  # metrics by name, and a description of what ran the products
BUFFERS = 2  # inputs of every call, used in rotation
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Times(dict[str, float]):
    """Milliseconds of calls that took turns, by name. load: the GPU's SM clock in MHz and its power
    in W meanwhile, as metrics."""

    def __init__(self, times: Mapping[str, Time]) -> None:
        super().__init__((name, time.ms) for name, time in times.items())
        first, self.clocks = next(iter(times.values())), {time.clock for time in times.values()}
        self.load: Metrics = {"sm_mhz": first.mhz, "watts": first.watts}

    def launched(self, on_cpu: str = "not in a graph") -> str:
        """A description of how the calls were launched. on_cpu: what it says on a CPU."""
        how = {"graph": "in a CUDA graph", "events": "launched from Python", "host": on_cpu}
        return " and ".join(sorted(how[clock] for clock in self.clocks))


@dataclass(frozen=True, kw_only=True)
class Base:
    """The settings of every measure.

    precision: dtype of weights and products on a GPU, bf16 or fp16; a CPU uses fp32.
    repeats: samples of each time.
    device: `auto`, or `cuda` to require a GPU.
    """

    what: ClassVar[str]  # the name of the measure
    products: ClassVar[tuple[str, ...]] = ("cusparselt",)  # one of which must be there on a GPU
    precision: str = "bf16"
    repeats: int = 7
    device: str = "auto"
    threads: int = 2
    seed: int = 0
    tier: str = "none"
    runs: str = "runs"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if isinstance(value := getattr(self, field.name), list):
                object.__setattr__(self, field.name, tuple(value))

    @property
    def on(self) -> torch.device:
        """The device to measure on."""
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and products."""
        return PRECISIONS[self.precision] if self.on.type == "cuda" else torch.float32

    @property
    def matmul(self) -> str:
        """The backend of sparse products to measure with: `auto` on a GPU, `dense` on a CPU."""
        return "auto" if self.on.type == "cuda" else "dense"

    @property
    def no_products(self) -> str:
        """Why this device has no 2:4 products for the measure; "" if it has them or needs none.
        Dense products would be measured in their place."""
        reasons = [unavailable(name, self.on, self.dtype) for name in self.products]
        return "" if None in reasons else "; ".join(map(str, reasons))

    def measure(self, report: Report) -> Result:
        """Measure, and return metrics by name and a description of what ran the products. Progress
        is reported by `report`."""
        raise NotImplementedError

    def in_turns(
        self, calls: Mapping[str, Call], buffers: int = BUFFERS, graphs: bool = True
    ) -> Times:
        """The times of calls that take turns, each on its inputs in rotation."""
        return Times(in_turns(calls, self.on, self.repeats, buffers, graphs))

    def identity(self) -> dict[str, Any]:
        """Everything that the result depends on, including the device, as plain values."""
        fields = {"what": self.what, **dataclasses.asdict(self)}
        del fields["tier"], fields["runs"]
        sustained = SUSTAINED_S if self.on.type == "cuda" else None
        machine = {"device": results.device_name(), "torch": torch.__version__}
        return {**fields, **machine, "sustained_s": sustained, "order": "random"}

    def digest(self) -> str:
        """Hash of `identity()`."""
        return digest(self.identity())

    def directory(self) -> Path:
        """The directory of the result."""
        device = re.sub(r"\W+", "-", results.device_name().lower())
        return Path(self.runs, "bench", device, f"{self.what}-{self.digest()}")


@dataclass(frozen=True, kw_only=True)
class Layer(Base):
    """The settings of a measure of a layer on batch * length tokens.

    inner: width of the feed-forward network; null = 4 * width.
    shrink: divisor of width and inner, for small tiers.
    """

    batch: int = 1
    length: int = 1
    width: int = 0
    inner: int | None = None
    heads: int = 1
    shrink: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("width", "inner"):
            if value := getattr(self, name):
                object.__setattr__(self, name, value // self.shrink)

    @property
    def tokens(self) -> int:
        """Number of tokens of a batch."""
        return self.batch * self.length

    @property
    def ffn(self) -> int:
        """Width of the feed-forward network."""
        return self.inner or 4 * self.width


@dataclass(frozen=True, kw_only=True)
class MethodLayer(Layer):
    """The settings of a measure of a layer under a method.

    method: a key of experiments.bench.variants.VARIANTS, or the name of a method.
    """

    method: str

    @property
    def ends_dense(self) -> bool:
        """True for FST, which leaves a dense model: its inference is that of a dense one."""
        return self.method == "fst"
