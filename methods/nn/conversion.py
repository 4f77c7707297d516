"""Choice of the linears of a model to convert, with the reasons why all else stays dense.

If a layer cannot be converted, it stays dense and the report gives the reason, provided that a
preset or a glob with a wildcard matched it. If the user gave its full name, it is an error.

transformers' GPT-2 keeps its linears as `Conv1D`, with the weight as [in, out]. A converted one
computes with [out, in] like every other linear here, but its state dict keeps the layout of
transformers, and `finalize` turns it back into a `Conv1D`, so that `save_pretrained` and
`from_pretrained` work.
"""

import re
import types
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from common_kernels import check_nm

from . import matrices

# Names of the linears of feed-forward networks: in this project's models and in GPT-2, LLaMA and
# ViT of transformers, timm and torchvision; then in BERT, OPT, T5 and `nn.TransformerEncoder`. All
# papers but SLoPe's and AST's leave the other linears dense.
_FFN = (
    "*mlp.*",
    "*layer.[0-9]*.intermediate.dense",
    "*layer.[0-9].output.dense",
    "*layer.[0-9][0-9].output.dense",
    "*layers.[0-9]*.fc[12]",
    "*.DenseReluDense.w[io]*",
    "*layers.[0-9]*.linear[12]",
)
# The words that `include` accepts: the feed-forward networks, or all linears of the blocks.
PRESETS = {"ffn": _FFN, "all": (*_FFN, "*attn.*", "*attention.*", "*Attention.*")}


@dataclass(frozen=True)
class Report:
    """The result of `convert`.

    names: the converted linears and matrices. dense: why each other matrix stays dense, by name;
    one that is called `weight` has the name of its module. sizes: number of entries of all these
    matrices; a shared one counts once. total_parameters: number of entries in the model. measured:
    True for `dense`, which converts nothing: `names` are then the linears on which it measures what
    a sparse method would do. warnings: what is probably not meant.
    """

    names: tuple[str, ...]
    dense: dict[str, str]
    sizes: dict[str, int]
    total_parameters: int
    measured: bool = False
    warnings: tuple[str, ...] = ()

    @property
    def sparse_parameters(self) -> int:
        return sum(self.sizes[name] for name in self.names)

    def __str__(self) -> str:
        share = self.sparse_parameters / self.total_parameters
        of = f"{self.sparse_parameters:,} of {self.total_parameters:,} parameters ({share:.0%})"
        count = "1 linear" if len(self.names) == 1 else f"{len(self.names)} linears"
        if self.measured:
            lines = [f"no linear converted; {count} measured, {of}"]
        else:
            lines = [f"{count} converted, {of}"]
            if share < 1 / 3:
                lines.append("  warning: less than a third of the parameters is converted")
            lines += [f"  warning: {warning}" for warning in self.warnings]
        kind = "measured" if self.measured else "converted"
        groups: dict[tuple[str, str], list[int]] = {}
        for name, reason in (dict.fromkeys(self.names, "") | self.dense).items():
            groups.setdefault((reason, as_globs([name])[0]), []).append(self.sizes[name])
        # The converted ones first, and the largest of a kind.
        order = sorted(groups.items(), key=lambda group: (group[0][0] != "", -sum(group[1])))
        for (reason, name), sizes in order:
            word, why = ("dense", f": {reason}") if reason else (kind, "")
            many = f" ({len(sizes)})" if len(sizes) > 1 else ""
            part = f"{word:{len(kind)}} {sum(sizes) / self.total_parameters:6.1%}"
            lines.append(f"  {part}  {name or 'the model itself'}{many}{why}")
        return "\n".join(lines)


def some_names(names: list[str]) -> str:
    return ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")


def loses_24(linear: Any) -> bool:
    """True if a linear that stays dense is 2:4, so that training fills its zeros."""
    weight = weight_of(linear).detach()
    if not linear.weight.requires_grad or weight.is_meta or weight.shape[1] % 4:
        return False
    # One row tells a dense weight in no time; an empty one, as of an adapter, has no pattern.
    return not (check_nm(weight[:1], 2, 4) or check_nm(weight, 2, 4)) and bool(weight.any())


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


def owners_of_parameters(model: nn.Module) -> dict[int, list[str]]:
    """The names of the modules that hold a parameter, by the parameter's id."""
    owners: dict[int, list[str]] = {}
    for owner, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(owner)
    return owners


def every_matrix(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Every matrix of `model`: its name, the module that holds it, and its name there."""
    for path, module in model.named_modules():
        held = [name for name, p in module._parameters.items() if p is not None and p.ndim > 1]
        if is_linear(module) and "weight" not in held:
            held.insert(0, "weight")  # computed from other parameters
        for name in held:
            yield path if name == "weight" else f"{path}.{name}".lstrip("."), module, name


def _check_place(model: nn.Module, name: str, include: tuple[str, ...]) -> None:
    """Raise ValueError with the reason if a matrix's place in the model forbids conversion.

    An adapter (of LoRA and its like, as peft and torchtune name them) is converted only if a glob
    holds its name, the router of a mixture of experts never.
    """
    path: list[str] = []
    for part in name.split("."):
        parent = model.get_submodule(".".join(path))
        path.append(part)
        adapter = part.startswith("lora_") or part in getattr(parent, "adapter_layer_names", ())
        if adapter and not any(part in g for g in include if fnmatchcase(name, g)):
            raise ValueError(f"an adapter; to convert it, put {part} into include")
        if "router" in part or (part.endswith("gate") and hasattr(parent, "experts")):
            raise ValueError("the router of a mixture of experts")
        if part not in parent._modules:
            break


def unfit(name: str, module: nn.Module, owners: dict[int, list[str]]) -> str | None:
    """The reason why no method can convert this linear; None if there is none."""
    own = module._parameters.get("weight")
    if own is None or not (type(module) is nn.Linear or is_conv1d(module)):
        kind = type(module)
        home = f"{kind.__module__}." if kind.__name__ == "Linear" else ""  # one of torch's QAT, say
        return f"a {home}{kind.__name__}, no plain nn.Linear with a weight of its own"
    if sharing := [owner for owner in owners[id(own)] if owner != name]:
        return f"shares its weight with {', '.join(sharing)}"
    return None


def choose(
    model: nn.Module,
    config: Any,
    check_layer: Callable[[str, nn.Module], None],
    check_matrix: Callable[[str], None],
) -> tuple[dict[str, Any], Report]:
    """The linears to convert by name, and the report about the model. Raises ValueError if no
    linear can be converted, one that `include` names in full cannot be, or a glob matches nothing,
    other than those that `exclude` has by default.

    Args:
        check_layer: raises ValueError with the reason if a method cannot convert a linear.
        check_matrix: the same for a matrix that a module of this type multiplies itself.
    """
    include, exclude = config.include, config.exclude
    owners = owners_of_parameters(model)
    wanted = PRESETS[include] if isinstance(include, str) else include

    def fit(name: str, module: nn.Module, attribute: str) -> nn.Module:
        """The linear to convert; raises ValueError with the reason if there is none."""
        _check_place(model, name, wanted)
        if matrices.multiplies(module, attribute):
            check_matrix(type(module).__name__)
            held_by = owners[id(module._parameters[attribute])]
            if sharing := [o for o in held_by if model.get_submodule(o) is not module]:
                raise ValueError(f"shares its weight with {', '.join(sharing)}")
            module = matrices.linear_of(module, attribute)
        elif attribute != "weight" or not is_linear(module):
            held: Any = module._parameters[attribute]
            stack = held.ndim == 3 and len(held) > 1 and attribute != "weight"
            what = "a stack whose inputs may not be its last dim" if stack else "no linear"
            raise ValueError(f"{type(module).__name__}, {what}")
        elif reason := unfit(name, module, owners):
            raise ValueError(reason)
        check_layer(name, module)
        return module

    chosen: dict[str, Any] = {}
    dense: dict[str, str] = {}
    sizes: dict[str, int] = {}
    counted: set[int] = set()
    matched: dict[str, str] = {}  # by include, and cannot be converted
    possible: list[str] = []
    lost: list[str] = []  # linears that are 2:4 and not included
    for name, module, attribute in every_matrix(model):
        weight = module._parameters.get(attribute)
        sizes[name] = 0 if weight is None or id(weight) in counted else weight.numel()
        counted.add(id(weight))
        asked = any(fnmatchcase(name, glob) for glob in wanted)
        excluded = any(fnmatchcase(name, glob) for glob in exclude)
        reason = "in exclude" if asked and excluded else None if asked else "not in include"
        try:
            linear = fit(name, module, attribute)
            possible.append(name)
            if not asked and loses_24(linear):
                lost.append(name)
        except ValueError as error:
            if name in wanted and not excluded:
                raise ValueError(f"{name} cannot be converted ({error}); exclude it") from None
            reason = str(error)
            if asked and not excluded:
                matched[name] = reason
        if reason is None:
            chosen[name] = linear
        else:
            dense[name] = reason
    asked_for = () if isinstance(include, str) or not (chosen or matched) else include
    for option, glob in [("include", g) for g in asked_for] + [("exclude", g) for g in exclude]:
        given = option == "include" or glob not in type(config).exclude
        if given and not any(fnmatchcase(name, glob) for name in sizes):
            near = get_close_matches(glob, as_globs([*sizes]), 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"{option}: {glob} matches no matrix of the model{hint}")
    if not chosen:
        raise ValueError(_nothing(model, config, matched, possible))
    total = sum(p.numel() for p in model.parameters())
    warnings = []
    if lost:
        warnings.append(
            f"2:4 already but not in include, so that training fills their zeros: "
            f"{some_names(as_globs(lost))}"
        )
    trained = {x.weight.dtype for x in chosen.values() if x.weight.requires_grad}
    if small := trained & {torch.bfloat16, torch.float16}:
        warnings.append(
            f"weights in {str(small.pop()).removeprefix('torch.')} lose small updates; train fp32 "
            "ones under autocast: model.float(), then convert(model, dtype=torch.bfloat16)"
        )
    return chosen, Report(tuple(chosen), dense, sizes, total, warnings=tuple(warnings))


def _nothing(model: nn.Module, config: Any, reasons: dict[str, str], fit: list[str]) -> str:
    """The message that says why no linear can be converted, and how those that can, `fit`, are
    chosen: by a preset that has some of them, else by globs for all but the heads."""
    include = config.include
    asked = f"include={include if isinstance(include, str) else list(include)}"
    presets = [
        f"include={word}"
        for word, among in PRESETS.items()
        if any(fnmatchcase(name, glob) for glob in among for name in fit)
    ]
    others = as_globs([name for name in fit if not name.endswith("head")])
    choose = " or ".join(presets) or (f"from include={others}" if others else "")
    choose = choose and f"; choose {choose}"
    if reasons:
        groups: dict[str, list[str]] = {}
        for name, reason in reasons.items():
            groups.setdefault(reason, []).append(name)
        why = (f"{some_names(as_globs(n)) or 'the model itself'} ({r})" for r, n in groups.items())
        return f"no linear that matches {asked} can be converted: {'; '.join(why)}{choose}"
    linears = as_globs([name for name, module in model.named_modules() if is_linear(module)])
    return (
        f"no linear matches {asked} exclude={list(config.exclude)}; the model's linears are: "
        f"{some_names(linears) or 'none'}{choose}"
    )


def as_globs(names: list[str], but: Container[str] = ()) -> list[str]:
    """Globs for these names, one for those that differ in the number of a block alone; the names
    themselves for the globs in `but`."""
    found = {name: re.sub(r"(?<=[._])\d+(?=\.)", "*", name) for name in names}
    return list(dict.fromkeys(name if glob in but else glob for name, glob in found.items()))


def leave_fast_path(model: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """Switch off, in torch's encoder layers that hold converted linears, the fast path in
    evaluation, which reads weights directly; return what `finalize` sets again.

    Their encoders must not pass nested tensors, which only the fast path understands.
    """
    flags = {
        nn.TransformerEncoderLayer: "activation_relu_or_gelu",
        nn.TransformerEncoder: "use_nested_tensor",
    }
    found = [
        (module, flag, getattr(module, flag))
        for module in model.modules()
        for kind, flag in flags.items()
        if isinstance(module, kind) and any(hasattr(m, "sparse_products") for m in module.modules())
    ]
    for module, flag, _ in found:
        setattr(module, flag, False)
    return found


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


def become(layer: Any, kind: Any) -> None:
    """Give a linear the class `kind`."""
    layer.__class__ = kind
    if "_old_forward" in vars(layer):  # accelerate's hooks call that of the former class
        layer._old_forward = types.MethodType(kind.forward, layer)


def to_linear(layer: Any) -> None:
    """Give a `Conv1D`, or a matrix that its module multiplies, the layout of an `nn.Linear`."""
    if matrices.is_placed(layer):
        matrices.attach(layer)
    elif is_conv1d(layer):
        matrices.changed(layer.weight, lambda x: x.t().contiguous())
        layer.out_features, layer.in_features = layer.weight.shape
        layer.conv1d = type(layer)


def from_linear(layer: Any) -> None:
    """Undo `to_linear` on a plain `nn.Linear`."""
    if matrices.is_placed(layer):
        matrices.detach(layer)
    elif "conv1d" in vars(layer):
        matrices.changed(layer.weight, lambda x: x.t().contiguous())
        become(layer, layer.conv1d)
        del layer.conv1d, layer.out_features, layer.in_features
