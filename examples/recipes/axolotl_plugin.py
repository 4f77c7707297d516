"""Train with a 2:4 method in axolotl. Put this file on the PYTHONPATH, and in the YAML:

    plugins: [axolotl_plugin.Sparse24]
    sparse24: {method: s_ste, include: ffn}    # and the method's other options

Checked against the interface of axolotl 0.19 (`BasePlugin`), by transformers' Trainer alone. LoRA,
DeepSpeed and FSDP1 are not meant.
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

import methods
from methods.integrations.trainer import MethodCallback


class Arguments(BaseModel):
    sparse24: dict[str, Any] = {"method": "s_ste"}


class Sparse24(BasePlugin):
    def get_input_args(self) -> str:
        return f"{__name__}.Arguments"

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[MethodCallback]:
        """Convert the model; the Trainer has no optimizer yet."""
        options = dict(cfg.sparse24)
        self.method = methods.build(options.pop("method"), **options)
        self.callback = MethodCallback(self.method, trainer.model, trainer.args)
        return [self.callback]

    def create_optimizer(self, cfg: Any, trainer: Any) -> Any:
        return self.callback.optimizers[0]

    def post_train(self, cfg: Any, model: Any) -> None:
        self.method.finalize(model)
