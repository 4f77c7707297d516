"""Train with a 2:4 method in torchtitan. Wrap the `ModelSpec` of your config's function:

    def llama3_8b_sparse() -> Trainer.Config:
        config = llama3_8b()
        steps = config.training.steps
        method = methods.build("fst", include=["*.feed_forward.w*"], total_steps=steps)
        config.model_spec = sparse(config.model_spec, method, "cuda")
        return config

Every rank first holds the whole model, because masks and scales follow from whole weights. After
the last step call `method.finalize`, on one GPU, or save as docs/own_loop.md shows for FSDP2.
Checked with the model and the optimizers of torchtitan 0.3 on one CPU, not with its trainer. Data
parallel training is meant, no pipeline or tensor parallelism, and no method that distils or has an
optimizer of its own; a resumed run has to load the method's state, too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

import methods


def sparse(spec: Any, method: methods.Method, device: str) -> Any:
    """The spec of the same model, converted before it is sharded, with the method's hooks."""
    step, begun = 0, -1

    def parallelize(model: Any, **how: Any) -> Any:
        model.to_empty(device=device)
        with torch.no_grad():
            model.init_weights(buffer_device=None)
        for layer in model.modules():
            if type(layer).__name__ == "Linear":  # torchtitan's: nn.Linear with a config
                layer.__class__ = nn.Linear
        print(method.convert(model, dtype=torch.bfloat16 if device == "cuda" else None))
        model = spec.parallelize_fn(model, **how)
        model.to_empty = lambda device: model  # torchtitan would initialise anew after this
        model.init_weights = lambda buffer_device=None: None
        model.register_forward_pre_hook(before_forward)
        return model

    def before_forward(model: nn.Module, _: Any) -> None:
        nonlocal begun
        if model.training:
            if begun < step:
                begun = step
                method.on_step_begin(step)
            method.open_micro_batch()

    def add_hooks(optimizers: Any, model_parts: Any, parallel_dims: Any) -> None:
        optimizers.register_step_pre_hook(
            lambda *_: method.on_gradients(step, list(optimizers.optimizers))
        )
        optimizers.register_step_post_hook(after_step)

    def after_step(*_: Any) -> None:
        nonlocal step
        method.on_step_end(step)
        step += 1

    return replace(spec, parallelize_fn=parallelize, post_optimizer_build_fn=add_hooks)
