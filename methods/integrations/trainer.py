"""Train with a sparse method inside `transformers.Trainer`.

    from methods.integrations.trainer import MethodCallback

    method = methods.build("s_ste", include="ffn")
    arguments = TrainingArguments(max_steps=1000, ...)  # the method's total_steps, too
    callback = MethodCallback(method, model, arguments)  # converts the model, before the Trainer,
                                                         # unless the method has done so already
    trainer = Trainer(model, arguments, callbacks=[callback], optimizers=callback.optimizers, ...)
    trainer.train()
    method.finalize(model)  # plain linears, zeros written out
    trainer.save_model()

It works with every method. `callback.optimizers` is the method's AdamW with the settings of the
arguments. Without it the Trainer creates its own, with which all methods work but AST, and STEP if
it is no AdamW. In training, the loss of a distilling method replaces the
model's own; in evaluation it is the task's loss. It is averaged over micro-batches, even for models
that would average over the tokens of a whole step.

A transformers model is saved as a plain model that computes the same: explicit zeros, and low-rank
terms added to the weights. So `from_pretrained` reads the checkpoints and what
`trainer.save_model()` writes. The state for continuing the training (dense weights under the masks,
masks, compressed values) is in the checkpoint's `method_state.pt`.

Under FSDP2 (`fsdp=True` in the arguments, or accelerate's plugin) masks and a distilling method's
teacher are sharded like the weights. There the Trainer must create the optimizer itself:
`Trainer(..., optimizer_cls_and_kwargs=callback.optimizer_cls_and_kwargs)`. Its own checkpoint files
hold the layers, and `trainer.save_model()` writes the plain model without `finalize`.
"""

import functools
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from transformers import TrainerCallback, TrainerState, TrainingArguments

from ..nn import base, distillation, matrices, ranks, sharding
from ..nn.linear import SparseLinear
from ..nn.optimizer import all_finite, each

STATE = "method_state.pt"


class MethodCallback(TrainerCallback):
    """Calls the hooks of `method` in the Trainer's loop, and saves and loads its state.

    The report on the conversion is printed once, on rank 0. The method's metrics are added to the
    Trainer's training logs, both printed and in `trainer.state.log_history`; there `loss_is` says
    of what the loss of a distilling method is the sum. Loggers given as `report_to` get a log
    before any other callback does, and therefore do not see them.
    """

    def __init__(
        self,
        method: base.Method,
        model: nn.Module,
        args: TrainingArguments,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Convert `model` in place, on the Trainer's device, unless `method` has already done so.
        Raises ValueError if the method does not fit the model, or has converted another one.

        Args:
            args: the Trainer's arguments. Under torchrun they open the process group in which all
                ranks convert the weights of rank 0.
            dtype: autocast's dtype, if the Trainer will use autocast (`bf16=True`); see
                `Method.convert`. It is ignored for a model that is already converted.
        """
        self.method, self.model, self.args = method, model, args
        model.to(args.device)
        modules = dict(model.named_modules())
        if any(modules.get(name) is not layer for name, layer in method.layers.items()):
            raise ValueError("the method has converted another model; build a new one")
        self.report = method.report if method.layers else self._convert(dtype)
        # It stays, for trainings that follow; on a finalized model it does nothing.
        model.register_load_state_dict_post_hook(_expect_plain)
        self._distilled = 0  # forward passes of this step
        if isinstance(method, distillation.Method) and method.teacher is not None:
            self._take_loss(method)

    def _convert(self, dtype: torch.dtype | None) -> base.Report:
        """Convert the model, with the Trainer's number of steps if the method has none."""
        method, steps = self.method, self.args.max_steps
        if not method.config.total_steps and steps > 0:
            method.config = replace(method.config, total_steps=steps)
        try:
            report = method.convert(self.model, dtype)
        except ValueError as error:
            if steps > 0 or "total_steps" not in str(error):
                raise
            raise ValueError(
                f"max_steps={steps} in the TrainingArguments, and the method needs the number of "
                "steps before the Trainer counts those of its epochs: set max_steps, or the "
                "method's total_steps"
            ) from error
        if ranks.place()[0] == 0:
            print(report)
        return report

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, None]:
        """The method's optimizer for `Trainer(..., optimizers=...)`, with the settings of the
        arguments: AdamW, or the method's variant of it. Biases and norms are not decayed."""
        options = self._optimizer_options()
        return self.method.optimizer(options.pop("params"), **options), None

    @property
    def optimizer_cls_and_kwargs(self) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        """The method's optimizer for `Trainer(..., optimizer_cls_and_kwargs=...)`, with which the
        Trainer creates it, as FSDP requires."""
        return type(self.optimizers[0]), self._optimizer_options()

    def _optimizer_options(self) -> dict[str, Any]:
        args, trained = self.args, [p for p in self.model.parameters() if p.requires_grad]
        return {
            "params": [
                {"params": [p for p in trained if p.dim() > 1], "weight_decay": args.weight_decay},
                {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
            ],
            "lr": args.learning_rate,
            "betas": (args.adam_beta1, args.adam_beta2),
            "eps": args.adam_epsilon,
        }

    def _take_loss(self, method: distillation.Method) -> None:
        """Make the model return the method's loss in the forward passes of training."""
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

        # A bound method, so that a copy of the model gets its own.
        model.forward = types.MethodType(forward, model)

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        _check_sharding(args)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        _check_sharding(args)
        self._check(args, state)
        if self.method.capabilities.needs_adamw:
            own, given = type(self.optimizers[0]), each(kwargs["optimizer"])[0]
            if type(given) is not own:
                raise ValueError(
                    f"the method trains with {own.__module__}.{own.__name__}, not with a "
                    f"{type(given).__name__}: pass Trainer(..., optimizers=callback.optimizers)"
                )
        self._share_teacher()
        if state.global_step:
            path = Path(args.resume_from_checkpoint or self._folder(args, state)) / STATE
            if not path.is_file():
                raise ValueError(
                    f"{path} is missing; resume from a checkpoint saved with MethodCallback, and "
                    "name one outside output_dir in TrainingArguments(resume_from_checkpoint=...)"
                )
            self._load(path)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called after the Trainer has loaded the plain weights of the best model, if requested."""
        if args.load_best_model_at_end and state.best_model_checkpoint:
            self._load(Path(state.best_model_checkpoint) / STATE)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._distilled = 0
        self.method.on_step_begin(state.global_step)
        self.method.open_micro_batch()

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called between two micro-batches of a step."""
        self.method.open_micro_batch()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called after clipping, which unscales."""
        if getattr(self.method, "teacher", None) is not None and not self._distilled:
            raise ValueError(
                "the method distils, but the Trainer used another loss than the model's: leave out "
                "compute_loss_func and label_smoothing_factor"
            )
        if args.fp16 and not all_finite(kwargs["model"].parameters()):
            return  # the scaler will skip this step
        self.method.on_gradients(state.global_step, kwargs["optimizer"])

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called before `state.global_step` is raised."""
        self.method.on_step_end(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called before a checkpoint is saved."""
        if self._mesh() is not None:
            _give_states(getattr(kwargs["optimizer"], "optimizer", kwargs["optimizer"]))

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logs = kwargs["logs"]
        if "loss" in logs:  # a training log, not that of an evaluation or of the end
            metrics: Any = self.method.metrics()
            if self._distilled and isinstance(self.method, distillation.Method):
                metrics["loss_is"] = self.method.loss_name
            logs.update(metrics)
            state.log_history[-1].update(metrics)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        layers = self.method.sparse_layers.items()
        found = _gathered(self.method.state_dict(), state.is_world_process_zero)  # by all ranks
        if state.is_world_process_zero:
            if self._mesh() is None:  # if sharded, they are in the Trainer's own files
                found["layers"] = {name: layer.state_dict() for name, layer in layers}
            path = self._folder(args, state) / STATE
            torch.save(found, path.with_suffix(".new"))
            path.with_suffix(".new").replace(path)

    def _load(self, path: Path) -> None:
        found = torch.load(path, map_location="cpu", weights_only=True)
        layers = found.pop("layers", {})
        self.method.check_state(found)
        if self._mesh() is None:
            if layers.keys() != self.method.sparse_layers.keys():
                raise ValueError(
                    f"{path} was saved with other converted layers; set include as it was then"
                )
            for name, layer in self.method.sparse_layers.items():
                try:
                    layer.load_state_dict(layers[name])
                except RuntimeError as error:
                    raise ValueError(
                        f"{path} does not fit {name}; resume with the options and model that it "
                        "was saved with"
                    ) from error
        self.method.load_state_dict(_placed(found, self.method.state_dict()))

    def _mesh(self) -> Any:
        """The mesh of the ranks that share the weights; None if each rank has all of them."""
        parameter: Any = next(self.model.parameters())
        return parameter.device_mesh if sharding.is_sharded(parameter) else None

    def _share_teacher(self) -> None:
        """Shard the teacher's weights if the model's are sharded."""
        teacher, mesh = getattr(self.method, "teacher", None), self._mesh()
        if teacher is None or mesh is None:
            return
        if not any(map(sharding.is_sharded, teacher.parameters())):
            lists = [m for m in teacher.modules() if isinstance(m, nn.ModuleList)]
            for part in (*(block for blocks in lists for block in blocks), teacher):
                fully_shard(part, mesh=mesh)

    def _check(self, args: TrainingArguments, state: TrainerState) -> None:
        """Raise ValueError for settings that would silently change the method."""
        total = self.method.config.total_steps
        if total not in (0, state.max_steps):
            raise ValueError(
                f"the method was built with total_steps={total}, but the Trainer will take "
                f"{state.max_steps} steps; make them equal"
            )
        shared = self._mesh() is not None
        if args.fsdp and not shared:
            raise ValueError(
                "accelerate has not sharded the model, which it does only on GPUs; use GPUs, or "
                "leave out fsdp"
            )
        if args.world_size > 1 and not shared and args.ddp_broadcast_buffers is not False:
            raise ValueError(
                "each rank's random keys are buffers, which must not be broadcast; set "
                "ddp_broadcast_buffers=False"
            )
        if args.fp16 and not args.max_grad_norm:
            raise ValueError(
                "without clipping the method may see gradients with the loss scale; "
                "set max_grad_norm, or use bf16"
            )

    @staticmethod
    def _folder(args: TrainingArguments, state: TrainerState) -> Path:
        return Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"


def _check_sharding(args: TrainingArguments) -> None:
    """Raise ValueError for ways of sharding in which masks would not follow their weights."""
    if args.deepspeed:
        raise ValueError("weights sharded by deepspeed cannot be pruned; use FSDP2 (fsdp=True)")
    plugin = AcceleratorState._shared_state.get("fsdp_plugin")
    if plugin is None:
        return
    wrong = {
        "version 1": getattr(plugin, "fsdp_version", 1) != 2,
        "cpu_ram_efficient_loading": plugin.cpu_ram_efficient_loading,  # knows no buffers
        "cpu_offload": isinstance(plugin.cpu_offload, CPUOffloadPolicy),
    }
    for name in (name for name, found in wrong.items() if found):
        raise ValueError(
            f"FSDP with {name} does not support pruned weights; set fsdp_config={{'version': 2, "
            "'cpu_ram_efficient_loading': False}, without cpu_offload"
        )


def _give_states(optimizer: torch.optim.Optimizer) -> None:
    """Give parameters without a gradient so far, such as SLoPe's adapters, the optimizer state that
    their first step would begin with: torch cannot load incomplete sharded states."""
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    known = [p for p in trained if optimizer.state.get(p)]
    for parameter in [p for p in trained if not optimizer.state.get(p)] if known else ():
        optimizer.state[parameter] = {
            key: torch.zeros_like(parameter if value.shape == known[0].shape else value)
            for key, value in optimizer.state[known[0]].items()
        }


def _gathered(state: Any, keep: bool) -> Any:
    """`state` with sharded tensors whole on the CPU, or None on ranks that do not `keep` them."""
    if isinstance(state, dict):
        return {key: _gathered(value, keep) for key, value in state.items()}
    if not sharding.is_sharded(state):
        return state
    whole = sharding.full(state)
    return whole.cpu() if keep else None


def _placed(state: Any, like: Any) -> Any:
    """`state` with each tensor sharded like the tensor at the same place in `like`."""
    if isinstance(state, dict):
        return {key: _placed(x, like.get(key, x)) for key, x in state.items()}
    return sharding.sharded_like(state, like) if isinstance(state, Tensor) else state


def _expect_plain(model: nn.Module, incompatible: Any) -> None:
    """Remove from a loader's report, in place, the keys in which a plain checkpoint differs; the
    callback loads that state."""
    layers = {n: layer for n, layer in model.named_modules() if isinstance(layer, SparseLinear)}
    plain = {matrices.plain_key(layer, n, "weight") for n, layer in layers.items()}
    for keys in incompatible:
        keys[:] = [k for k in keys if k not in plain and k.rpartition(".")[0] not in layers]
