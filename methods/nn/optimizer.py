"""AdamW that does a method's work on the sparse weights in the pass that updates them."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from common_kernels.adamw import Rates, Rule, Weight24, adamw24_

from .linear import SparseLinear
from .sharding import chunk_of, is_sharded, rows_of, shard_dim


@dataclass(eq=False, kw_only=True)
class StepWork:
    """The work of a step on the weight of `layer` beside AdamW's update.

    mask, scale: those of the layer that `rule` reads or writes. derives: whether it ends with the
        operands; else, as for those in FP8, `on_step_end` derives them. scales: codes are scaled by
        the operand's largest magnitude. amax: that one, fp32 [], if `scales`, once it is found.
        done: the layer's weight, mask and, if derived, operands are those after the step.
    """

    layer: SparseLinear
    rule: Rule
    mask: Tensor | None = None
    scale: Tensor | None = None
    scales: bool = False
    amax: Tensor | None = None
    derives: bool = True
    done: bool = False


class FusedAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW(fused=True)` that reads and writes each sparse weight once a step.

    For a loop that calls a method's hooks it takes the place of `torch.optim.AdamW`:
    `on_gradients(step, optimizer)` then leaves to it what it can do with the update, that is masked
    decay, a mask that is due and the operands, and `on_step_end` does the rest. Weights that no
    method speaks for, or that are not fp32 matrices, are updated as torch does it, and so are
    sharded ones where a mask is due; else each rank does the work on its rows. Its state is that of
    `torch.optim.AdamW`: a state dict of either loads into the other.

    A GradScaler is served as by torch's fused optimizers. `grad_scale`, if set, divides the
    gradients, which stay as they are. Nothing in `step` waits for the device.
    """

    _works: tuple[Mapping[str, StepWork], ...] = ()  # one a method, which may empty its own
    _by_weight: Mapping[int, StepWork] = {}  # of the step that runs, by the weight's id

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

    def take(self, works: Mapping[str, StepWork]) -> dict[str, StepWork]:
        """The works, by name, that the next step will do: those still in this dict then.

        Several methods may give their works; each empties its dict before it gives others.
        """
        groups = {id(p): group for group in self.param_groups for p in group["params"]}
        weights = {name: id(work.layer.weight) for name, work in works.items()}
        layers = Counter(weights.values())
        taken = {
            name: work
            for name, work in works.items()
            if layers[weights[name]] == 1 and _can_do(work, groups.get(weights[name]))
        }
        self._works = (*filter(None, self._works), taken)
        return taken

    def step(self, closure: Any = None) -> Any:
        """Update the weights, and do the work that was taken."""
        works = [work for taken in self._works for work in taken.values()]
        self._by_weight = {id(work.layer.weight): work for work in works}
        # torch wraps the step of each class to call hooks, of which one call is enough.
        step = inspect.unwrap(torch.optim.AdamW.step, stop=lambda f: not hasattr(f, "hooked"))
        try:
            return step(self, closure)
        finally:
            self._works, self._by_weight = (), {}

    def _init_group(self, group: dict[str, Any], *lists: list[Any]) -> bool:
        """torch's, which makes the state and lists what `step` updates next; of that the weights
        with work are updated here, and struck out."""
        has_complex = super()._init_group(group, *lists)
        params = list(lists[0])
        for entries in lists:  # to update DTensors takes Python several times as long
            entries[:] = map(rows_of, entries)
        mine = [i for i, p in enumerate(params) if id(p) in self._by_weight]
        if mine:
            self._update(group, [self._by_weight[id(params[i])] for i in mine])
            for entries in filter(None, lists):  # one is of amsgrad and stays empty
                for i in reversed(mine):
                    del entries[i]
        return has_complex

    def _update(self, group: dict[str, Any], works: list[StepWork]) -> None:
        launches: dict[tuple[torch.device, Rule], list[StepWork]] = {}
        for work in works:
            launches.setdefault((work.layer.weight.device, work.rule), []).append(work)
        for (device, rule), together in launches.items():
            for work in together:
                if work.scales:
                    work.amax = self._room_for_amax(work.layer.weight)
            adamw24_(
                [_tensors(work, self.state[work.layer.weight]) for work in together],
                Rates(
                    lr=_on(device, group["lr"]),
                    betas=(float(group["betas"][0]), float(group["betas"][1])),
                    eps=group["eps"],
                    weight_decay=group["weight_decay"],
                ),
                rule,
                # A GradScaler sets them, as attributes, for one step.
                grad_scale=_on(device, vars(self).get("grad_scale")),
                found_inf=_on(device, vars(self).get("found_inf")),
            )
            for work in together:
                work.done = True

    def _room_for_amax(self, weight: Tensor) -> Tensor:
        """fp32 [], the same in each step: the kernel's table of addresses then stays."""
        rooms = vars(self).setdefault("_amax", {})  # a copied optimizer has none
        key = id(weight), weight.device
        if key not in rooms:
            rooms[key] = torch.empty((), device=weight.device)
        return rooms[key]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of `torch.optim.AdamW`."""
        own = {"fused": True, "foreach": None}
        groups = [{**group, **own} for group in state_dict["param_groups"]]
        super().load_state_dict({**state_dict, "param_groups": groups})


def _can_do(work: StepWork, group: dict[str, Any] | None) -> bool:
    weight = work.layer.weight
    return (
        group is not None
        and not group["amsgrad"]
        and not group["maximize"]
        and (type(weight) is nn.Parameter or (is_sharded(weight) and _by_rows(work, weight)))
        and weight.dtype == torch.float32
        and weight.grad is not None
    )


def _by_rows(work: StepWork, weight: Any) -> bool:
    """True if every rank can do the work on its rows; all ranks find the same."""
    chunk, ranks = chunk_of(weight), weight.device_mesh.size(shard_dim(weight))
    in_fours = len(weight) % 4 == chunk % 4 == 0 and len(weight) > chunk * (ranks - 1)
    # FSDP's gradients lie one behind the other; the kernel takes those at multiples of 16 bytes.
    aligned = weight.grad is not None and int(rows_of(weight.grad).storage_offset()) % 4 == 0
    local = work.rule.choose is None and work.derives and not work.scales
    return in_fours and aligned and local


def _tensors(work: StepWork, state: dict[str, Tensor]) -> Weight24:
    layer = work.layer
    assert layer.weight.grad is not None
    operands: dict[str, Any] = {}
    if work.derives:
        packed, transposed = layer.packed_operands()
        operands["dense"] = layer.operand
        operands["packed"] = None if packed is None else packed.matrix
        operands["transposed"] = None if transposed is None else transposed.matrix
    return Weight24(
        weight=rows_of(layer.weight),
        grad=rows_of(layer.weight.grad),
        exp_avg=rows_of(state["exp_avg"]),
        exp_avg_sq=rows_of(state["exp_avg_sq"]),
        step=rows_of(state["step"]),
        mask=rows_of(work.mask),
        scale=work.scale,
        amax=work.amax,
        **operands,
    )


def _on(device: torch.device, value: Any) -> Any:
    """A number as it is, also one in a tensor on the CPU; a tensor on `device`."""
    if not isinstance(value, Tensor) or value.device == device:
        return value
    return float(value) if value.device.type == "cpu" else value.to(device, non_blocking=True)
