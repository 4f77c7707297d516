"""Masks learnt with the model's loss on a calibration set, for weights that stay as they are.

ProxSparse (arXiv 2502.00258; end-to-end/prox_op.py of amazon-science/ProxSparse) trains copies of
the weights W and takes a proximal step after each step of AdamW, for the penalty

    lambda * sum over groups of four of |w1 w2 w3| + |w2 w3 w4| + |w3 w4 w1| + |w4 w1 w2|,

which is zero where two weights of the four are. The mask keeps the two largest of each four.

MaskLLM (arXiv 2409.17481; learnable_sparsity/differentiable_mask.py and pretrain_maskllm.py of
NVlabs/MaskLLM) learns for each group a logit pi of each of its N:M patterns and trains with

    M = sum of softmax((kappa pi + g) / tau) * pattern,    g Gumbel noise,

on the loss minus mu |W * M|^2. kappa rises from 100 to 500 over the training, while tau falls from
4 to 0.05 and mu from 1e-5 to 0. pi starts from normal numbers of deviation 0.01, plus three times
that times what a pattern has in common with a prior mask, less the mean over the patterns. The mask
is the pattern with the largest logit.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from common_kernels import nm_mask

# The loss of a batch, given the weights [out, in] in use by layer.
Loss = Callable[[Mapping[str, Tensor], Any], Tensor]

# Both ends of MaskLLM's linear schedules, and its other constants.
SCALE, TEMPERATURE = (100.0, 500.0), (4.0, 0.05)
DEVIATION, PRIOR_STRENGTH, REGULARIZATION = 0.01, 3.0, 1e-5
CLIP = 1.0  # both clip the norm of the gradient


def prox24(weight: Tensor, penalty: float) -> Tensor:
    """argmin over X of |X - weight|^2 / 2 + penalty * ProxSparse's sum; [out, in], `in` in fours.
    In order of magnitude a solution has the two, three or four largest entries, and signs stay. The
    two are kept as they are; three and four are found by coordinate descent from zero, smallest
    entry first (EnumALM, Algorithm 3 of the paper). The least of the three objectives decides."""
    groups = weight.reshape(-1, 4)
    sizes, order = groups.abs().sort(dim=1, descending=True, stable=True)
    z = sizes.t().contiguous()  # [4, groups]
    best = torch.cat([z[:2], torch.zeros_like(z[2:])])
    least = _objective(best, z, penalty)
    for count in (3, 4):
        x = _descend(torch.cat([z[:count], torch.zeros_like(z[count:])]), penalty)
        value = _objective(x, z, penalty)
        best = torch.where(value < least, x, best)
        least = torch.minimum(value, least)
    found = torch.empty_like(groups).scatter_(1, order, best.t().contiguous())
    return found.copysign(groups).view_as(weight)


def _objective(x: Tensor, z: Tensor, penalty: float) -> Tensor:
    a, b, c, d = x
    return (x - z).square().sum(0) / 2 + penalty * (a * b * (c + d) + c * d * (a + b))


def _descend(z: Tensor, penalty: float, rounds: int = 100) -> Tensor:
    """The limit of minimising over one row of [4, groups] after the other."""
    x = torch.zeros_like(z)
    enough = 4 * torch.finfo(z.dtype).eps * z.amax()
    for _ in range(rounds):
        before = x.clone()
        for i in (3, 2, 1, 0):
            a, b, c = (x[j] for j in range(4) if j != i)
            x[i] = (z[i] - penalty * (a * b + b * c + c * a)).clamp_min(0)
        if (x - before).abs().amax() <= enough:
            break
    return x


def proxsparse(
    weights: Mapping[str, Tensor],
    loss: Loss,
    batches: Sequence[Any],
    steps: int,
    learning_rate: float,
    penalty: float,
) -> dict[str, Tensor]:
    """ProxSparse's 2:4 masks (bool [out, in]) for weights [out, in] by layer.

    The rate rises over the first tenth of the steps and falls linearly to zero.
    """
    latent = {n: w.detach().float().clone().requires_grad_() for n, w in weights.items()}
    optimizer = torch.optim.AdamW(latent.values(), weight_decay=0.0)
    warmup = math.ceil(0.1 * steps)
    for step in range(steps):
        rate = min((step + 1) / warmup, (steps - step) / max(1, steps - warmup))
        _advance(optimizer, loss(latent, batches[step % len(batches)]), rate * learning_rate)
        with torch.no_grad():
            for weight in latent.values():
                weight.copy_(prox24(weight, penalty))
    return {name: nm_mask(weight.detach()) for name, weight in latent.items()}


def maskllm(
    weights: Mapping[str, Tensor],
    priors: Mapping[str, Tensor],
    loss: Loss,
    batches: Sequence[Any],
    steps: int,
    learning_rate: float,
    n: int,
    m: int,
    seed: int,
) -> dict[str, Tensor]:
    """MaskLLM's N:M masks (bool [out, in]) for weights [out, in] by layer, from prior masks.

    The rate falls along a cosine to a tenth.
    """
    logits, device = {}, next(iter(weights.values())).device
    generator = torch.Generator(device).manual_seed(seed)
    table = patterns(n, m, device)
    for name, prior in priors.items():
        common = prior.reshape(-1, m).float() @ table.t() - n * n / m
        start = torch.randn(common.shape, generator=generator, device=device)
        logits[name] = (DEVIATION * (start + PRIOR_STRENGTH * common)).requires_grad_()
    optimizer = torch.optim.AdamW(logits.values(), betas=(0.9, 0.95), eps=1e-5, weight_decay=0.1)
    for step in range(steps):
        done, used = step / steps, {}
        for name, weight in weights.items():
            mask = soft_mask(logits[name], table, done, generator)
            used[name] = weight.detach().float() * mask.view_as(weight)
        kept = torch.stack([weight.square().sum() for weight in used.values()]).sum()
        value = loss(used, batches[step % len(batches)])
        rate = 0.55 + 0.45 * math.cos(math.pi * done)
        regular = REGULARIZATION * (1 - done) * kept
        _advance(optimizer, value - regular, rate * learning_rate)
    return {n: table[v.argmax(1)].bool().view_as(weights[n]) for n, v in logits.items()}


def patterns(n: int, m: int, device: torch.device | str = "cpu") -> Tensor:
    """The N:M patterns of a group as rows of zeros and ones, [patterns, m]."""
    chosen = torch.tensor([*combinations(range(m), n)], device=device)
    return torch.zeros(len(chosen), m, device=device).scatter_(1, chosen, 1.0)


def soft_mask(logits: Tensor, table: Tensor, done: float, generator: torch.Generator) -> Tensor:
    """MaskLLM's sample of a mask, [groups, m], from logits [groups, patterns]. done: 0 to 1."""
    scale, temperature = (a + done * (b - a) for a, b in (SCALE, TEMPERATURE))
    exponential = torch.empty_like(logits).exponential_(generator=generator)
    gumbel = -exponential.log()
    return ((scale * logits + gumbel) / temperature).softmax(1) @ table


def _advance(optimizer: torch.optim.Optimizer, loss: Tensor, rate: float) -> None:
    """A step of this rate on the optimizer's tensors; no other tensor gets a gradient."""
    (group,) = optimizer.param_groups
    group["lr"] = rate
    tensors = group["params"]
    optimizer.zero_grad()
    loss.backward(inputs=tensors)
    nn.utils.clip_grad_norm_(tensors, CLIP)
    optimizer.step()
