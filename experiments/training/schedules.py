"""The learning rate and the weight decay of each optimizer step.

Steps count from 0. p is the fraction of the run's samples seen before a step; if the batch size is
constant, it is the fraction of the steps.
"""

from __future__ import annotations

import math

from experiments.config.settings import TrainConfig


def learning_rate(config: TrainConfig, step: int) -> float:
    """The learning rate of one step, by `train.schedule`.

    cosine: linear warm-up, then half a cosine from the peak to the minimum (nanoGPT).
    linear: linear warm-up, then a line from the peak to the minimum.
    sqrt: linear warm-up, then peak * sqrt(1 - p) (BERT of NVIDIA, SLoPe's recipe).
    inverse_sqrt: linear warm-up, then peak * sqrt(warm-up / step) (Vaswani et al., 2017).
    triangle: peak * min(1/4 + p, 4 - 4 p), without warm-up (Cramming, arXiv 2212.14034): up to the
        peak at three quarters of the run, then down to 0.
    """
    if config.schedule == "triangle":
        seen = config.samples_before[min(step, config.steps)] / config.samples_before[-1]
        return config.learning_rate * min(0.25 + seen, 4.0 - 4.0 * seen)
    if step < config.warmup_steps:
        low = config.warmup_learning_rate
        return low + (config.learning_rate - low) * step / config.warmup_steps
    if config.schedule == "sqrt":
        return config.learning_rate * math.sqrt(max(0.0, 1.0 - step / config.steps))
    if config.schedule == "inverse_sqrt":
        warmup = max(1, config.warmup_steps)
        return config.learning_rate * math.sqrt(warmup / max(step, warmup))
    floor_at = config.steps - config.cooldown_steps
    if config.cooldown_steps and step >= floor_at:
        left = max(0, config.steps - step)
        return config.min_learning_rate * left / config.cooldown_steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, floor_at - config.warmup_steps))
    cosine = config.schedule == "cosine"
    share = 0.5 * (1.0 + math.cos(math.pi * progress)) if cosine else 1.0 - progress
    return config.min_learning_rate + share * (config.learning_rate - config.min_learning_rate)


def weight_decay(config: TrainConfig, step: int) -> float:
    """The weight decay in one step: constant, or a cosine from its first to its last value as in
    DINO (arXiv 2104.14294).
    """
    if config.weight_decay_end is None:
        return config.weight_decay
    share = 0.5 * (1.0 + math.cos(math.pi * min(1.0, step / config.steps)))
    return config.weight_decay_end + share * (config.weight_decay - config.weight_decay_end)
