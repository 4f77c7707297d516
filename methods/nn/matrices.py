"""Matrices that a module multiplies itself, converted like the weight of a linear.

Mixtures of experts of transformers hold all weights of a kind as one Parameter [experts, out, in],
and `nn.MultiheadAttention` its projections as `in_proj_weight` [3 out, in] and the weight of
`out_proj`, whose forward pass it never calls. While such a matrix is converted, a sparse linear
`sparse_NAME` in the module holds the Parameter, as [rows, in], and the module finds the weight in
use under the old name. Methods can convert it if they do nothing but change the weight.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

PROJECTIONS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")


def multiplies(module: Any, attribute: str) -> bool:
    """True if `module` multiplies its Parameter `attribute` itself, along the last dim."""
    if isinstance(module, nn.MultiheadAttention):
        return attribute in PROJECTIONS
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return attribute == "weight"
    # transformers marks its experts so (integrations/moe.py).
    weight = module._parameters.get(attribute)
    return weight is not None and weight.ndim == 3 and getattr(module, "is_transposed", 0) is False


def linear_of(module: nn.Module, attribute: str) -> nn.Linear:
    """A linear without numbers that can take the matrix's place; `out` is that of one expert."""
    shape = module._parameters[attribute].shape  # type: ignore[union-attr]
    linear = nn.Linear(shape[-1], shape[-2], bias=False, device="meta")
    vars(linear)["place"] = module, attribute, shape
    return linear


def is_placed(layer: nn.Module) -> bool:
    """True for a layer that `linear_of` made."""
    return "place" in vars(layer)


def plain_key(layer: Any, name: str, key: str) -> str:
    """The key in a plain model's state dict of what is `key` in the layer of this name."""
    if not is_placed(layer):
        return f"{name}.{key}"
    attribute = layer.place[1]
    return f"{name.removesuffix(f'sparse_{attribute}')}{attribute}"


@torch.no_grad()
def attach(layer: Any) -> None:
    """Let `layer` hold the matrix of its place as [rows, in]."""
    module, attribute, shape = layer.place
    layer.weight = changed(module._parameters[attribute], lambda x: x.reshape(-1, shape[-1]))
    layer.out_features = len(layer.weight)
    layer.train(module.training)
    module._parameters[attribute] = None  # keeps its position among the parameters
    module.add_module(f"sparse_{attribute}", layer)
    kind: Any = type(module)
    plain, names = getattr(kind, "_plain", (kind, ()))
    module.__class__ = _showing(plain, (*names, attribute))


@torch.no_grad()
def detach(layer: Any) -> None:
    """Undo `attach`."""
    module, attribute, shape = vars(layer).pop("place")
    plain, names = type(module)._plain
    module.__class__ = _showing(plain, tuple(name for name in names if name != attribute))
    del module._modules[f"sparse_{attribute}"]
    module._parameters[attribute] = changed(layer.weight, lambda x: x.reshape(shape))


def changed(weight: Any, change: Callable[[Tensor], Tensor]) -> nn.Parameter:
    """`weight`, the same Parameter, in another shape, and its gradient."""
    weight.data = change(weight.data)
    if weight.grad is not None:
        weight.grad = change(weight.grad)
    return weight


@cache
def _showing(plain: Any, names: tuple[str, ...]) -> Any:
    """The class `plain`, but the attributes `names` are the weights in use."""
    if not names:
        return plain

    def shown(name: str) -> property:
        def weight(self: Any) -> Tensor:
            layer = self._modules[f"sparse_{name}"]
            layer.check_in_forward()
            return layer.in_place(layer.weight.dtype).view(layer.place[2])

        return property(weight)

    def reduce(self: Any) -> tuple[Any, ...]:
        return _empty, (plain, names), self.__getstate__()

    own = {"__module__": plain.__module__, "__doc__": plain.__doc__, "_plain": (plain, names)}
    own["__reduce__"] = reduce  # pickle would look for the class under the name of `plain`
    return type(plain.__name__, (plain,), own | {name: shown(name) for name in names})


def _empty(plain: Any, names: tuple[str, ...]) -> Any:
    """A module of the class `_showing(plain, names)` for pickle to fill."""
    kind = _showing(plain, names)
    return kind.__new__(kind)
