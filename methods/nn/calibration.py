"""Statistics of the inputs of linear layers over a calibration set.

Wanda (arXiv 2306.11695, section 3) scores a weight by |W_ij| * |X_j|, where |X_j| is the norm of
its input feature over the calibration tokens. SparseGPT (arXiv 2301.00774, section 3) needs X^T X.
Both are sums over tokens, so only these sums are kept from batch to batch.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from . import ranks
from .conversion import weight_of


@dataclass
class Statistics:
    """Sums over the `count` tokens that a layer has seen, in fp32.

    square_sum: [in], sum over tokens of x_j^2. hessian: [in, in], sum of x x^T, or None.
    """

    count: int
    square_sum: Tensor
    hessian: Tensor | None = None

    @torch.no_grad()
    def add(self, x: Tensor) -> None:
        """Add the tokens of `x` [..., in], in any floating dtype."""
        x = x.detach().reshape(-1, x.shape[-1]).float()
        self.count += x.shape[0]
        self.square_sum += x.square().sum(0)
        if self.hessian is not None:
            with torch.autocast(x.device.type, enabled=False):
                self.hessian.addmm_(x.t(), x)


@torch.no_grad()
def collect(
    model: nn.Module,
    layers: Mapping[str, nn.Linear],
    batches: Iterable[Mapping[str, Any]],
    *,
    hessian: bool = False,
) -> dict[str, Statistics]:
    """Run `model` on `batches` and return statistics of the inputs of `layers`, by layer name.

    The model runs in eval mode without gradients and is left as it was. In a process group every
    rank must call this; all get the statistics of rank 0. Raises ValueError if a layer saw no
    token, or inputs that are not finite.

    Args:
        layers: modules of `model`; a layer that runs twice in a forward pass counts twice.
        batches: keyword arguments of the model, on its device.
        hessian: also sum x x^T, which takes 4 in^2 bytes per layer.
    """
    statistics: dict[str, Statistics] = {}

    def see(name: str, module: Any, args: Any, kwargs: Any) -> None:
        statistics[name].add(args[0] if args else kwargs["input"])

    with ExitStack() as hooks, evaluating(model):
        for name, layer in layers.items():
            inputs = weight_of(layer).shape[1]
            zeros = torch.zeros(inputs, device=layer.weight.device)
            square = zeros.new_zeros(inputs, inputs) if hessian else None
            statistics[name] = Statistics(0, zeros, square)
            hook = layer.register_forward_pre_hook(partial(see, name), with_kwargs=True)
            hooks.enter_context(hook)
        for batch in batches:
            model(**batch)
    for name, found in statistics.items():
        for sums in (found.square_sum, found.hessian):  # together they would be copied
            ranks.take_from_rank_0([] if sums is None else [sums])
        if not found.count:
            raise ValueError(f"no calibration token reached {name}; give batches, or exclude it")
        if not found.square_sum.isfinite().all():
            raise ValueError(f"the calibration inputs of {name} are not finite; check the model")
    return statistics


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A context with the model in eval mode; every module gets its training flag back."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
