"""The mean of the last states of the weights."""

import torch

from experiments.config.settings import TrainConfig
from experiments.training import averages


def train(**changes):
    return TrainConfig(**{"steps": 10, "batch_size": 1, "learning_rate": 1.0} | changes)


def test_the_copy_is_the_mean_of_the_last_states():
    for last, every, steps, of in [
        (1, 1, 10, [9]),
        (3, 2, 10, [5, 7, 9]),
        (4, 3, 10, [0, 3, 6, 9]),
        (5, 100, 10, [9]),
        (8, 1, 3, [0, 1, 2]),
    ]:
        config = train(average_last=last, average_every=every, steps=steps)
        generator = torch.Generator().manual_seed(0)
        states = [torch.randn(5, generator=generator) for _ in range(steps)]
        kept = {"weight": torch.full((5,), 7.0)}
        for step, state in enumerate(states):
            averages.update(kept, {"weight": state}, config, step)
        expected = torch.stack([states[step] for step in of]).double().mean(0)
        torch.testing.assert_close(kept["weight"].double(), expected, atol=1e-6, rtol=0)
        if len(of) == 1:
            assert torch.equal(kept["weight"], states[of[0]])
