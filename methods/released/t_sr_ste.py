"""FST as its released code goes on when it was stopped in the dense phase and started again.

That code (github.com/thu-ml/2by4-pretrain-acc-examples, v1/nanoGPT) keeps masks, counters and the
phase as attributes of Parameters (sparse_ops.py), which no checkpoint has, and enters the dense
phase where the number of the iteration equals 250,000 (train.py). Started again from any later
checkpoint it is sparse, and stays so: new masks at once and then every `refresh_every` steps from
there, MVUE, masked decay. The dense phase is lost, and no message says so.

Here the run goes through, and halfway through its dense phase it does what a process does that
starts there. Weights, Adam's moments and the schedule of the learning rate are in that code's
checkpoint and continue; the batches, which it would draw from the beginning again, here go on, too.
The model ends 2:4 sparse and is evaluated so, as in that code's training loop.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import t_sr_ste

Config = t_sr_ste.Config


class Method(t_sr_ste.Method):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if not config.dense_fraction or config.dense_phase != "end":
            raise ValueError(
                f"dense_fraction={config.dense_fraction:.3g} and dense_phase={config.dense_phase}; "
                "released.t_sr_ste is about a dense phase at the end"
            )
        # The step that the new process begins with.
        self.dense_stop = (int(self.dense_start) + config.total_steps) // 2

    @torch.no_grad()
    def on_step_begin(self, step: int) -> None:
        if self.dense and not self.dense_at(step):
            for layer in self.sparse_layers.values():
                layer.refresh_mask()  # its counters are at zero
        super().on_step_begin(step)

    def _chooses(self, step: int) -> bool:
        begun = int(self.dense_stop) if step >= self.dense_stop else 0
        return (step + 1 - begun) % self.mask_period == 0
