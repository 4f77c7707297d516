"""SLoPe: a static N:M weight kept compressed, a twice-pruned dgrad, low-rank adapters at the end.

    GEMM   operand 1   operand 2     sparse operand, along
    fprop  X           W * A         weight, N:M along `in`
    dgrad  dY          W * A * B     the same weight pruned again, N:M along `out` as well
    wgrad  dY          X             none; the dense product is compressed to the entries under A

SLoPe (arXiv 2405.16325, ICLR 2025). The row mask A is chosen once, at conversion. The column mask B
keeps the N largest magnitudes of W * A in each M consecutive outputs, so dX is not the exact
gradient of the forward pass; by default B is chosen again in every step. Only the kept weights are
stored, in an ordinary Parameter `values` [out, in * N / M], so that its gradient, any optimizer's
moments, clipping, DDP buckets and checkpoints are compressed as well. Dense operands are expanded
for a product and not kept. The model ends N:M sparse.

In the last `adapter_fraction` of the steps Y gains X L R / rank (nn/compressed_gemms.py), where L
has unit variance and R is zero until then. Both are parameters from the start, but get no gradient
before their phase, so the optimizer creates their moments only then. A model with trained adapters
ends with `lowrank.SparsePlusLowRank` layers. With `fp8` all three products are in FP8.

The paper keeps L^T in the layer's N:M, so that X [W^T | L] is one sparse product; here L is dense.

In the released training code the mask is inverted, the copy of W^T is never updated, dense
parameters never move, and the merged form omits the scale. The accuracy experiments (separate code)
refresh B in every backward pass (`column_refresh=1`), the released package every 100 steps.
"""

import re
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, ClassVar

from torch import nn

from common_kernels.pack.compressed import prune_and_pack24_

from .nn import base, sharding
from .nn.compressed import CompressedLinear
from .nn.conversion import check_low_rank, weight_of
from .nn.optimizer import Optimizers, each

# The paper leaves the heads and the first linear after the input dense. These are the first block's
# linears for queries, keys and values in GPT-2, BERT, ViT, and OPT or LLaMA.
FIRST_LINEARS = (
    "*h.0.attn.c_attn",
    "*layer.0.attention.self.*",
    "*blocks.0.attn.qkv",
    "*layers.0.self_attn.[qkv]_proj",
    "*layers.0.attention.[qkv]_proj",
)
HEADS = ("*head", "*predictions.decoder", "*seq_relationship", "*classifier", "*qa_outputs")


@dataclass(frozen=True, kw_only=True)
class Config(base.NMConfig):
    """Options of SLoPe; the defaults are the paper's without adapters, for all linears of a block.

    mask: the row mask, `random` or by `magnitude` (for pretrained weights, for example).
    permute: as in `methods.one_shot`; for masks by magnitude.
    n, m: keep n of m consecutive weights. patterns: other N:M for some layers, as `GLOB=N:M`, of
        which the last match wins: ["transformer.h.[0-5].*=2:8"].
    column_refresh: optimizer steps between two choices of the column mask; 0 = only the first.
    adapter_rank: rank of the low-rank adapters; 0 = none (the paper: 0.4 to 6% of the width).
    adapter_fraction: fraction of `total_steps`, at the end, that trains them; at least one step.
    fp8: FP8 products as in `methods.fst`, with a dense wgrad. Adapters are never in FP8.
    """

    include: Any = ("*",)
    exclude: tuple[str, ...] = FIRST_LINEARS + HEADS
    mask: str = base.choice("random", ("random", "magnitude"))
    permute: bool = False
    patterns: tuple[str, ...] = ()
    column_refresh: int = base.number(1, 0)
    adapter_rank: int = base.number(0, 0)
    adapter_fraction: float = 0.01
    fp8: str = "off"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.permute and self.mask == "random":
            raise ValueError("permute=True raises what mask=magnitude keeps, but mask=random")
        object.__setattr__(self, "patterns", tuple(self.patterns))
        for entry in self.patterns:
            _, n, m = parse_pattern(entry)
            base.check_pattern(n, m, f"patterns: {entry!r}")
        if not 0.0 < self.adapter_fraction <= 1.0:
            raise ValueError(f"adapter_fraction={self.adapter_fraction}; it must lie in (0, 1]")
        if not self.adapter_rank and self.adapter_fraction != Config.adapter_fraction:
            raise ValueError(
                f"adapter_fraction={self.adapter_fraction} needs adapters, and adapter_rank=0 has "
                "none; set a rank of at least 1"
            )

    def pattern(self, name: str) -> tuple[int, int]:
        n, m = super().pattern(name)
        for entry in self.patterns:
            glob, *other = parse_pattern(entry)
            if fnmatchcase(name, glob):
                n, m = other
        return n, m


def parse_pattern(entry: str) -> tuple[str, int, int]:
    """`GLOB=N:M` as (glob, n, m)."""
    match = re.fullmatch(r"(.+)=(\d+):(\d+)", str(entry))
    if match is None:
        raise ValueError(f"patterns: {entry!r} is not of the form GLOB=N:M, as *mlp.*=2:8")
    return match[1], int(match[2]), int(match[3])


class Method(base.Method):
    Config = Config
    Linear: ClassVar[type[CompressedLinear]] = CompressedLinear

    @property
    def capabilities(self) -> base.Capabilities:
        # Adapters must get no gradients, of DDP for example, before their phase.
        acts = self.abilities.acts_on_gradients or self.config.adapter_rank > 0
        return replace(super().capabilities, acts_on_gradients=acts)

    @property
    def fraction(self) -> str:
        return "adapter_fraction" if self.config.adapter_rank else ""

    @property
    def adapter_start(self) -> int:
        """The first optimizer step that trains the adapters."""
        steps = self.config.total_steps
        return steps - max(1, round(self.config.adapter_fraction * steps))

    def _check(self, chosen: dict[str, nn.Linear]) -> None:
        for entry in self.config.patterns:
            if not any(fnmatchcase(name, parse_pattern(entry)[0]) for name in chosen):
                raise ValueError(f"patterns: {entry!r} matches none of {', '.join(chosen)}")

    def check_layer(self, name: str, module: nn.Module) -> None:
        super().check_layer(name, module)
        rank, shape = self.config.adapter_rank, list(weight_of(module).shape)
        if rank > min(shape):
            raise ValueError(f"adapter_rank={rank} is above the smaller dim of weight {shape}")
        if rank:
            check_low_rank(module)

    def on_step_begin(self, step: int) -> None:
        super().on_step_begin(step)
        if self.config.adapter_rank and step >= self.adapter_start:
            for layer in self.layers.values():
                layer.adapting = True  # never reset: trained adapters are part of the layer

    def _measures(self, step: int) -> bool:
        return False  # the row masks do not change

    @property
    def unfinished(self) -> bool:
        """True if the adapters are still to be trained."""
        return self.config.adapter_rank > 0 and not all(m.adapting for m in self.layers.values())

    def on_gradients(self, step: int, optimizer: Optimizers = None) -> None:
        super().on_gradients(step, optimizer)
        optimizers = each(optimizer)
        if optimizers:
            self._check_optimizers(optimizers)
        # DDP sets missing gradients to zero; optimizers would then count steps and apply decay.
        for layer in self.layers.values():
            for adapter in (layer.left, layer.right):
                if adapter is None:
                    continue
                if not layer.adapting:
                    adapter.grad = None
                if step <= self.adapter_start:
                    # torch.distributed.checkpoint creates moments for all parameters on loading.
                    for own in optimizers:
                        own.state.pop(adapter, None)

    def _check_optimizers(self, optimizers: list[Any]) -> None:
        """Raise ValueError for an optimizer made before `convert`, which holds the replaced weights
        and would not train the new ones, and for Muon."""
        held = {
            id(p): own for own in optimizers for group in own.param_groups for p in group["params"]
        }
        for name, layer in self.layers.items():
            if layer.values.requires_grad and id(layer.values) not in held:
                raise ValueError(
                    f"the optimizer does not hold {name}.values, which replaced {name}.weight: "
                    "make the optimizer after method.convert(model)"
                )
            if "muon" in type(held.get(id(layer.values))).__name__.lower():
                raise ValueError(
                    f"Muon would orthogonalise {name}.values, half of the entries pushed together, "
                    "and not the weight: give the converted layers' parameters to AdamW"
                )

    def _derive(self, due: bool) -> None:
        stored = {name: layer.stored() for name, layer in self.layers.items()}
        others = [layer for name, layer in self.layers.items() if stored[name] is None]
        for layer in others if due else ():
            layer.refresh_mask()
        sharding.gather_masks(others)
        for layer in others:
            layer.update_operands()
        prune_and_pack24_([own for own in stored.values() if own is not None], choose=due)

    def _chooses(self, step: int) -> bool:
        period = self.config.column_refresh
        return period > 0 and (step + 1) % period == 0

    def phase(self) -> str:
        return "adapters" if any(layer.adapting for layer in self.layers.values()) else "sparse"

    def finetuning(self, total_steps: int) -> base.Config:
        """The config that keeps the masks and trains the adapters, if any, from the first step."""
        if not self.config.adapter_rank:
            return replace(self.config, total_steps=total_steps)
        return replace(self.config, total_steps=total_steps, adapter_fraction=1.0)
