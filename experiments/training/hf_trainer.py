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

Under FSDP2 (`fsdp=True` in the arguments, or accelerate's plugin) masks are sharded with their
weights, and a distilling method's teacher as well. There the Trainer makes the optimizer itself:
`Trainer(..., optimizer_cls_and_kwargs=callback.optimizer_cls_and_kwargs)`. Its checkpoints hold the
layers in its own files, and `trainer.save_model()` writes the plain model without `finalize`.
"""

from __future__ import annotations

import copy
import functools
import types
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import (
    PreTrainedModel,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from experiments.support import checkpoint
from experiments.training import sharded_checkpoint
from experiments.training.sharding import fill, shard, without_numbers
from methods import Method
from methods.nn import base, compressed, conversion, distillation, sharding, slorb
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
            layers = method.sparse_layers.items()
            save = functools.partial(_save_plain, {n: without_numbers(x, x) for n, x in layers})
            # A bound method: a copy of the model gets its own.
            model.save_pretrained = types.MethodType(save, model)  # type: ignore[method-assign]
        self._hook = model.register_load_state_dict_post_hook(_expect_plain)
        self._distilled = 0  # forward passes of this step
        if isinstance(method, distillation.Method) and method.teacher is not None:
            self._take_loss(method)

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, None]:
        """The method's optimizer for `Trainer(..., optimizers=...)`, by the arguments: AdamW, or
        the method's form of it. Matrices are decayed, biases and norms are not."""
        options = self._optimizer_options()
        return self.method.optimizer(options.pop("params"), **options), None

    @property
    def optimizer_cls_and_kwargs(self) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        """The same for `Trainer(..., optimizer_cls_and_kwargs=...)`, which makes it, as it must
        under FSDP."""
        return type(self.optimizers[0]), self._optimizer_options()

    def _optimizer_options(self) -> dict[str, Any]:
        args = self.args
        return {
            "params": param_groups(self.model.named_parameters(), args.weight_decay),
            "lr": args.learning_rate,
            "betas": (args.adam_beta1, args.adam_beta2),
            "eps": args.adam_epsilon,
        }

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

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        _check_sharding(args)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        _check_sharding(args)
        self._check(args, state)
        self._share_teacher()
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

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Called before a checkpoint is saved."""
        if self._mesh() is not None:
            _give_states(getattr(kwargs["optimizer"], "optimizer", kwargs["optimizer"]))

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
        found = self.method.state_dict()
        if self._mesh() is not None:
            found = _gathered(found, state.is_world_process_zero)  # by all ranks
        if state.is_world_process_zero:
            if self._mesh() is None:  # else they are in the Trainer's own files
                layers = self.method.sparse_layers.items()
                found["layers"] = {name: layer.state_dict() for name, layer in layers}
            path = self._folder(args, state) / STATE
            checkpoint.write_atomic(path, lambda p: torch.save(found, p))

    def _load(self, path: Path, args: TrainingArguments) -> None:
        found = torch.load(path, map_location="cpu", weights_only=True)
        layers = found.pop("layers", {})
        if self._mesh() is None:
            if layers.keys() != self.method.sparse_layers.keys():
                raise ValueError(f"{path} is of other converted layers; set include as it was")
            for name, layer in self.method.sparse_layers.items():
                layer.load_state_dict(layers[name])
        self.method.load_state_dict(sharded_checkpoint.placed(found, self.method.state_dict()))

    def _mesh(self) -> Any:
        """The ranks that share the weights; None: each has all of them."""
        parameter: Any = next(self.model.parameters())
        return parameter.device_mesh if sharding.is_sharded(parameter) else None

    def _share_teacher(self) -> None:
        """Let the ranks share the teacher's weights if they share the model's."""
        teacher, mesh = getattr(self.method, "teacher", None), self._mesh()
        if teacher is None or mesh is None:
            return
        if not any(map(sharding.is_sharded, teacher.parameters())):
            shard(teacher, mesh)

    def _check(self, args: TrainingArguments, state: TrainerState) -> None:
        """Refuse settings under which the method would silently be another one."""
        total = self.method.config.total_steps
        if total not in (0, state.max_steps):
            raise ValueError(
                f"the method was built with total_steps={total}, but the Trainer will take "
                f"{state.max_steps} steps; make them equal"
            )
        shared = self._mesh() is not None
        if args.fsdp and not shared:
            raise ValueError("accelerate has not sharded the model: it does so on GPUs alone")
        if args.world_size > 1 and not shared and args.ddp_broadcast_buffers is not False:
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


def _check_sharding(args: TrainingArguments) -> None:
    """Refuse ways of sharding in which masks do not follow their weights."""
    if args.deepspeed:
        raise ValueError("weights that deepspeed shards cannot be pruned; use FSDP2 (fsdp=True)")
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
            f"FSDP with {name} does not serve pruned weights; set fsdp_config={{'version': 2, "
            "'cpu_ram_efficient_loading': False}, without cpu_offload"
        )


def _give_states(optimizer: torch.optim.Optimizer) -> None:
    """Give parameters that had no gradient yet, such as SLoPe's adapters, the state that their
    first step would begin with: torch does not load sharded states from which some are missing."""
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    known = [p for p in trained if optimizer.state.get(p)]
    for parameter in [p for p in trained if not optimizer.state.get(p)] if known else ():
        optimizer.state[parameter] = {
            key: torch.zeros_like(parameter if value.shape == known[0].shape else value)
            for key, value in optimizer.state[known[0]].items()
        }


def _gathered(state: Any, keep: bool) -> Any:
    """`state` with whole tensors, on the CPU, in the place of sharded ones; on ranks that do not
    `keep` them, with nothing there."""
    if isinstance(state, dict):
        return {key: _gathered(value, keep) for key, value in state.items()}
    if not sharding.is_sharded(state):
        return state
    whole = sharding.full(state)
    return whole.cpu() if keep else None


def plain_state(
    model: nn.Module, state: dict[str, Tensor], shapes: dict[str, SparseLinear] | None = None
) -> dict[str, Tensor]:
    """The state dict of the plain model of the same function, made of `state`, that of `model`.

    shapes: the sparse layers without their numbers, for those that are sharded.
    """
    for name, layer in model.named_modules():
        kinds = SparseLinear | compressed.SparsePlusLowRank | slorb.BoostedLinear
        if isinstance(layer, kinds):
            # accelerate wraps blocks whose activations are computed again.
            name = name.replace("_checkpoint_wrapped_module.", "")
            if shapes and isinstance(layer, sharding.ShardedLayer):
                twin: nn.Module = copy.deepcopy(shapes[name])
                fill(twin, {key: state[f"{name}.{key}"] for key in twin.state_dict()})
            else:
                twin = copy.deepcopy(layer)
            if isinstance(twin, SparseLinear):
                with torch.no_grad():
                    twin.restore()
            compressed.merge(slorb.merge(twin))
            conversion.release(twin)
            for key in [key for key in state if key.rpartition(".")[0] == name]:
                del state[key]
            state |= {f"{name}.{key}": value.cpu() for key, value in twin.state_dict().items()}
    return state


def _save_plain(
    shapes: dict[str, SparseLinear],
    self: PreTrainedModel,
    save_directory: Any,
    is_main_process: bool = True,
    state_dict: dict[str, Tensor] | None = None,
    **options: Any,
) -> Any:
    """`PreTrainedModel.save_pretrained` with plain weights in the place of converted ones."""
    own = self.state_dict() if state_dict is None else state_dict
    state = plain_state(self, {name: sharding.full(x) for name, x in own.items()}, shapes)
    return type(self).save_pretrained(self, save_directory, is_main_process, state, **options)


def _expect_plain(model: nn.Module, incompatible: Any) -> None:
    """Drop from a loader's report, in place, the names by which a plain checkpoint differs: the
    callback loads what these stand for."""
    layers = [n for n, layer in model.named_modules() if isinstance(layer, SparseLinear)]
    for keys in incompatible:
        keys[:] = [key for key in keys if key.rpartition(".")[0] not in layers]
