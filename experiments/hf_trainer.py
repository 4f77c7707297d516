"""Train with a sparse method inside `transformers.Trainer`.

    method = methods.build("s_ste", include=["*mlp*"], total_steps=1000)
    arguments = TrainingArguments(max_steps=1000, ...)
    callback = MethodCallback(method, model, arguments)  # converts the model, before the Trainer
    trainer = Trainer(model, arguments, callbacks=[callback], ...)
    trainer.train()
    method.finalize(model)  # plain linears, zeros written out
    trainer.save_model()

The Trainer's optimizer and loss serve all methods but two kinds. One with an update rule of its
own gets its optimizer: `Trainer(..., optimizers=(method.optimizer(model.parameters(), lr=...),
None))`. One that changes the loss (distillation) is refused; `experiments.distill` trains those.

Checkpoints hold the converted model, as the Trainer saves it, and beside it `method_state.pt`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from experiments import checkpoint
from methods import Method, base, distillation

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
        """Convert `model`, in place and on the Trainer's device.

        Args:
            args: those of the Trainer. Under torchrun they open the process group in which all
                ranks convert the weights of rank 0.
            dtype: that of autocast, if the Trainer will use one (`bf16=True`); see
                `Method.convert`.
        Raises:
            ValueError: the method does not fit the model, or has a loss of its own.
        """
        config = method.config
        if isinstance(method, distillation.Method) and (config.kl_weight or config.layer_weight):
            raise ValueError(
                f"kl_weight={config.kl_weight}, layer_weight={config.layer_weight}: the Trainer "
                "computes the model's own loss, without distillation; set both to 0, or train "
                "with experiments.distill"
            )
        self.method = method
        self.report = method.convert(model.to(args.device), dtype)

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
            self.method.load_state_dict(
                torch.load(path, map_location=args.device, weights_only=True)
            )

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.method.on_step_begin(state.global_step)
        self.method.open_micro_batch()

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Between two micro-batches of a step."""
        self.method.open_micro_batch()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """After clipping, which unscales."""
        optimizer = kwargs["optimizer"]  # in accelerate's wrapper, which a method need not know
        if args.fp16 and not base.all_finite(kwargs["model"].parameters()):
            return  # the scaler will skip this step
        self.method.on_gradients(state.global_step, getattr(optimizer, "optimizer", optimizer))

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Before `state.global_step` is raised."""
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
            found = self.method.state_dict()
            path = self._folder(args, state) / STATE
            checkpoint.write_atomic(path, lambda p: torch.save(found, p))

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
