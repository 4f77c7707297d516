"""STE: hard 2:4 magnitude pruning with a straight-through gradient.

    GEMM   operand 1   operand 2     sparse operand, along
    fprop  X           W * M         weight, 2:4 along `in`
    dgrad  dY          W * M         the same weight (2:4 along `in`: a dense product on hardware)
    wgrad  dY          X             none; flows to W unmasked

M keeps the `n` largest magnitudes of `m` consecutive inputs and is chosen again in every optimizer
step. The model ends 2:4 sparse. It is the baseline "hard threshold" of S-STE. With `fp8`
the products are in FP8 (nn/fp8_gemms.py); only fprop is sparse.
"""

from dataclasses import dataclass
from typing import Any

from common_kernels.adamw import Rule

from .nn import base
from .nn.linear import MaskedLinear
from .nn.optimizer import StepWork


@dataclass(frozen=True, kw_only=True)
class Config(base.NMConfig, base.PartialConfig):
    """Options of STE.

    n, m: keep n of m consecutive inputs; patterns other than 2:4 have dense products alone.
    fp8: FP8 products, as in `methods.s_ste`.
    """

    fp8: str = "off"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fp8 != "off" and self.pattern("") != (2, 4):
            raise ValueError(f"fp8={self.fp8} needs the pattern 2:4, not {self.n}:{self.m}")
        if self.fp8 != "off" and self.dense_columns:
            raise ValueError(f"fp8={self.fp8} has no dense columns; set dense_columns=0")


class Method(base.Method):
    Config = Config
    Linear = MaskedLinear
    abilities = base.Capabilities(changes_only_weights=True)

    def step_work(self, layer: Any, step: int) -> StepWork | None:
        return StepWork(layer=layer, rule=Rule(choose="rows"), mask=layer.mask)
