"""Projected training: steps from latent weights, and the frozen end."""

import torch

import methods
from tests.methods.loop import convert, linear_of, training_step


def one_row(values, **options):
    return convert("projected", linear_of(values), **options)


def step(layer, method, number, grad, **options):
    """A step of SGD with rate 1 and this gradient of a row."""
    optimizer = torch.optim.SGD([layer.weight], lr=1.0)
    with training_step(method, number, optimizer):
        layer.weight.grad = torch.tensor(grad).expand(4, 4).clone()


def test_steps_by_hand():
    """Entry 3 needs two steps to pass entry 1; from zero it would need a third."""
    layer, method = one_row([4.0, -3.0, 1.0, 2.0], healing_fraction=0.0)
    grads = torch.tensor([0.0, 0.0, 0.0, -1.0])
    rows = []
    for number in range(3):
        step(layer, method, number, grads.tolist())
        rows.append(layer.effective_weight()[0].tolist())
    stays, changes = [4.0, -3.0, 0.0, 0.0], lambda last: [4.0, 0.0, 0.0, last]
    # Latent 3 ties with -3, and the lower index wins; latent 4 and 5 are larger.
    assert rows == [stays, changes(4.0), changes(5.0)]
    assert torch.equal(layer.weight[0], torch.tensor([4.0, -3.0, 1.0, 5.0]))


def test_the_mask_is_frozen_and_latent_weights_are_gone_in_the_healing():
    layer, method = one_row([4.0, -3.0, 1.0, 2.0], total_steps=4, healing_fraction=0.5)
    for number in range(2):
        step(layer, method, number, [0.0, 0.0, 0.0, -0.25])
    assert layer.weight[0].tolist() == [4.0, -3.0, 1.0, 2.5] and method.unfinished
    for number in range(2, 4):  # entries that would win if the mask could change
        step(layer, method, number, [1.0, -1.0, -9.0, -9.0])
        assert method.phase() == "healing" and not method.unfinished
    assert layer.weight[0].tolist() == [2.0, -1.0, 0.0, 0.0]
    methods.refresh(layer)
    assert layer.mask[0].tolist() == [True, True, False, False]
