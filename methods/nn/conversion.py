"""Choice of the linears of a model to convert, with the reasons why others cannot be.

If a layer cannot be converted, it stays dense and the report gives the reason, provided that a
preset or a glob with a wildcard matched it. If the user gave its full name, it is an error.

transformers' GPT-2 keeps its linears as `Conv1D`, with the weight as [in, out]. A converted one
computes with [out, in] like every other linear here, but its state dict keeps the layout of
transformers, and `finalize` turns it back into a `Conv1D`, so that `save_pretrained` and
`from_pretrained` work.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

# Names of the linears of feed-forward networks: in this project's models and in GPT-2, LLaMA and
# ViT of transformers and timm; then in BERT and OPT. All papers but SLoPe's and AST's leave the
# other linears dense.
_FFN = (
    "*mlp.*",
    "*layer.[0-9]*.intermediate.dense",
    "*layer.[0-9].output.dense",
    "*layer.[0-9][0-9].output.dense",
    "*layers.[0-9]*.fc[12]",
)
# The words that `include` accepts: the feed-forward networks, or all linears of the blocks.
PRESETS = {"ffn": _FFN, "all": (*_FFN, "*attn.*", "*attention.*")}


@dataclass(frozen=True)
class Report:
    """The result of `convert`.

    names: the converted linears. dense: the other linears. reasons: why those of `dense` that were
    matched could not be converted. others: matched modules of other kinds that hold a matrix, as
    `name (Type)`; they are unchanged. sparse_parameters, total_parameters: number of entries in the
    converted weights and in the model. measured: True for `dense`, which converts nothing: `names`
    are then the linears on which it measures what a sparse method would do.
    """

    names: tuple[str, ...]
    dense: tuple[str, ...]
    others: tuple[str, ...]
    sparse_parameters: int
    total_parameters: int
    reasons: dict[str, str] = field(default_factory=dict)
    measured: bool = False

    def __str__(self) -> str:
        share = self.sparse_parameters / self.total_parameters
        refused = f", of which cannot be converted: {listed(self.reasons)}" if self.reasons else ""
        of = f"{self.sparse_parameters:,} of {self.total_parameters:,} parameters ({share:.0%})"
        which = some_names(_as_globs([*self.names])) or "none"
        if self.measured:
            return f"no linear converted; {_counted(self.names)} measured ({which}), {of}{refused}"
        return (
            f"{_counted(self.names)} converted ({which}), {of}; "
            f"{_counted(self.dense)} left dense{refused}"
        )


def _counted(names: tuple[str, ...]) -> str:
    return "1 linear" if len(names) == 1 else f"{len(names)} linears"


def listed(reasons: dict[str, str]) -> str:
    """One line with names and reasons; names with the same reason are grouped."""
    groups: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        groups.setdefault(reason, []).append(name)
    return "; ".join(f"{_first(names)} ({reason})" for reason, names in groups.items())


def _first(names: list[str]) -> str:
    first = names[0] or "the model itself"
    return first if len(names) == 1 else f"{first} and {len(names) - 1} more"


def some_names(names: list[str]) -> str:
    return ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")


def globs(include: str | tuple[str, ...]) -> tuple[str, ...]:
    """The globs of a config's `include`, which may be the name of a preset."""
    return PRESETS[include] if isinstance(include, str) else include


def named(
    model: nn.Module, include: str | tuple[str, ...], exclude: tuple[str, ...]
) -> Iterator[tuple[str, nn.Module]]:
    """The modules that an include glob matches and no exclude glob does."""
    wanted = globs(include)
    for name, module in model.named_modules():
        included = any(fnmatchcase(name, glob) for glob in wanted)
        if included and not any(fnmatchcase(name, glob) for glob in exclude):
            yield name, module


def linears(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if is_linear(module)]


def is_linear(module: nn.Module) -> bool:
    """True for an `nn.Linear`, subclasses included, and for transformers' `Conv1D`."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


def is_conv1d(module: nn.Module) -> bool:
    """True for transformers' `Conv1D`, recognised by name and shape without importing it."""
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    return (
        type(module).__name__ == "Conv1D"
        and weight is not None
        and weight.ndim == 2
        and (bias is None or bias.shape == weight.shape[1:])
    )


def others(model: nn.Module, include: str | tuple[str, ...], exclude: tuple[str, ...]) -> list[str]:
    """The matched modules that hold a matrix but are not linears, as `name (Type)`."""
    return [
        f"{name} ({type(module).__name__})"
        for name, module in named(model, include, exclude)
        if not is_linear(module)
        and isinstance(weight := getattr(module, "weight", None), nn.Parameter)
        and weight.ndim > 1
    ]


def owners_of_parameters(model: nn.Module) -> dict[int, list[str]]:
    """The names of the modules that hold a parameter, by the parameter's id."""
    owners: dict[int, list[str]] = {}
    for owner, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(owner)
    return owners


def unfit(name: str, module: nn.Module, owners: dict[int, list[str]]) -> str | None:
    """The reason why no method can convert this linear; None if there is none."""
    own = module._parameters.get("weight")
    if own is None or not (type(module) is nn.Linear or is_conv1d(module)):
        return f"a {type(module).__name__}, no plain nn.Linear with a weight of its own"
    if sharing := [owner for owner in owners[id(own)] if owner != name]:
        return f"shares its weight with {', '.join(sharing)}"
    return None


def choose(
    model: nn.Module,
    include: str | tuple[str, ...],
    exclude: tuple[str, ...],
    check_layer: Callable[[str, nn.Module], None],
) -> tuple[dict[str, Any], dict[str, str]]:
    """The linears to convert by name, and the reasons why other matching linears cannot be.

    Args:
        check_layer: raises ValueError with the reason if a method cannot convert a linear.
    Raises:
        ValueError: no linear can be converted, or one that `include` names in full cannot be.
    """
    owners = owners_of_parameters(model)

    def reason_against(name: str, module: nn.Module) -> str | None:
        if reason := unfit(name, module, owners):
            return reason
        try:
            check_layer(name, module)
        except ValueError as error:
            return str(error)
        return None

    chosen: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    for name, module in named(model, include, exclude):
        if not is_linear(module):
            continue
        reason = reason_against(name, module)
        if reason is None:
            check_fast_path(model, name)
            chosen[name] = module
        elif name in globs(include):
            raise ValueError(f"{name} cannot be converted ({reason}); exclude it")
        else:
            reasons[name] = reason
    if not chosen:
        modules = [(name, m) for name, m in model.named_modules() if is_linear(m)]
        fit = [name for name, module in modules if reason_against(name, module) is None]
        raise ValueError(_nothing(model, include, exclude, reasons, fit))
    return chosen, reasons


def _nothing(
    model: nn.Module,
    include: str | tuple[str, ...],
    exclude: tuple[str, ...],
    reasons: dict[str, str],
    fit: list[str],
) -> str:
    """The message that says why no linear can be converted, and names those that can: `fit`."""
    asked = f"include={include if isinstance(include, str) else list(include)}"
    named = f"; choose from include={_as_globs(fit)[:6]}" if fit else ""
    if reasons:
        return f"no linear that matches {asked} can be converted: {listed(reasons)}{named}"
    asked = f"{asked} exclude={list(exclude)}"
    matching = others(model, include, exclude)
    hint = f"; {some_names(matching)} match, but only nn.Linear can be converted"
    return (
        f"no linear matches {asked}{hint if matching else ''}; the model's linears are: "
        f"{some_names(_as_globs(linears(model))) or 'none'}{named}"
    )


def _as_globs(names: list[str]) -> list[str]:
    """Globs for these names, one for those that differ in the number of a block alone."""
    return list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names))


def check_fast_path(model: nn.Module, name: str) -> None:
    """Raise ValueError if torch's encoder layer would bypass this linear in evaluation."""
    parent = model.get_submodule(name.rpartition(".")[0])
    fast = torch.backends.mha.get_fastpath_enabled()
    if fast and isinstance(parent, nn.TransformerEncoderLayer):
        raise ValueError(
            f"{name} is in an nn.TransformerEncoderLayer, whose fast path in evaluation reads the "
            "weight directly and would compute the dense model; call "
            "torch.backends.mha.set_fastpath_enabled(False) first"
        )


def check_low_rank(module: nn.Module) -> None:
    """Raise ValueError if the module could not keep a low-rank term at the end of training."""
    if is_conv1d(module):
        raise ValueError(
            "a Conv1D, which cannot keep low-rank terms: load the model with "
            "models.gpt2.from_hf or models.hf.CausalLM"
        )


def weight_of(layer: nn.Module) -> Tensor:
    """The layer's weight as [out, in]."""
    weight: Any = layer.weight
    return weight.t() if is_conv1d(layer) else weight


@torch.no_grad()
def transpose_(layer: nn.Module) -> None:
    """Transpose the weight of `layer` in place; it stays the same Parameter."""
    weight: Any = layer.weight
    weight.data = weight.data.t().contiguous()
    if weight.grad is not None:
        weight.grad = weight.grad.t().contiguous()


def adopt(layer: Any) -> None:
    """Give a `Conv1D` the weight layout and sizes of an `nn.Linear`, so that it can become one."""
    if is_conv1d(layer):
        transpose_(layer)
        layer.out_features, layer.in_features = layer.weight.shape
        layer.conv1d = type(layer)


def release(layer: Any) -> None:
    """Turn a plain `nn.Linear` that was a `Conv1D` back into one."""
    if "conv1d" in vars(layer):
        transpose_(layer)
        layer.__class__ = layer.conv1d
        del layer.conv1d, layer.out_features, layer.in_features
