"""STE: hard 2:4 magnitude pruning with a straight-through gradient.

    GEMM   operand 1   operand 2     sparse operand, along
    fprop  X           W * M         weight, 2:4 along `in`
    dgrad  dY          W * M         the same weight (2:4 along `in`: a dense product on hardware)
    wgrad  dY          X             none; flows to W unmasked

M keeps the two largest magnitudes of four consecutive inputs and is chosen again in every
optimizer step. The model ends 2:4 sparse. The baseline "hard threshold" of S-STE.
"""

from __future__ import annotations

from common_kernels.adamw import Rule

from .nn import base
from .nn.linear import MaskedLinear, SparseLinear
from .nn.optimizer import StepWork


class Config(base.Config):
    """No options beyond those of every method."""


class Method(base.Method):
    Config = Config
    Linear = MaskedLinear

    def step_work(self, layer: SparseLinear, step: int) -> StepWork | None:
        assert isinstance(layer, MaskedLinear)
        return StepWork(layer=layer, rule=Rule(choose="rows"), mask=layer.mask)
