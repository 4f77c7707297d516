"""Learning rates, weight decay, growing batches and averages of the published recipes."""

import math

import numpy as np
import pytest
import torch

from experiments.config.settings import TrainConfig, fit_warmup, learning_rate, weight_decay
from experiments.training import averages


def train(**changes):
    return TrainConfig(**{"steps": 100, "batch_size": 8, "learning_rate": 1.0} | changes)


def test_a_growing_batch_by_hand_and_of_cramming():
    # Twelve micro-steps of 2, growing to 4: six alone, then pairs.
    small = train(steps=9, batch_size=4, ramp_batch=2, ramp_micro_steps=12)
    assert small.batch_sizes.tolist() == [2] * 6 + [4] * 3
    assert small.samples_before.tolist() == [0, 2, 4, 6, 8, 10, 12, 16, 20, 24]
    with pytest.raises(ValueError, match=r"takes 9 optimizer steps; set train\.steps to that"):
        train(steps=10, batch_size=4, ramp_batch=2, ramp_micro_steps=12)
    # FST's BERT: 300,000 micro-steps of 128 sequences, dense from micro-step 250,000 on.
    cramming = train(steps=38049, batch_size=4096, ramp_batch=128, ramp_micro_steps=300_000)
    sizes = cramming.batch_sizes
    assert (sizes[0], sizes[-1]) == (128, 4096)
    assert (np.diff(sizes) >= 0).all() and not (sizes % 128).any()
    assert np.searchsorted(cramming.samples_before, 250_000 * 128, side="right") - 1 == 36367


def test_a_warmup_fits_its_steps():
    for steps, warmup, cooldown, expected in [
        (20, 20, 0, 20),
        (19, 20, 0, 1),
        (5, 20, 0, 0),
        (100, 2000, 95, 5),
        (100, 2000, 200, 2000),  # refused later: it is the cooldown that does not fit
        ("many", 20, 0, 20),
    ]:
        given = {"steps": steps, "warmup_steps": warmup, "cooldown_steps": cooldown, "ema": 0.5}
        fitted, notes = fit_warmup(given)
        assert fitted == {**given, "warmup_steps": expected}
        assert len(notes) == (expected != warmup)


def test_rates_and_decay_by_hand():
    flat = train(schedule="triangle")
    assert [learning_rate(flat, s) for s in (0, 50, 75, 100)] == pytest.approx([0.25, 0.75, 1, 0])
    small = train(steps=9, batch_size=4, ramp_batch=2, ramp_micro_steps=12, schedule="triangle")
    assert learning_rate(small, 6) == pytest.approx(0.75)  # half of the samples, not of the steps
    cosine = [learning_rate(train(), s) for s in (0, 25, 50, 100)]
    assert cosine == pytest.approx([1, (2 + math.sqrt(2)) / 4, 0.5, 0])
    line = train(schedule="linear", warmup_steps=20, min_learning_rate=0.2)
    assert [learning_rate(line, s) for s in (0, 10, 20, 60, 100)] == pytest.approx(
        [0, 0.5, 1, 0.6, 0.2]
    )
    root = train(schedule="sqrt", warmup_steps=20)
    assert [learning_rate(root, s) for s in (10, 20, 75, 100)] == pytest.approx(
        [0.5, math.sqrt(0.8), 0.5, 0]
    )
    inverse = train(schedule="inverse_sqrt", warmup_steps=4)
    assert [learning_rate(inverse, s) for s in (0, 2, 4, 16, 100)] == pytest.approx(
        [0, 0.5, 1, 0.5, 0.2]
    )
    at_once = train(schedule="inverse_sqrt")
    assert [learning_rate(at_once, s) for s in (0, 1, 4)] == pytest.approx([1, 1, 0.5])
    high = train(warmup_steps=10, warmup_learning_rate=0.1)
    assert [learning_rate(high, s) for s in (0, 5, 10)] == pytest.approx([0.1, 0.55, 1])
    config = train(
        steps=40_000, learning_rate=2e-4, min_learning_rate=2e-5, warmup_steps=2000,
        cooldown_steps=2000,
    )  # fmt: skip
    wanted = {0: 0, 1000: 1e-4, 2000: 2e-4, 20_000: 1.1e-4, 38_000: 2e-5, 39_000: 1e-5, 40_000: 0}
    assert [learning_rate(config, s) for s in wanted] == pytest.approx(list(wanted.values()))
    assert learning_rate(train(steps=10, cooldown_steps=0), 10) == 0.0
    rising = train(weight_decay=0.04, weight_decay_end=0.4)
    assert [weight_decay(rising, s) for s in (0, 50, 100)] == pytest.approx([0.04, 0.22, 0.4])
    assert weight_decay(train(weight_decay=0.1), 77) == 0.1


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
