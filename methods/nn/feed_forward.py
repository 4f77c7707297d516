"""Feed-forward networks of two linears with a squared ReLU, as a module, between them."""

import copy

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from . import conversion


def unchanged(x: Tensor) -> Tensor:
    """x: the forward pass of a part of a network whose work the second linear does."""
    return x


def networks(model: nn.Module) -> dict[str, tuple[str, str, nn.Module, str]]:
    """The names of both linears, the module and its child that is the activation, of each network
    by name."""
    found = {}
    for name, module in model.named_modules():
        children = dict(module.named_children())
        linears = [n for n, child in children.items() if conversion.is_linear(child)]
        between = [n for n, child in children.items() if is_squared_relu(child)]
        if len(linears) == 2 and len(between) == 1 and is_network(module, linears, between[0]):
            up, down = (f"{name}.{n}".removeprefix(".") for n in linears)
            found[name] = up, down, module, between[0]
    return found


@torch.no_grad()
def is_network(module: nn.Module, linears: list[str], activation: str) -> bool:
    """True if a module computes the same in training if its first linear and its activation pass
    their input on and the second linear does all: tried on a copy, as what is between them, or
    reads the hidden state, cannot be known."""
    up, down = (conversion.weight_of(getattr(module, name)) for name in linears)
    if up.shape[0] != down.shape[1]:
        return False
    if up.is_meta or isinstance(up, FakeTensor):
        return True
    trial = copy.deepcopy(module).float().train()
    parts = [getattr(trial, name) for name in (linears[0], activation, linears[1])]
    first, between, second = (part.forward for part in parts)
    devices, found = [up.device] if up.is_cuda else [], []
    try:
        for whole in (None, lambda x: second(between(first(x)))):
            if whole:
                for part, forward in zip(parts, (unchanged, unchanged, whole), strict=True):
                    vars(part)["forward"] = forward
            # From the same state, also for dropout after the network, and back to it.
            with torch.random.fork_rng(devices=devices):
                y = trial(torch.randn(1, 4, up.shape[1], dtype=torch.float32, device=up.device))
            found.append(y if isinstance(y, Tensor) else y[0])
    except Exception:  # of a module that takes other arguments, or hidden states of one size
        return False
    before, after = found
    same = before.shape == after.shape
    return same and bool((after - before).abs().max() <= 1e-4 * before.abs().max())


@torch.no_grad()
def is_squared_relu(module: nn.Module) -> bool:
    """True if a module without state squares what is positive and makes the rest zero."""
    if any(True for _ in module.parameters()):
        return False
    # In a plan of memory all tensors are fake. Dropout would take random numbers.
    with unset_fake_temporarily(), torch.random.fork_rng(devices=()):
        probe, squares = torch.tensor([-2.0, 0.0, 0.5, 3.0]), torch.tensor([0.0, 0.0, 0.25, 9.0])
        try:
            return torch.equal(module(probe), squares)
        except Exception:  # of a module that takes other arguments
            return False
