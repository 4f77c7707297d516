"""The config of a fine-tuning: a pre-trained model, a task and a recipe."""

import dataclasses
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from common_kernels import check24
from experiments.config.compose import composed, plain
from experiments.config.initial import HFConfig, model_type, weight_files
from experiments.config.settings import DTYPES, EpochConfig, ImplConfig
from experiments.data.tokenizer import Encoding, folder_tokenizer
from experiments.finetuning import glue, squad
from experiments.runs.finished import MODES, WEIGHTS_OF, FinishedRun
from experiments.support.checkpoint import content_hash
from experiments.support.errors import UserError
from experiments.support.names import SEEDS, Identified, check_bounds, check_choices, digest
from experiments.support.typed import typed
from methods import Method, dense, one_shot

SQUAD = "squad"
TASKS = (*glue.TASKS, SQUAD)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Settings for fine-tuning on a task; conf/recipe/nano.yaml explains each. Batches are counted
    in sequences (SQuAD: windows). The learning rate rises from 0 and falls to 0."""

    epochs: int
    batch_size: int
    learning_rate: float
    warmup_fraction: float
    schedule: str
    weight_decay: float
    grad_clip: float
    dtype: str
    dropout: float
    max_length: int
    stride: int
    stride_is: str

    def __post_init__(self) -> None:
        count, real = (1, math.inf), (0, math.inf)
        check_bounds(
            self, "recipe.", epochs=count, batch_size=count, max_length=(8, math.inf), stride=real,
            learning_rate=real, weight_decay=real, grad_clip=real, warmup_fraction=(0, 1),
            dropout=(0, 0.999),
        )  # fmt: skip
        choices = {
            "schedule": ("cosine", "linear"),
            "dtype": DTYPES,
            "stride_is": ("overlap", "step"),
        }
        check_choices(self, "recipe.", choices)

    def train(self, samples: int) -> EpochConfig:
        """The settings of a training on `samples` sequences, with AdamW's usual betas and eps."""
        steps = self.epochs * math.ceil(samples / self.batch_size)
        same = ("batch_size", "learning_rate", "schedule", "weight_decay", "grad_clip", "dtype")
        return EpochConfig(
            steps=steps,
            samples=samples,
            warmup_steps=int(self.warmup_fraction * steps),
            betas=(0.9, 0.999),
            eps=1e-8,
            **{name: getattr(self, name) for name in same},
        )


@dataclass(frozen=True)
class Checkpoint:
    """A transformers checkpoint with what fine-tuning uses of `FinishedRun`'s interface."""

    config: HFConfig
    method: str = "dense"

    longest: None = None

    @property
    def config_hash(self) -> str:
        return f"{self.config.fingerprint} {self.config.tokenizer_fingerprint}"

    def model(self, weights: str = "sparse") -> nn.Module:
        # A checkpoint has only one kind of weights.
        bert = model_type(self.config.folder) == "bert"
        return self.config.build_ours() if bert else self.config.build()

    def tokenizer(self) -> Encoding:
        return folder_tokenizer(str(self.config.folder))

    def method_for(
        self,
        model: nn.Module,
        mode: str,
        total_steps: int,
        seed: int,
        dtype: torch.dtype | None = None,
    ) -> Method:
        if mode == "sparse":
            raise UserError(
                f"model.path={self.config.path} has no sparse method: set mode=dense, or masked "
                "if its weights are 2:4, or train it with a method (`python -m "
                "experiments.distill`) and give that run"
            )
        options: Any = {"include": "all", "total_steps": total_steps, "seed": seed}
        method: Method = dense.Method(dense.Config(**options))
        if mode == "masked":
            there = method.matching_linears(model)
            sparse = tuple(name for name, layer in there.items() if not check24(layer.weight))
            if not sparse:
                raise UserError(
                    f"mode=masked, but of the {len(there)} linears of model.path="
                    f"{self.config.path} none is 2:4; set mode=dense"
                )
            method = one_shot.Method(one_shot.Config(**{**options, "include": sparse}))
        method.convert(model, dtype)
        return method


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig(Identified):
    """A fine-tuning on one task. source: the finished run in the directory `run`, or a transformers
    checkpoint. weights: those to fine-tune, `sparse` or `dense`. data: a folder, or a hub id."""

    seed: int
    tier: str
    runs: Path
    run: str | None
    task: str
    mode: str
    weights: str
    source: Path | HFConfig
    data: str
    recipe: Recipe
    impl: ImplConfig

    def __post_init__(self) -> None:
        check_bounds(self, "", seed=SEEDS)
        known = {"task": TASKS, "mode": MODES, "weights": WEIGHTS_OF}
        check_choices(self, "", known)
        if self.weights == "dense" and self.mode != "dense":
            raise ValueError(
                f"weights=dense with mode={self.mode}: the dense weights under the masks can only "
                "be fine-tuned densely; set mode=dense"
            )

    def open(self) -> FinishedRun | Checkpoint:
        """The finished run or the checkpoint that is fine-tuned."""
        if isinstance(self.source, HFConfig):
            return Checkpoint(self.source)
        return FinishedRun.open(self.source)

    def data_hash(self) -> str | None:
        """Hash of the task's files in a folder, which must be there; None for data of the hub."""
        if not glue.is_folder(self.data):
            return None
        if self.task == SQUAD:
            return content_hash(squad.files(self.data))
        return content_hash(glue.files(self.task, self.data).values())

    def weights_hash(self) -> str:
        """Hash of the weights that are fine-tuned."""
        if isinstance(self.source, HFConfig):
            return self.source.fingerprint
        return digest(weight_files(self.source, "dense"))

    def _settings(self) -> dict[str, Any]:
        return {
            "task": self.task,
            "mode": self.mode,
            "weights": self.weights,
            "data": self.data_hash() or self.data,
            "recipe": {self.task: dataclasses.asdict(self.recipe)},
        }

    def identity(self) -> dict[str, Any]:
        """Everything that the result depends on; for a run its config, but not its weights."""
        return {"seed": self.seed, "source": self.open().config_hash, **self._settings()}

    def directory(self) -> Path:
        """`<run>/finetune/<task>-<mode>-<hash without the seed>/seed<seed>`, where `<run>` is the
        run's directory, or `<runs>/<name>` for a checkpoint."""
        settings = self._settings()
        if isinstance(self.source, HFConfig):
            home = self.runs / Path(self.source.path).resolve().name
            settings["source"] = self.open().config_hash
        else:
            home = self.source
        name = f"{self.task}-{self.mode}-{digest(settings)[:8]}"
        return home / "finetune" / name / f"seed{self.seed}"

    def as_dict(self) -> dict[str, Any]:
        """The whole resolved config as plain values."""
        return {
            **self.identity(),
            "run": self.run,
            "model": {"path": self.source.pinned if isinstance(self.source, HFConfig) else None},
            "data": {"source": self.data},
            "tier": self.tier,
            "runs": str(self.runs),
            "impl": dataclasses.asdict(self.impl),
        }


# ------------------------------------------------------------------ configuration


def freeze_finetuning(composition: Any) -> FinetuneConfig:
    """The `FinetuneConfig` of a composed `DictConfig`."""
    as_given = ("seed", "tier", "runs", "run", "task", "mode", "weights", "impl")
    groups = plain(composition, "data", "model", "recipe", *as_given)
    run, task, path = groups["run"], str(groups["task"]), groups["model"]["path"]
    if (run is None) == (path is None):
        raise UserError(
            "give either run=DIR, the directory of a finished run, or model.path=FOLDER, a "
            "checkpoint of transformers"
        )
    values = {
        **{key: groups[key] for key in as_given},
        "source": str(run) if path is None else typed(HFConfig, "model", groups["model"]),
        "data": groups["data"].get("source") or (squad.HUB if task == SQUAD else glue.HUB),
        "recipe": _for_task(groups["recipe"], task),
    }
    return typed(FinetuneConfig, "", values)


def _for_task(recipe: dict[str, Any], task: str) -> dict[str, Any]:
    """The recipe for one task: settings that differ by task are replaced by that task's values."""
    chosen = dict(recipe)
    for key, by_task in recipe.items():
        if isinstance(by_task, dict):
            if by_task.keys() - {*TASKS, "default"} or not by_task.keys() & {task, "default"}:
                raise UserError(
                    f"recipe.{key} differs by task, but has {', '.join(map(str, by_task))}; it "
                    f"takes default and {', '.join(TASKS)}"
                )
            chosen[key] = by_task.get(task, by_task.get("default"))
    return chosen


load = partial(composed, "finetune", freeze_finetuning)
