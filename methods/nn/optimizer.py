"""AdamW that does a method's work on the sparse weights in the same pass as the update."""

import inspect
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from common_kernels.adamw import Rates, Rule, Weight24, adamw24_

from .dtensors import chunk_of, is_sharded, rows_of, shard_dim
from .linear import SparseLinear

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


def each(optimizers: Optimizers) -> list[Any]:
    """The optimizers that `on_gradients` was given, without accelerate's wrapper."""
    several: Any = [optimizers] if hasattr(optimizers, "param_groups") else optimizers or ()
    return [getattr(own, "optimizer", own) for own in several]


def group_of(optimizers: list[Any], weight: Tensor) -> tuple[Any, dict[str, Any]]:
    """The optimizer that holds `weight`, and its parameter group; raises ValueError without."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if any(p is weight for p in group["params"]):
                return optimizer, group
    raise ValueError(
        "no optimizer given to on_gradients holds the weights of the converted layers: call "
        "on_gradients(step, optimizer), or with a list of all optimizers"
    )


def all_finite(parameters: Iterable[Tensor]) -> bool:
    """True if all gradients are finite; if not, a GradScaler will skip the step."""
    grads = [p.grad for p in parameters if p.grad is not None]
    return bool(torch.nn.utils.get_total_norm(grads).isfinite())


@dataclass(eq=False, kw_only=True)
class StepWork:
    """The work of a step on the weight of `layer` besides AdamW's update.

    mask, scale: the layer's tensors that `rule` reads or writes.
    derives: the pass also writes the operands; if not (as in FP8), `on_step_end` derives them.
    amax: the operand's largest magnitude, fp32 [], which FP8 codes need, once the pass has computed
        it.
    done: the pass is finished: weight, mask and, if `derives`, operands are up to date.
    """

    layer: SparseLinear
    rule: Rule
    mask: Tensor | None = None
    scale: Tensor | None = None
    amax: Tensor | None = None
    done: bool = False
    derives: bool = field(init=False)
    weight: Any = field(init=False)  # an attribute of a module takes longer to find

    def __post_init__(self) -> None:
        layer = self.layer
        self.derives, self.weight = layer.precision is None, layer.weight


class FusedAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW(fused=True)` that reads and writes each sparse weight once per step.

    It replaces `torch.optim.AdamW` in a loop that calls a method's hooks. `on_gradients(step,
    optimizer)` then hands over the work that fits into the update (masked decay, a mask that is
    due, the operands), and `on_step_end` does the rest. Weights without such work, that are not
    fp32 matrices, or with another pattern than 2:4, are updated as torch does, and so are sharded
    weights if a mask is due; otherwise each rank does the work on its own rows. State dicts are
    interchangeable with those of `torch.optim.AdamW`.

    GradScaler works as with torch's fused optimizers. If `grad_scale` is set, gradients are divided
    by it while they are read. Nothing in `step` waits for the device.
    """

    _works: tuple[Mapping[str, StepWork], ...] = ()  # one per method, which may empty its own
    _by_weight: Mapping[int, StepWork] = {}  # the running step's work, by the weight's id

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        capturable: bool = False,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, capturable=capturable, fused=True)

    def accept(self, works: Mapping[str, StepWork]) -> dict[str, StepWork]:
        """Accept work for the next step and return it by name, in a dict that the caller keeps.

        The step does the work that is still in the dict. Several methods may hand over work; each
        empties its dict before it hands over more.
        """
        groups = {id(p): group for group in self.param_groups for p in group["params"]}
        weights = {name: id(work.weight) for name, work in works.items()}
        layers = Counter(weights.values())
        taken = {
            name: work
            for name, work in works.items()
            if layers[weights[name]] == 1 and _can_do(work, groups.get(weights[name]))
        }
        self._works = (*filter(None, self._works), taken)
        return taken

    def step(self, closure: Any = None) -> Any:
        """Update the weights and do the work that `accept` took over."""
        works = [work for taken in self._works for work in taken.values()]
        self._by_weight = {id(work.weight): work for work in works}
        # torch wraps each class's step to call hooks; unwrap one, so that hooks run once.
        step = inspect.unwrap(torch.optim.AdamW.step, stop=lambda f: not hasattr(f, "hooked"))
        try:
            return step(self, closure)
        finally:
            self._works, self._by_weight = (), {}

    def _init_group(self, group: dict[str, Any], *lists: list[Any]) -> bool:
        """Extend torch's, which creates the state and lists the tensors to update: weights with
        work are updated here and removed from the lists."""
        has_complex = super()._init_group(group, *lists)
        params = list(lists[0])
        if any(map(is_sharded, params)):
            for entries in lists:  # DTensors have several times the Python overhead of local ones
                entries[:] = map(rows_of, entries)
        mine = [i for i, p in enumerate(params) if id(p) in self._by_weight]
        if mine:
            self._update(group, [self._by_weight[id(params[i])] for i in mine])
            for entries in filter(None, lists):  # the list for amsgrad stays empty
                for i in reversed(mine):
                    del entries[i]
        return has_complex

    def _update(self, group: dict[str, Any], works: list[StepWork]) -> None:
        launches: dict[tuple[torch.device, Rule], list[StepWork]] = {}
        for work in works:
            launches.setdefault((work.weight.device, work.rule), []).append(work)
        for (device, rule), together in launches.items():
            for work in together:
                if work.layer.fp8 is not None:
                    # The same in each step, as the kernel's table has its address.
                    buffers = vars(self).setdefault("_amax", {})  # a copied optimizer has none
                    key = id(work.weight), device
                    work.amax = buffers.setdefault(key, torch.empty((), device=device))
            adamw24_(
                [self._tensors(work) for work in together],
                Rates(
                    lr=_on(device, group["lr"]),
                    betas=(float(group["betas"][0]), float(group["betas"][1])),
                    eps=group["eps"],
                    weight_decay=group["weight_decay"],
                ),
                rule,
                # GradScaler sets these attributes for one step.
                grad_scale=_on(device, vars(self).get("grad_scale")),
                found_inf=_on(device, vars(self).get("found_inf")),
            )
            for work in together:
                work.done = True

    def _tensors(self, work: StepWork) -> Weight24:
        """The tensors of a step, most of which are those of the step before."""
        layer, weight, buffers = work.layer, work.weight, work.layer._buffers
        state = self.state[weight]
        packs = ("operand", "packed", "packed_transposed") if work.derives else ()
        own = (
            weight, state["exp_avg"], state["exp_avg_sq"], state["step"], work.mask, work.scale,
            work.amax, layer.accelerated, *(buffers[name] for name in packs),
        )  # fmt: skip
        known = vars(self).setdefault("_given", {})  # a copied optimizer has none
        before, found = known.get(id(weight), ((), None))
        if len(before) != len(own) or any(a is not b for a, b in zip(before, own, strict=True)):
            fprop, dgrad = layer.packed_operands() if work.derives else (None, None)
            found = Weight24(
                weight=rows_of(weight),
                grad=torch.empty(0),  # a gradient that is kept keeps DDP's first buckets
                exp_avg=rows_of(state["exp_avg"]),
                exp_avg_sq=rows_of(state["exp_avg_sq"]),
                step=rows_of(state["step"]),
                mask=rows_of(work.mask),
                scale=work.scale,
                dense=layer.operand if work.derives else None,
                packed=None if fprop is None else fprop.matrix,
                transposed=None if dgrad is None else dgrad.matrix,
                amax=work.amax,
            )
            if not is_sharded(weight):  # whose local tensors are other ones each time
                known[id(weight)] = own, found
        assert weight.grad is not None
        return found.with_grad(rows_of(weight.grad))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of `torch.optim.AdamW`."""
        own = {"fused": True, "foreach": None}
        groups = [{**group, **own} for group in state_dict["param_groups"]]
        super().load_state_dict({**state_dict, "param_groups": groups})


def _can_do(work: StepWork, group: dict[str, Any] | None) -> bool:
    weight = work.weight
    return (
        group is not None
        and not group["amsgrad"]
        and not group["maximize"]
        and (type(weight) is nn.Parameter or (is_sharded(weight) and _by_rows(work, weight)))
        and weight.dtype == torch.float32
        and work.layer.pattern == (2, 4)
        and weight.grad is not None
    )


def _by_rows(work: StepWork, weight: Any) -> bool:
    """True if every rank can do the work on its own rows; the answer is equal on all ranks."""
    chunk, ranks = chunk_of(weight), weight.device_mesh.size(shard_dim(weight))
    in_fours = len(weight) % 4 == chunk % 4 == 0 and len(weight) > chunk * (ranks - 1)
    # FSDP keeps gradients in one buffer; the kernel needs them aligned to 16 bytes.
    aligned = weight.grad is not None and int(rows_of(weight.grad).storage_offset()) % 4 == 0
    local = work.rule.choose is None and work.derives  # no FP8 codes
    return in_fours and aligned and local


def _on(device: torch.device, value: Any) -> Any:
    """`value` for the kernel: a number or a 0-dim CPU tensor, or a tensor on `device`."""
    if not isinstance(value, Tensor) or value.device == device:
        return value
    return float(value) if value.device.type == "cpu" else value.to(device, non_blocking=True)
