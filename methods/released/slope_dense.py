"""SLoPe whose dense parameters never train: embeddings, norms, biases and dense linears.

The training loop of the released package (github.com/Mohammad-Mozaffari/slope, train.py, without
transformers' Trainer) calls `optimizer.zero_grad()` between the backward pass and
`optimizer.step()`. This optimizer, which holds all parameters that are not compressed, therefore
finds no gradients and does nothing, not even weight decay. The compressed weights have another one.

Everything sparse is as in `methods.slope`.
"""

from .. import slope
from ..nn.config import Capabilities
from ..nn.optimizer import Optimizers, each

Config = slope.Config


class Method(slope.Method):
    abilities = Capabilities(acts_on_gradients=True)

    def on_gradients(self, step: int, optimizer: Optimizers = None) -> None:
        super().on_gradients(step, optimizer)
        sparse = {id(layer.values) for layer in self.layers.values()}
        for group in (group for own in each(optimizer) for group in own.param_groups):
            for parameter in group["params"]:
                if id(parameter) not in sparse:
                    parameter.grad = None
