"""FST as its released code behaves when it is resumed in the dense phase: it becomes sparse again.

That code (github.com/thu-ml/2by4-pretrain-acc-examples, v1/nanoGPT) keeps masks, counters and the
phase as attributes of Parameters (sparse_ops.py), which checkpoints do not contain, and enters the
dense phase only at the iteration number 250,000 (train.py). Resumed from a later checkpoint it is
sparse to the end, with new masks at once and every `refresh_every` steps, MVUE and masked decay.
The dense phase is lost without a message.

Here a single run does, halfway through its dense phase, what a process resumed there would do.
Weights, Adam's moments and the learning-rate schedule are in that code's checkpoint and continue.
It would draw the batches from the beginning again; here they continue, too. The model ends 2:4
sparse and is evaluated so, as in that code's training loop.
"""

from typing import Any

import torch

from .. import fst

Config = fst.Config


class Method(fst.Method):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if not config.dense_fraction or config.dense_phase != "end":
            raise ValueError(
                f"dense_fraction={config.dense_fraction:.3g} and dense_phase={config.dense_phase}; "
                "released.fst is about a dense phase at the end"
            )

    @property
    def dense_steps(self) -> tuple[float, float]:
        """The first dense step, and the step at which the resumed process begins."""
        start = int(super().dense_steps[0])
        return start, (start + self.config.total_steps) // 2

    @torch.no_grad()
    def on_step_begin(self, step: int) -> None:
        if self.dense and not self.dense_at(step):
            for layer in self.sparse_layers.values():
                layer.refresh_mask()  # the resumed process has its counters at zero
        super().on_step_begin(step)

    def _chooses(self, step: int) -> bool:
        stop = int(self.dense_steps[1])
        begun = stop if step >= stop else 0
        return (step + 1 - begun) % self.capabilities.mask_period == 0
