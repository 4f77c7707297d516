"""The loop in which tests train a method, and a linear to look at."""

from contextlib import contextmanager

import torch
from torch import nn

import methods


def convert(name, model, **options):
    """The model, converted in place, all its linears by default, and its method."""
    method = methods.build(name, **{"include": ["*"], **options})
    method.convert(model)
    return model, method


def linear_of(row, rows=4):
    """A linear without a bias, all of whose rows are `row`."""
    layer = nn.Linear(len(row), rows, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.as_tensor(row).expand(rows, len(row)))
    return layer


@contextmanager
def training_step(method, step, optimizer):
    """One step of the optimizer; the body makes the gradients."""
    method.on_step_begin(step)
    yield
    method.on_gradients(step, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    method.on_step_end(step)
