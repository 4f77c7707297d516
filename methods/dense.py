"""Dense training: the baseline of every table.

    GEMM   operand 1   operand 2   sparse
    fprop  X           W           none
    dgrad  dY          W           none
    wgrad  dY          X           none; flows to W

The model is not changed. On the linears that a sparse method with the same globs would convert, the
*virtual* flip rate is measured, of the 2:4 masks that the weights would have (FST, 4.1).
"""

from .nn import base


class Config(base.Config):
    """`include` and `exclude` choose the linears that are measured."""


class Method(base.Method):
    Config = Config
    abilities = base.Capabilities(ends_dense=True)

    def phase(self) -> str:
        return "dense"
