"""Predict what a training needs: `python -m experiments.plan experiment=...`.

Prints the memory of a GPU by purpose, the number of GPUs that have enough, steps, tokens, and days
at the measured speed of the most similar model. Takes the settings of `experiments.pretrain` and,
through their experiment files, those of `distill` and `dino`. Needs no GPU, data or weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.config.compose import plain, typed
from experiments.config.driver import driver
from experiments.config.run import freeze
from experiments.planning.plan import Options, Planned, lines, plan
from experiments.planning.shapes import stand_in, transformers_config
from experiments.support.checkpoint import write_json


def freeze_plan(composed: Any) -> Planned:
    """The `Planned` of a composed `plan.yaml`."""
    options = typed(Options, "plan", plain(composed, "plan")["plan"])
    path = composed.model.get("path")
    if path is None:
        return Planned(freeze(composed), options)
    hf = transformers_config(path)
    with stand_in(hf) as folder:
        composed.model.path = folder
        return Planned(freeze(composed), options, hf, str(path))


@driver("plan", freeze_plan)
def main(planned: Planned) -> dict[str, Any]:
    found = plan(planned)
    print("\n".join(lines(found)))
    if planned.options.json is not None:
        write_json(Path(planned.options.json), found)
    return found


if __name__ == "__main__":
    main()
