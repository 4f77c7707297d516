"""The config of an evaluation (experiments/evaluate.py) and the hash that it is known by."""

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from experiments.config.compose import composed, plain
from experiments.config.initial import HFConfig, weight_files
from experiments.config.settings import DTYPES, ImplConfig
from experiments.evaluation import zero_shot
from experiments.evaluation.perplexity import Text
from experiments.images.dataset import ImageConfig, load_images
from experiments.runs.finished import WEIGHTS_OF, FinishedRun
from experiments.support.errors import UserError
from experiments.support.names import Identified, check_bounds, check_choices
from experiments.support.typed import typed


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(Identified):
    """The config of an evaluation: the model's weights and what they are measured on
    (conf/evaluate.yaml explains each). path: `model.path`. source: `data.source`."""

    run: str | None
    path: str | None
    weights: str
    dtype: str
    ppl: str | None
    block_size: int | None
    tasks: tuple[str, ...]
    task_folder: str | None
    allow_code: bool
    num_fewshot: int | None
    limit: int | None
    images: str | None
    source: str | None
    seed: int
    tier: str
    runs: Path
    impl: ImplConfig

    def __post_init__(self) -> None:
        object.__setattr__(self, "tasks", zero_shot.expand(self.tasks))
        if (self.run is None) == (self.path is None):
            raise ValueError("give one of run=DIR (a finished run) and model.path=FOLDER")
        check_choices(self, "", {"weights": WEIGHTS_OF, "dtype": DTYPES})
        if self.images is not None:
            check_choices(self, "", {"images": ("val",)})
        if self.path is not None and (self.weights != "sparse" or self.images is not None):
            raise ValueError(
                "weights= and images= are for runs: a transformers folder has only its own weights "
                "of a language model"
            )
        if self.source is not None and self.images is None:
            raise ValueError("data.source is only for images; add images=val")
        count, seeds = (1, math.inf), (0, 2**32 - 1)  # the limit of numpy's generator
        check_bounds(
            self, "", block_size=(2, math.inf), num_fewshot=(0, math.inf), limit=count, seed=seeds
        )

    @cached_property
    def finished_run(self) -> FinishedRun | None:
        """The run that is evaluated; None for a folder of transformers."""
        return None if self.run is None else FinishedRun.open(Path(self.run))

    @cached_property
    def hf(self) -> HFConfig | None:
        """The transformers checkpoint that is evaluated; None for a run."""
        return None if self.path is None else HFConfig(self.path)

    @cached_property
    def text(self) -> Text | None:
        """The text that perplexity is measured on, or None."""
        return None if self.ppl is None else Text(self.ppl)

    @cached_property
    def image_data(self) -> ImageConfig:
        """The images to evaluate on, with the run's preprocessing."""
        run = self.finished_run
        if run is None or not isinstance(run.data, ImageConfig):
            raise UserError(f"images need a ViT, {self.run} was trained on text")
        if self.source is None:
            return run.data
        return dataclasses.replace(run.data, name="images", source=self.source)

    @cached_property
    def images_hash(self) -> str:
        """The fingerprint of the images, for which all of them are read: 6 GB of ImageNet."""
        return load_images(self.image_data, ("val",)).fingerprint

    @cached_property
    def files(self) -> dict[str, str]:
        """SHA-256 of the run's weight files by name, so that replaced weights are evaluated again;
        {} for a transformers folder, whose hashes are in `identity`."""
        run = self.finished_run
        return {} if run is None else weight_files(run.directory, self.weights)

    @property
    def kind(self) -> str:
        """The kind of weights: `sparse`, `dense`, or `stored` for those of a folder."""
        if self.finished_run is None:
            return "stored"
        return "dense" if self.finished_run.trained_with.capabilities.ends_dense else self.weights

    def identity(self) -> dict[str, Any]:
        """Everything that the result depends on, as plain values: hashes of the run's config or the
        folder's files, and of the content of text and images."""
        identity: dict[str, Any] = {"weights": self.weights, "dtype": self.dtype}
        if self.finished_run is not None:
            identity["run"] = self.finished_run.config_hash
        if self.hf is not None:
            identity["model"] = {
                "weights": self.hf.fingerprint,
                "tokenizer": self.hf.tokenizer_fingerprint,
                "block_size": self.hf.block_size,
            }
        if self.text is not None:
            identity["ppl"] = {**self.text.identity(), "block_size": self.block_size}
        if self.tasks:
            identity["zero_shot"] = {
                **zero_shot.identity(self.tasks, self.task_folder, self.allow_code),
                "num_fewshot": self.num_fewshot,
                "limit": self.limit,
                "seed": self.seed,
            }
        if self.images is not None:
            identity["images"] = {"split": self.images, "sha256": self.images_hash}
        return identity

    def directory(self) -> Path:
        """The directory of the result."""
        if self.finished_run is not None:
            return self.finished_run.directory / "evaluate" / self.digest()[:8]
        assert self.hf is not None
        return self.runs / "evaluate" / f"{self.hf.folder.resolve().name}-{self.digest()[:8]}"

    def as_dict(self) -> dict[str, Any]:
        """The whole config as plain values, for `result.json`."""
        values = dataclasses.asdict(self)
        del values["path"]
        data, model = {"source": values.pop("source")}, {"path": self.hf and self.hf.pinned}
        return {**values, "model": model, "data": data, "runs": str(self.runs)}


def freeze_evaluation(composition: Any) -> EvaluateConfig:
    """The `EvaluateConfig` of a composed `DictConfig`."""
    values = plain(composition, "model", "data", "impl")
    choices = {"path": values.pop("model")["path"], "source": values.pop("data")["source"]}
    return typed(EvaluateConfig, "", {**values, **choices})


load = partial(composed, "evaluate", freeze_evaluation)
