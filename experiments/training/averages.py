"""The averaged copy of a training's weights, which follows one of two rules."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from experiments.config.settings import TrainConfig
from methods import refresh


def trained(model: nn.Module) -> dict[str, Tensor]:
    """The trained parameters of a model by name, detached."""
    return {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}


@contextmanager
def applied(model: nn.Module, averages: dict[str, Tensor]) -> Iterator[None]:
    """A context in which `model` has the averaged weights, and masks and operands of them."""
    own = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        parameters = dict(model.named_parameters())
        for name, average in averages.items():
            parameters[name].copy_(average)
    refresh(model)
    try:
        yield
    finally:
        model.load_state_dict(own)


def update(
    averages: dict[str, Tensor], own: dict[str, Tensor], train: TrainConfig, step: int
) -> None:
    """Add the weights `own`, as they are after step `step`, to the averages in place: with `ema` by
    a fixed share, with `average_last` so that the final average is the mean of that many states,
    `average_every` steps apart and ending with the last."""
    share = 1 - train.ema
    if train.average_last:
        last, every = train.steps - 1, train.average_every
        count = min(train.average_last, last // every + 1)
        later, between = divmod(last - step, every)
        if between or later >= count:
            return
        share = 1 / (count - later)
    torch._foreach_lerp_(list(averages.values()), [own[name] for name in averages], share)
