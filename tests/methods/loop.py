"""The loop in which tests train a method."""

from contextlib import contextmanager


@contextmanager
def training_step(method, step, optimizer):
    """One step of the optimizer; the body makes the gradients."""
    method.on_step_begin(step)
    yield
    method.on_gradients(step, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    method.on_step_end(step)
