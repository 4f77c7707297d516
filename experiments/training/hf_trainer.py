"""Train with a sparse method inside `transformers.Trainer`.

    method = methods.build("s_ste", include=["*mlp*"], total_steps=1000)
    arguments = TrainingArguments(max_steps=1000, ...)
    callback = MethodCallback(method, model, arguments)  # converts the model, before the Trainer,
                                                         # unless the method has done so already
    trainer = Trainer(model, arguments, callbacks=[callback], optimizers=callback.optimizers, ...)
    trainer.train()
    method.finalize(model)  # plain linears, zeros written out
    trainer.save_model()

It drives every method. `callback.optimizers` is the method's AdamW with the settings of the
arguments; without it the Trainer makes its own, which serves all methods but those with an update
rule of their own (AST, STEP). The loss of a distilling method takes the place of the model's own in
the forward passes of training, so evaluation and logs of it are the task's. It is a mean over
micro-batches: models that count their loss over the tokens of a whole step do not do so then.

A model of transformers is saved as the plain one of the same function: weights in use written out,
zeros included, low-rank terms added to them. So checkpoints, and what `trainer.save_model()`
writes, are what `from_pretrained` reads. What a training goes on with (dense weights under the
masks, masks, compressed values) lies beside, in the checkpoint's `method_state.pt`.

Our own causal models go in as `models.hf.ForTrainer(model)`.
"""

from __future__ import annotations

import copy
import functools
import types
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    PreTrainedModel,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from experiments.support import checkpoint
from methods import Method
from methods.nn import base, compressed, conversion, distillation, slorb
from methods.nn.linear import SparseLinear
from models.groups import param_groups

STATE = "method_state.pt"


class MethodCallback(TrainerCallback):
    """Calls `method` at its points of the training loop, and saves and loads its state.

    The method's metrics join the Trainer's training logs: those that are printed and those in
    `trainer.state.log_history`. Loggers that were given to the Trainer as `report_to` see a log
    before any other callback does, and so without them.
    """

    def __init__(
        self,
        method: Method,
        model: nn.Module,
        args: TrainingArguments,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Convert `model`, in place and on the Trainer's device, if `method` has not done so.

        Args:
            args: those of the Trainer. Under torchrun they open the process group in which all
                ranks convert the weights of rank 0.
            dtype: that of autocast, if the Trainer will use one (`bf16=True`); see
                `Method.convert`. For a model that is converted already it says nothing.
        Raises:
            ValueError: the method does not fit the model, or has converted another one.
        """
        self.method, self.model, self.args = method, model, args
        model.to(args.device)
        modules = dict(model.named_modules())
        if any(modules.get(name) is not layer for name, layer in method.layers.items()):
            raise ValueError("the method has converted another model; build a new one")
        self.report = method.report if method.layers else method.convert(model, dtype)
        if isinstance(model, PreTrainedModel):
            # A bound method: a copy of the model gets its own.
            model.save_pretrained = types.MethodType(_save_plain, model)  # type: ignore[method-assign]
        self._hook = model.register_load_state_dict_post_hook(_expect_plain)
        self._distilled = 0  # forward passes of this step
        if isinstance(method, distillation.Method) and method.teacher is not None:
            self._take_loss(method)

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, None]:
        """The method's optimizer for `Trainer(..., optimizers=...)`, by the arguments: AdamW, or
        the method's form of it. Matrices are decayed, biases and norms are not."""
        args = self.args
        groups = param_groups(self.model.named_parameters(), args.weight_decay)
        betas = args.adam_beta1, args.adam_beta2
        options: dict[str, Any] = {"lr": args.learning_rate, "betas": betas}
        return self.method.optimizer(groups, eps=args.adam_epsilon, **options), None

    def _take_loss(self, method: distillation.Method) -> None:
        """Give the model the method's loss in the forward passes of training."""
        model: Any = self.model
        kind = type(model)
        # The Trainer then divides each micro-batch's mean by their number.
        model.accepts_loss_kwargs = False

        @functools.wraps(kind.forward)  # for its signature: the Trainer drops other columns
        def forward(own: nn.Module, *args: Any, **batch: Any) -> Any:
            training = own.training and torch.is_grad_enabled() and "labels" in batch
            if own is not model or not training or args or method.teacher is None:
                return kind.forward(own, *args, **batch)
            kept: list[Any] = []

            def keeping(**inputs: Any) -> Any:
                kept.append(kind.forward(own, **inputs))
                return kept[0]

            loss = method.micro_batch_loss(keeping, batch)  # type: ignore[arg-type]
            self._distilled += 1
            kept[0].loss = loss
            return kept[0]

        # A bound method: a copy of the model gets its own, and keeps its own loss.
        model.forward = types.MethodType(forward, model)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._check(args, state)
        if state.global_step:
            path = Path(args.resume_from_checkpoint or self._folder(args, state)) / STATE
            if not path.is_file():
                raise ValueError(
                    f"{path} is missing; a checkpoint outside output_dir must be named in "
                    "TrainingArguments(resume_from_checkpoint=...), and be one of MethodCallback"
                )
            self._load(path, args)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Called after the Trainer has loaded the plain weights of the best model, if it was to."""
        self._hook.remove()
        if args.load_best_model_at_end and state.best_model_checkpoint:
            self._load(Path(state.best_model_checkpoint) / STATE, args)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._distilled = 0
        self.method.on_step_begin(state.global_step)
        self.method.open_micro_batch()

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Called between two micro-batches of a step."""
        self.method.open_micro_batch()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Called after clipping, which unscales."""
        if getattr(self.method, "teacher", None) is not None and not self._distilled:
            raise ValueError(
                "the method distils, but the Trainer has taken another loss than the model's: "
                "leave out compute_loss_func and label_smoothing_factor"
            )
        optimizer = kwargs["optimizer"]  # in accelerate's wrapper, which a method need not know
        if args.fp16 and not base.all_finite(kwargs["model"].parameters()):
            return  # the scaler will skip this step
        self.method.on_gradients(state.global_step, getattr(optimizer, "optimizer", optimizer))

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Called before `state.global_step` is raised."""
        self.method.on_step_end(state.global_step)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        logs = kwargs["logs"]
        if "loss" in logs:  # not those of an evaluation, or of the whole training
            metrics: Any = self.method.metrics()
            logs.update(metrics)
            state.log_history[-1].update(metrics)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero:
            layers = {n: layer.state_dict() for n, layer in self.method.sparse_layers.items()}
            found = {**self.method.state_dict(), "layers": layers}
            path = self._folder(args, state) / STATE
            checkpoint.write_atomic(path, lambda p: torch.save(found, p))

    def _load(self, path: Path, args: TrainingArguments) -> None:
        found = torch.load(path, map_location=args.device, weights_only=True)
        layers = found.pop("layers", {})
        if layers.keys() != self.method.sparse_layers.keys():
            raise ValueError(f"{path} is of other converted layers; set include as it was")
        for name, layer in self.method.sparse_layers.items():
            layer.load_state_dict(layers[name])
        self.method.load_state_dict(found)

    def _check(self, args: TrainingArguments, state: TrainerState) -> None:
        """Refuse settings under which the method would silently be another one."""
        total = self.method.config.total_steps
        if total not in (0, state.max_steps):
            raise ValueError(
                f"the method was built with total_steps={total}, but the Trainer will take "
                f"{state.max_steps} steps; make them equal"
            )
        if args.fsdp or args.deepspeed:
            raise ValueError("sharded weights cannot be pruned; train without fsdp and deepspeed")
        if args.world_size > 1 and args.ddp_broadcast_buffers is not False:
            raise ValueError(
                "every rank draws random bits of its own, from keys that are buffers; set "
                "ddp_broadcast_buffers=False"
            )
        if args.fp16 and not args.max_grad_norm:
            raise ValueError(
                "without clipping the Trainer may hand out gradients that still carry the loss "
                "scale; set max_grad_norm, or use bf16"
            )

    @staticmethod
    def _folder(args: TrainingArguments, state: TrainerState) -> Path:
        return Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"


def plain_state(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of the plain model of the same function, made of `state`, that of `model`."""
    for name, layer in model.named_modules():
        kinds = SparseLinear | compressed.SparsePlusLowRank | slorb.BoostedLinear
        if isinstance(layer, kinds):
            twin = copy.deepcopy(layer)
            if isinstance(twin, SparseLinear):
                with torch.no_grad():
                    twin.restore()
            compressed.merge(slorb.merge(twin))
            conversion.release(twin)
            for key in layer.state_dict():
                del state[f"{name}.{key}"]
            state |= {f"{name}.{key}": value.cpu() for key, value in twin.state_dict().items()}
    return state


def _save_plain(
    self: PreTrainedModel,
    save_directory: Any,
    is_main_process: bool = True,
    state_dict: dict[str, Tensor] | None = None,
    **options: Any,
) -> Any:
    """`PreTrainedModel.save_pretrained` with plain weights in the place of converted ones."""
    state = plain_state(self, dict(self.state_dict() if state_dict is None else state_dict))
    return type(self).save_pretrained(self, save_directory, is_main_process, state, **options)


def _expect_plain(model: nn.Module, incompatible: Any) -> None:
    """Drop from a loader's report, in place, the names by which a plain checkpoint differs: the
    callback loads what these stand for."""
    layers = [n for n, layer in model.named_modules() if isinstance(layer, SparseLinear)]
    for keys in incompatible:
        keys[:] = [key for key in keys if key.rpartition(".")[0] not in layers]
