"""The loop in which tests train a method, and a linear to look at."""

import io
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


def dgrad_operand(layer):
    """The weight [out, in] that dX is computed with: dX for dY = I."""
    x = torch.zeros(layer.out_features, layer.in_features, requires_grad=True)
    (grad,) = torch.autograd.grad(layer(x), x, torch.eye(layer.out_features))
    return grad


@contextmanager
def training_step(method, step, optimizer):
    """One step of the optimizer; the body makes the gradients."""
    method.on_step_begin(step)
    yield
    method.on_gradients(step, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    method.on_step_end(step)


def through_a_file(value, weights_only=True):
    """Return what loads from a file to which `value` was saved."""
    torch.save(value, buffer := io.BytesIO())
    buffer.seek(0)
    return torch.load(buffer, weights_only=weights_only)


class Parts:
    """The base of a run that is saved and loaded; `parts` are model, method and optimizer."""

    @property
    def parts(self):
        return self.model, self.method, self.optimizer

    def state(self):
        return through_a_file([part.state_dict() for part in self.parts])

    def load(self, state):
        for part, saved in zip(self.parts, state, strict=True):
            part.load_state_dict(saved)
