"""Compare my method with these: one's own beside `dense` and `ste`, with the same seeds and data.

    python examples/compare_method.py
    python examples/compare_method.py --steps 400 --seeds 5

The method, STE whose masks are chosen only every tenth step, is the two classes below. An installed
package makes its own known to every command (docs/extending.md); here `methods.register` does.
"""

from __future__ import annotations

import argparse
import types
from dataclasses import dataclass, replace
from pathlib import Path

import methods
from experiments import compare, pretrain
from methods.nn import base
from methods.nn.linear import MaskedLinear

TINY = ("model=gpt2_pico", "data=stdlib", "data.vocab_size=512", "train=quickstart")


@dataclass(frozen=True, kw_only=True)
class Config(base.NMConfig):
    """Options: n, m, and refresh_every, the optimizer steps between masks."""

    refresh_every: int = 10


class Method(base.Method):
    Config = Config
    Linear = MaskedLinear

    @property
    def capabilities(self) -> base.Capabilities:
        return replace(super().capabilities, mask_period=self.config.refresh_every)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps of each run")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    mine = types.ModuleType("mine")
    mine.Config, mine.Method = Config, Method
    methods.register(mine)
    given = [*TINY, f"train.steps={options.steps}", "train.warmup_steps=1"]
    found: list[Path] = []
    for name in ("dense", "ste", "mine"):
        for seed in range(options.seeds):
            config = pretrain.load([*given, f"method={name}", f"seed={seed}"])
            pretrain.run(config, print)
            found.append(config.directory())
    compare.compare(found, "dense", "metrics.val_loss", Path("runs/compare"))


if __name__ == "__main__":
    main()
