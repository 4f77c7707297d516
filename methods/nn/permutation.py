"""A permutation of input channels with which an N:M mask keeps more of a weight's magnitude.

Pool and Yu, "Channel Permutations for N:M Sparsity" (NeurIPS 2021); the search is that of apex
(contrib/sparsity/permutation_search_kernels/channel_swap.py, without its random escapes): the swap
of two columns that gains most, then the next one in groups not yet touched, and again until no swap
gains. In a feed-forward network the first linear, or both if it is gated, absorbs the permutation
of the second one's inputs into its outputs, so that the network computes the same.
"""

import copy
import math
from collections.abc import Iterator, Mapping
from itertools import combinations

import torch
from torch import Tensor, nn

from . import ranks
from .columns import split
from .config import Config
from .conversion import is_linear, owners_of_parameters, unfit, weight_of

ENOUGH = 1e-3  # the least gain of a swap, as a fraction of what a group keeps


@torch.no_grad()
def permute(model: nn.Module, chosen: Mapping[str, nn.Module], config: Config) -> None:
    """Permute the hidden channels of each feed-forward network of `model` whose second linear is
    `chosen`, for its pattern, dense columns last; in a process group as on rank 0. Raises
    ValueError if there is no such network."""
    found = False
    for name, ups, down in networks(model):
        if name in chosen:
            found = True
            if not down.weight.is_meta:
                weight, (n, m) = weight_of(down), config.pattern(name)
                share = getattr(config, "dense_columns", 0.0)
                grouped, dense = split(weight, share, m)
                best = search(weight[:, grouped], n, m)
                order = torch.cat([grouped[best], dense])
                ranks.take_from_rank_0([order])
                _apply(ups, down, order)
    if not found:
        raise ValueError(
            "permute=True, but no converted linear is the second one of a feed-forward network "
            "that can absorb a permutation of its inputs; set permute=False"
        )


def networks(model: nn.Module) -> Iterator[tuple[str, list[nn.Module], nn.Module]]:
    """The name of the second linear, the first linears (two if gated) and the second one of each
    network: a module with such linears of its own that computes the same after a permutation."""
    owners = owners_of_parameters(model)
    for name, module in model.named_modules():
        linears = {n: child for n, child in module.named_children() if is_linear(child)}
        if not 2 <= len(linears) <= 3:
            continue
        names = [f"{name}.{n}".lstrip(".") for n in linears]
        if any(unfit(n, child, owners) for n, child in zip(names, linears.values(), strict=True)):
            continue
        for i in reversed(range(len(names))):
            if _absorbs(module, [*linears], i):
                children = [*linears.values()]
                down = children.pop(i)
                yield names[i], children, down
                break


@torch.no_grad()
def _absorbs(module: nn.Module, names: list[str], index: int) -> bool:
    """True if the linears of these names but one, of this index, absorb a permutation of its
    inputs: tried on a copy, because what lies between the linears cannot be known."""
    children = [getattr(module, name) for name in names]
    hidden = weight_of(children.pop(index)).shape[1]
    rows = [len(weight_of(up)) for up in children]
    if rows not in ([hidden], [hidden, hidden], [2 * hidden]):
        return False
    if children[0].weight.is_meta:
        return True
    trial = copy.deepcopy(module).float().eval()
    ups = [getattr(trial, name) for name in names]
    down = ups.pop(index)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 4, weight_of(ups[0]).shape[1], generator=generator).to(down.weight.device)
    order = torch.randperm(hidden, generator=generator).to(x.device)
    try:
        before = trial(x)
        _apply(ups, down, order)
        after = trial(x)
    except Exception:  # of a module that takes other arguments
        return False
    if not isinstance(before, Tensor):
        before, after = before[0], after[0]
    return bool((after - before).abs().max() <= 1e-4 * before.abs().max())


def _apply(ups: list[nn.Module], down: nn.Module, order: Tensor) -> None:
    weight_of(down).copy_(weight_of(down)[:, order])
    for up in ups:
        rows = len(weight_of(up))  # twice as many with value and gate in one linear
        own = order if rows == len(order) else torch.cat([order, order + len(order)])
        weight_of(up).copy_(weight_of(up)[own])
        if isinstance(up.bias, Tensor):
            up.bias.copy_(up.bias[own])


def search(weight: Tensor, n: int, m: int) -> Tensor:
    """The order of the columns of a weight [out, in], int64 [in], with which an n:m mask keeps
    more; `in` is a multiple of m."""
    magnitude = weight.detach().float().abs()
    order = torch.arange(weight.shape[1], device=weight.device)
    distances = magnitude.new_empty(len(order), len(order))
    changed = torch.ones_like(order, dtype=torch.bool)
    while True:
        gain, kept = gains(magnitude[:, order], n, m, distances, changed)
        changed, groups = torch.zeros_like(changed), len(kept)
        # The best swap of each pair of groups, and its gain.
        pairs = gain.view(groups, m, groups, m).transpose(1, 2).flatten(2)
        best, swap = pairs.max(2)
        mine = torch.arange(groups, device=best.device)
        while True:
            value, partner = best.max(1)
            # These pairs come before all others of their groups.
            taken = (value > ENOUGH * kept.mean()) & (partner[partner] == mine) & (mine < partner)
            one = mine[taken]
            if not len(one):
                break
            other = partner[one]
            position = swap[one, other]
            a, b = one * m + position // m, other * m + position % m
            order[a], order[b] = order[b], order[a]
            used = torch.cat([one, other])
            changed.view(groups, m)[used] = True
            best[used], best[:, used] = -math.inf, -math.inf
        if not changed.any():
            return order


def gains(
    magnitude: Tensor, n: int, m: int, distances: Tensor, changed: Tensor
) -> tuple[Tensor, Tensor]:
    """The magnitude that an n:m mask keeps more if columns a and b are swapped, [in, in], -inf
    within a group; and what each group keeps.

    Args:
        magnitude: [out, in].
        distances: [in, in], what takes most of the time, kept from call to call: the sums of
            |x - y| over the rows, where x is the n-th largest of a group without one column.
        changed: bool [in], the columns of groups that differ from the last call's; only their
            distances are computed.
    """
    groups = magnitude.unflatten(1, (-1, m))
    kept = groups.topk(n, dim=2).values.sum((0, 2))
    # A group whose column k gives way to b keeps in each row the n - 1 largest of the others, and
    # the larger of b and the n-th; and max(x, y) = (x + y + |x - y|) / 2.
    others = torch.tensor([*combinations(range(m), m - 1)][::-1], device=magnitude.device)
    top = groups[:, :, others].topk(n, dim=3).values
    first, nth = top[..., :-1].sum((0, 3)).flatten(), top[..., -1].flatten(1)
    new, old = changed.nonzero().flatten(), (~changed).nonzero()
    distances[new] = torch.cdist(nth.t()[new], magnitude.t(), p=1)
    distances[old, new] = torch.cdist(nth.t()[old.flatten()], magnitude.t()[new], p=1)
    larger = nth.sum(0)[:, None] + magnitude.sum(0) + distances
    replaced = first[:, None] + larger / 2
    before = kept.repeat_interleave(m)
    gain = replaced + replaced.t() - before[:, None] - before
    group = torch.arange(len(before), device=gain.device) // m
    return gain.masked_fill_(group[:, None] == group, -math.inf), kept
