"""Predict what a training needs: `python -m experiments.plan experiment=...`.

Prints the memory of each of `plan.gpus` GPUs by purpose. Takes the settings of
`experiments.pretrain` and, through experiment files, of `distill` and `dino`; needs no GPU or data.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors.torch import save_file

from experiments.config.compose import plain
from experiments.config.driver import driver
from experiments.config.run import freeze
from experiments.planning.plan import Options, Planned, lines, transformers_config
from experiments.support.typed import typed


def freeze_plan(composed: Any) -> Planned:
    """The `Planned` of a composed `plan.yaml`."""
    options = typed(Options, "plan", plain(composed, "plan")["plan"])
    path = composed.model.get("path")
    if path is None:
        return Planned(freeze(composed), options)
    hf = transformers_config(path)
    with TemporaryDirectory() as folder:  # a checkpoint with this config, but no weights
        hf.save_pretrained(folder)
        save_file({}, Path(folder) / "model.safetensors")
        composed.model.path = folder
        return Planned(freeze(composed), options, hf)


@driver("plan", freeze_plan)
def main(planned: Planned) -> None:
    print("\n".join(lines(planned)))


if __name__ == "__main__":
    main()
