"""Bi-Mask: one row-wise 2:4 mask for fprop, another along `out` for dgrad.

    GEMM   operand 1   operand 2       sparse operand, along
    fprop  X           W * M           weight, 2:4 along `in`
    dgrad  dY          W * M * B       weight, 2:4 along `out` in the order of the permutation
    wgrad  dY          X               none; flows to W, plus alpha * W * (1 - M)

Bi-Mask (arXiv 2302.06058). M keeps the two largest magnitudes of four consecutive inputs and is
chosen in every step. B keeps the two largest of four outputs that are neighbours after a
permutation of the rows of W * M. With a better permutation dX loses less: every `permute_every`
optimizer steps `candidates` random permutations are tried, and the one with the most weights in
both masks is taken. Hardware would run the product with permuted rows; dX does not depend on their
order. The decay is that of SR-STE (arXiv 2102.04010). The model ends 2:4 sparse, as W * M.

The paper says that the permutation with the most blocks that are already N:M is chosen; the
authors' code counts the remaining weights, and so does this. Other differences from that code:
there the decay is part of the layer's backward pass, so it is divided by the loss scale, clipped,
and added once per micro-batch; here it is added once per step, as in `methods.sr_ste`. There "every
100 iterations" means forward passes, that is micro-batches; here optimizer steps. There
permutations come from numpy's global generator, so that ranks differ, and convolutions never count
their iterations and so search in every forward pass.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from common_kernels import nm_mask, philox4x32

from . import sr_ste
from .nn import base, sharding
from .nn.linear import MaskedLinear
from .nn.operands import Dense
from .nn.ranks import layer_seed

MOST = 10_000  # permutations, which are all held at once; the authors use 100


@dataclass(frozen=True, kw_only=True)
class Config(sr_ste.Decay):
    """Options of Bi-Mask besides the decay (2e-4 on the gradients); the defaults are the authors'.

    permute_every: optimizer steps between two searches. candidates: permutations per search.
    """

    permute_every: int = base.number(100, 1)
    candidates: int = base.number(100, 1, MOST)


class Linear(MaskedLinear):
    """A masked linear with a second, permuted mask for dgrad.

    State besides `MaskedLinear`'s: `permutation` (int64 [out], saved), the order of rows in which
    dgrad's weight is 2:4, and `operand_dgrad` [out, in], that weight, derived and not saved.
    """

    config: Config
    permutation: Tensor
    operand_dgrad: Tensor
    rounds_first = False  # dgrad's mask is chosen with the operand

    def setup(self, name: str, config: Any, dtype: torch.dtype | None) -> None:
        super().setup(name, config, dtype)
        rows = torch.arange(self.out_features, device=self.weight.device)
        self.register_buffer("permutation", rows)
        own = torch.empty_like(self.sparse_weight)
        self.register_buffer("operand_dgrad", own, persistent=False)

    def search_permutation(self, seed: int) -> None:
        """Take the best of the random permutations drawn from `seed`."""
        mask = nm_mask(self.weight.detach())
        shape = (self.config.candidates, self.out_features)
        numbers = torch.arange(shape[0] * shape[1], device=mask.device)
        candidates = philox4x32(seed, numbers)[0].view(shape).argsort(dim=1, stable=True)
        left = torch.stack([weights_in_both_masks(mask, rows) for rows in candidates])
        self.permutation.copy_(candidates[left.argmax()])

    def derive(self, amax: Tensor | None = None) -> None:
        super().derive(amax)
        permuted = self.effective_weight()[self.permutation]
        kept = torch.where(nm_mask(permuted, dim=0), permuted, 0.0)
        self.operand_dgrad.index_copy_(0, self.permutation, kept.to(self.operand_dgrad.dtype))

    def operands(self, dtype: torch.dtype) -> tuple[Any, Any]:
        return super().operands(dtype)[0], Dense(self.operand_dgrad.to(dtype))


def weights_in_both_masks(mask: Tensor, permutation: Tensor) -> Tensor:
    """The number of weights of `mask` [out, in] that a 2:4 mask along the permuted rows can keep:
    at most two of each group of four."""
    groups = mask.view(torch.uint8)[permutation].unflatten(0, (-1, 4))
    return groups.sum(1, dtype=torch.uint8).clamp_(max=2).sum()


class Method(sr_ste.Method):
    Config = Config
    Linear = Linear
    abilities = base.Capabilities(acts_on_gradients=True)  # dgrad's weight is another

    # The optimizer's pass cannot derive dgrad's permuted operand.
    step_work = base.Method.step_work

    @torch.no_grad()
    def on_step_begin(self, step: int) -> None:
        super().on_step_begin(step)
        if step % self.config.permute_every == 0:
            for name, layer in self.sparse_layers.items():
                with sharding.unsharded(layer):
                    layer.search_permutation(layer_seed(self.config.seed, name, step))
                layer.refresh()
