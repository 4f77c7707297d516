"""Knowledge distillation from a frozen dense teacher, for methods that retrain a pruned model.

    L = task_weight * L_task + kl_weight * L_KL + layer_weight * L_layer

AST (arXiv 2407.20584, section 3.3) uses the dense model itself as teacher and finds that the KL
divergence of the logits matters most; its Table 5 compares the hidden-state losses. All losses are
computed in fp32 and averaged over tokens; padding tokens count as well.
"""

import copy
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, partial
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import base, ranks, sharding
from .conversion import some_names
from .order import without_state

# Names of the transformer blocks in this project's GPT and in transformers' GPT-2, OPT and LLaMA.
BLOCKS = ("*.h.[0-9]", "*.h.[0-9][0-9]", "*.layers.[0-9]", "*.layers.[0-9][0-9]")

# The labels of a batch. The teacher does not get them, so that it does not compute a loss, unless
# its `forward` requires them.
_LABELS = ("target", "labels")


@cache
def _required(forward: Callable[..., Any]) -> frozenset[str]:
    """The names of the parameters of a function that have no default."""
    parameters = signature(forward).parameters
    return frozenset(name for name, p in parameters.items() if p.default is p.empty)


DIVERGENCES = "forward", "reverse"


def kl(student: Tensor, teacher: Tensor, temperature: float, direction: str) -> Tensor:
    """T^2 KL(softmax(teacher / T) || softmax(student / T)), mean over tokens, in fp32; logits [...,
    V]. The `reverse` one, as in MiniLLM, has the two exchanged. The gradient of the `forward` one
    with respect to the student's logits is T (softmax(s / T) - softmax(t / T)) / tokens. The factor
    T^2 makes its size roughly independent of T."""
    if student.shape != teacher.shape:
        raise ValueError(
            f"the teacher gives logits {list(teacher.shape)}, the model {list(student.shape)}; "
            "distillation needs a teacher with the same vocabulary"
        )
    both = student, teacher
    logs = [F.log_softmax(x.flatten(0, -2).float() / temperature, dim=-1) for x in both]
    of, target = logs if direction == "forward" else logs[::-1]
    return temperature**2 * F.kl_div(of, target, reduction="batchmean", log_target=True)


def squarehead(student: Tensor, teacher: Tensor) -> Tensor:
    """mean (s - t)^2 / (mean t^2 + 2^-7): SquareHead, arXiv 2310.06927. Hidden states [..., C]."""
    s, t = student.float(), teacher.float()
    return (s - t).square().mean() / (t.square().mean() + 2.0**-7)


def tinybert(student: Tensor, teacher: Tensor) -> Tensor:
    """mean (s - t)^2, TinyBERT's loss of hidden states (arXiv 1909.10351).

    TinyBERT's loss on attention maps is left out, because fused attention never computes them.
    """
    return (student.float() - teacher.float()).square().mean()


def mobilebert(student: Tensor, teacher: Tensor) -> Tensor:
    """MobileBERT's feature map transfer in its decomposed form (arXiv 2004.02984).

    It is the squared error of the states normalised over C, plus the squared error of their means
    and the absolute error of their variances.
    """
    s, t = student.float(), teacher.float()
    width = (s.shape[-1],)
    shape = (F.layer_norm(s, width) - F.layer_norm(t, width)).square().mean()
    level = (s.mean(-1) - t.mean(-1)).square().mean()
    spread = (s.var(-1, correction=0) - t.var(-1, correction=0)).abs().mean()
    return shape + level + spread


LAYER_LOSSES = {"squarehead": squarehead, "tinybert": tinybert, "mobilebert": mobilebert}


@dataclass(frozen=True, kw_only=True)
class Config(base.Config):
    """Options of distillation; the defaults are those of AST's recipe.

    task_weight: weight of the model's own loss. kl_weight: weight of the logits' KL divergence.
    temperature: temperature of the divergence. divergence: `forward` or `reverse` KL.
    layer_weight: weight of the sum of the hidden-state losses. layer_loss: `squarehead`, `tinybert`
        or `mobilebert`. layer_modules: globs on the modules whose outputs are compared.

    If kl_weight and layer_weight are 0, there is no teacher.
    """

    task_weight: float = base.number(0.33, 0)
    kl_weight: float = base.number(0.67, 0)
    temperature: float = base.number(2.0, 1e-3, 1e3)
    divergence: str = base.choice("forward", DIVERGENCES)
    layer_weight: float = base.number(0.0, 0)
    layer_loss: str = base.choice("squarehead", LAYER_LOSSES)
    layer_modules: tuple[str, ...] = BLOCKS

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.layer_modules, str):
            raise ValueError(f"layer_modules must be a list of globs, got {self.layer_modules!r}")
        object.__setattr__(self, "layer_modules", tuple(self.layer_modules))
        weights = {n: getattr(self, n) for n in ("task_weight", "kl_weight", "layer_weight")}
        if not any(weights.values()):
            raise ValueError(f"{', '.join(weights)} are all 0; the loss needs at least one of them")


class Method(base.Method):
    """A method that can distil from a dense teacher. The teacher is not part of the model, so
    neither optimizer nor DDP sees it. It is a copy of the model before pruning, saved in
    `state_dict()`, unless `set_teacher` gave another. It runs only in training mode; in evaluation
    mode the loss is the task's alone."""

    Config = Config
    teacher: nn.Module | None = None
    teacher_is_given = False
    compared: Mapping[str, nn.Module] = {}  # modules with a hidden-state loss, by name

    def set_teacher(self, teacher: nn.Module) -> None:
        """Distil from `teacher`, which is frozen in place, instead of from a copy of the model. The
        teacher takes the model's batches, without labels unless its `forward` requires them, and
        returns (logits, ...) or an object with `.logits`. Call this before the first step and again
        before resuming, because a given teacher is not saved."""
        self.teacher, self.teacher_is_given = _frozen(teacher), True

    @torch.no_grad()
    def convert(self, model: nn.Module, dtype: torch.dtype | None = None) -> base.Report:
        """Keep a copy of the unpruned model as teacher, then convert as the base class does."""
        config = self.config
        sharding.check_unsharded(model)  # else it could not be copied
        if self.teacher is model:
            raise ValueError("the teacher is the model itself; give set_teacher a copy of it")
        compared = _matching(model, config.layer_modules) if config.layer_weight else {}
        teacher = self.teacher
        if teacher is None and (config.kl_weight or config.layer_weight):
            teacher = _frozen(copy.deepcopy(model))
            ranks.take_from_rank_0(itertools.chain(teacher.parameters(), teacher.buffers()))
        report = super().convert(model, dtype)
        self.teacher, self.compared = teacher, compared
        return report

    @property
    def loss_name(self) -> str:
        """The terms of the loss and their weights, `0.33 task + 0.67 kl` for example."""
        weights = {n: getattr(self.config, f"{n}_weight") for n in ("task", "kl", "layer")}
        return " + ".join(f"{weight:g} {name}" for name, weight in weights.items() if weight)

    def micro_batch_loss(self, model: nn.Module, batch: dict[str, Any]) -> Tensor:
        """The weighted sum of the module docstring on one micro-batch. Raises ValueError if the
        teacher has another vocabulary, or lacks a hidden state."""
        if self.teacher is None or not getattr(model, "training", True):  # or a plain function
            return super().micro_batch_loss(model, batch)
        with torch.no_grad(), _outputs(self._compared_in_teacher()) as wanted:
            needed = _required(type(self.teacher).forward)
            given = {k: v for k, v in batch.items() if k not in _LABELS or k in needed}
            try:
                teacher_logits = _logits(self.teacher(**given))
            except IndexError as error:  # raised by the teacher's embedding
                raise ValueError(
                    "the teacher's vocabulary lacks tokens of the batch; distillation needs a "
                    "teacher with the same vocabulary"
                ) from error
        with _outputs(self.compared) as found:
            output = model(**batch)
            loss = self.config.task_weight * base.loss_of(output)
        if self.config.kl_weight:
            options = self.config.temperature, self.config.divergence
            value = kl(_logits(output), teacher_logits, *options)
            loss = loss + self.config.kl_weight * value
        if self.config.layer_weight:
            loss = loss + self.config.layer_weight * self._layer_loss(found, wanted)
        return loss

    def _compared_in_teacher(self) -> dict[str, nn.Module]:
        assert self.teacher is not None
        modules = dict(self.teacher.named_modules())
        missing = sorted(self.compared.keys() - modules.keys())
        if missing:
            raise ValueError(f"the teacher has no module {missing[0]}; change layer_modules")
        return {name: modules[name] for name in self.compared}

    def _layer_loss(self, found: dict[str, Tensor], wanted: dict[str, Tensor]) -> Tensor:
        compare = LAYER_LOSSES[self.config.layer_loss]
        terms = []
        for name in self.compared:
            if name not in found or found[name].requires_grad < torch.is_grad_enabled():
                raise ValueError(
                    f"the hidden state of {name} has no gradient, as in a compiled or reentrantly "
                    "checkpointed model; set layer_weight=0 or turn these off"
                )
            if found[name].shape != wanted[name].shape:
                raise ValueError(
                    f"{name} gives {list(found[name].shape)}, the teacher's "
                    f"{list(wanted[name].shape)}; change layer_modules"
                )
            terms.append(compare(found[name], wanted[name]))
        return torch.stack(terms).sum()

    def finalize(self, model: nn.Module) -> nn.Module:
        self.teacher = None
        return super().finalize(model)

    @property
    def _own_teacher(self) -> nn.Module | None:
        """The teacher if it is the method's own copy of the model."""
        return None if self.teacher_is_given else self.teacher

    def _check_state(self, step: int) -> None:
        """Warn that the teacher is the model as `convert` found it: rightly so if that was the same
        when the training began, the released weights for example."""
        if self._own_teacher is not None:
            effect = "the teacher is a copy of the model before convert in this process"
            warnings.warn(without_state(step, effect), stacklevel=4)

    def state_dict(self) -> dict[str, Any]:
        """The base class's state, and the teacher's weights if it is the method's own copy."""
        own = self._own_teacher
        return super().state_dict() | ({} if own is None else {"teacher": own.state_dict()})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        own = self._own_teacher
        if (own is None) == ("teacher" in state):
            raise ValueError(
                "this checkpoint was saved with another kind of teacher (the method's own copy, a "
                "given one, or none); resume with the same kind"
            )
        if own is not None:
            own.load_state_dict(state["teacher"])


def _frozen(teacher: nn.Module) -> nn.Module:
    for parameter in teacher.parameters():
        parameter.grad = None
    return teacher.requires_grad_(False).eval()


def _matching(model: nn.Module, globs: tuple[str, ...]) -> dict[str, nn.Module]:
    modules = dict(model.named_modules())
    matching = {n: m for n, m in modules.items() if any(fnmatchcase(n, g) for g in globs)}
    if not matching:
        names = [n for n in modules if n]
        raise ValueError(
            f"no module matches layer_modules={list(globs)}; modules are: {some_names(names)}"
        )
    return matching


def _logits(output: Any) -> Tensor:
    return output.logits if hasattr(output, "logits") else output[0]


@contextmanager
def _outputs(modules: Mapping[str, nn.Module]) -> Iterator[dict[str, Tensor]]:
    """A context that collects the (first) outputs of these modules in a forward pass, by name."""
    outputs: dict[str, Tensor] = {}

    def keep(name: str, module: nn.Module, args: Any, output: Any) -> None:
        outputs[name] = output[0] if isinstance(output, tuple) else output

    with ExitStack() as hooks:
        for name, module in modules.items():
            hooks.enter_context(module.register_forward_hook(partial(keep, name)))
        yield outputs
