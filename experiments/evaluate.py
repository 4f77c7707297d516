"""What a trained model is worth: `python -m experiments.evaluate run=DIR ppl=wikitext2`.

    run=DIR              a finished run, or model.path=FOLDER, a causal model of transformers
    weights=sparse       as the method ended; dense: the dense master weights, where it keeps them
    ppl=wikitext2        perplexity on the test split of WikiText-2, of a FILE, or of standard input
                         (-), by the protocol of experiments/perplexity.py
    tasks=[arc_easy]     zero-shot tasks of lm-eval (experiments/zero_shot.py); ast and slope stand
                         for the tasks of these papers
    images=val           top-1 and top-5 on the validation images of the run, or of data.source

The density and the legality of every converted linear are measured with any of them, or alone.
Numbers are those of fp32 unless `impl.dtype` says otherwise. `result.json` goes into
`<run>/evaluate/<hash of what is evaluated>`, for a folder of transformers into
`<runs>/evaluate/<folder>-<hash>`; what is there is not computed again.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from experiments import export, legality, results, zero_shot
from experiments.config import digest, driver, one_line_errors, typed
from experiments.distributed import world
from experiments.errors import UserError
from experiments.finished import WEIGHTS_OF, FinishedRun
from experiments.image_source import ImageSource
from experiments.initial import HFConfig
from experiments.perplexity import Text, perplexity, windows
from experiments.pretrain import process_settings
from experiments.settings import ImplConfig
from experiments.tokenizer import folder_tokenizer
from experiments.trainer import DTYPES
from models.gpt2 import GPT
from models.hf import CausalLM
from models.vit import ViT

BATCH = 8  # windows, images or questions per forward pass, unless impl.micro_batch says


@dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """path: folder of a causal model of transformers, in the place of `run`. block_size: tokens
    that it takes at once; null = as many as it can."""

    path: str | None = None
    block_size: int | None = None


@dataclass(frozen=True, kw_only=True)
class DataChoice:
    """source: folder or hub id of images in the place of the run's own."""

    source: str | None = None


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is evaluated, and on what.

    runs: root of the results for folders of transformers. block_size: of perplexity's windows;
    null = the model's. revision: of WikiText-2 on the hub. num_fewshot, limit: see
    `zero_shot.evaluate`. seed: of the choice of few-shot examples.
    """

    run: str | None
    weights: str
    ppl: str | None
    revision: str
    block_size: int | None
    tasks: tuple[str, ...]
    task_folder: str | None
    num_fewshot: int | None
    limit: int | None
    images: str | None
    seed: int
    tier: str
    runs: Path


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(Settings):
    """An evaluation: the settings, and the groups of the config."""

    model: ModelChoice
    data: DataChoice
    impl: ImplConfig

    def __post_init__(self) -> None:
        object.__setattr__(self, "tasks", zero_shot.expand(self.tasks))
        if (self.run is None) == (self.model.path is None):
            raise ValueError("give one of run=DIR (a finished run) and model.path=FOLDER")
        if self.weights not in WEIGHTS_OF:
            raise ValueError(f"weights={self.weights}; choose one of {', '.join(WEIGHTS_OF)}")
        if self.model.path is not None and self.weights != "sparse":
            raise ValueError("a folder of transformers has no weights but those stored in it")
        if self.images not in (None, "val"):
            raise ValueError(f"images={self.images}; only the validation images: images=val")
        if self.data.source is not None and self.images is None:
            raise ValueError("data.source is the place of images; add images=val")
        for name in ("num_fewshot", "limit"):
            if (value := getattr(self, name)) is not None and value < 0:
                raise ValueError(f"{name}={value}; it must not be negative")

    @cached_property
    def finished_run(self) -> FinishedRun | None:
        return None if self.run is None else FinishedRun.open(Path(self.run))

    @cached_property
    def hf(self) -> HFConfig | None:
        return None if self.model.path is None else HFConfig(self.model.path, self.model.block_size)

    @cached_property
    def text(self) -> Text | None:
        return None if self.ppl is None else Text(self.ppl, self.revision)

    def identity(self) -> dict[str, Any]:
        """Everything that the result depends on, as plain values.

        A run enters by the hash of its config, a folder by that of its files, text by its content.
        """
        identity: dict[str, Any] = {"weights": self.weights, "dtype": self.impl.dtype}
        if self.finished_run is not None:
            identity["run"] = self.finished_run.config_hash
        if self.hf is not None:
            identity["model"] = {"weights": self.hf.fingerprint, "block_size": self.hf.block_size}
        if self.text is not None:
            identity["ppl"] = {**self.text.identity(), "block_size": self.block_size}
        if self.tasks:
            identity["zero_shot"] = {
                **zero_shot.identity(self.tasks, self.task_folder),
                "num_fewshot": self.num_fewshot,
                "limit": self.limit,
                "seed": self.seed,
            }
        if self.images is not None:
            identity["images"] = {"split": self.images, "source": self.data.source}
        return identity

    def digest(self) -> str:
        """Hash of `identity()`, 16 hex digits."""
        return digest(self.identity())

    def directory(self) -> Path:
        if self.finished_run is not None:
            return self.finished_run.directory / "evaluate" / self.digest()[:8]
        assert self.hf is not None
        return self.runs / "evaluate" / f"{self.hf.folder.resolve().name}-{self.digest()[:8]}"

    def as_dict(self) -> dict[str, Any]:
        """The whole config as plain values, for `result.json`."""
        return {**dataclasses.asdict(self), "runs": str(self.runs)}


def load(overrides: list[str] | None = None) -> EvaluateConfig:
    """Compose `experiments/conf/evaluate.yaml` with hydra overrides.

    Raises:
        UserError: an override that does not fit, in one line.
    """
    from hydra import compose, initialize_config_module

    with one_line_errors(), initialize_config_module("experiments.conf", version_base="1.3"):
        return freeze(compose("evaluate", overrides=overrides or []))


def freeze(composed: Any) -> EvaluateConfig:
    """The typed form of a composed `DictConfig`."""
    from omegaconf import OmegaConf

    values: Any = OmegaConf.to_container(composed, resolve=True)
    groups = {"model": ModelChoice, "data": DataChoice, "impl": ImplConfig}
    parts = {name: typed(schema, name, values.pop(name)) for name, schema in groups.items()}
    return EvaluateConfig(**vars(typed(Settings, "the config", values)), **parts)


def finished(config: EvaluateConfig) -> dict[str, Any] | None:
    """The result of this very evaluation, if there is one."""
    path = config.directory() / results.FILE
    if not path.is_file():
        return None
    result = json.loads(path.read_text(encoding="utf-8"))
    same = result["schema"] == results.SCHEMA and result["config_hash"] == config.digest()
    return result if same else None


def run(config: EvaluateConfig, report: Callable[[str], None] = print) -> dict[str, Any]:
    """Evaluate, or do nothing if it is done; returns the content of `result.json`.

    Raises:
        UserError: model, weights and what they are to be measured on do not fit together.
    """
    done = finished(config)
    if done is not None:
        report(f"done already: {config.directory()}")
        report(summary(done))
        return done
    with process_settings(config.impl), world(config.impl.device) as here:
        if here.size > 1:
            raise UserError("an evaluation is one process; start it without torchrun")
        model, patterns = _model(config)
        if config.ppl is not None or config.tasks:
            _check_causal(model)
        if config.images is not None:
            _check_classifier(model)
        rows = legality.measure(model, patterns)
        report(f"WEIGHTS: {_described(config)}")
        report(legality.table(rows))
        stream = _windows(config, model)
        model.to(here.device).eval()
        metrics: dict[str, Any] = {}
        details: dict[str, Any] = {}
        batch, dtype = config.impl.micro_batch or BATCH, DTYPES[config.impl.dtype]
        if stream is not None:
            metrics |= perplexity(model, stream, batch, dtype)
        if config.images is not None:
            metrics |= _accuracy(config, model, batch, dtype)
        if config.tasks:  # last: it may take the model apart
            details = _tasks(config, model, batch, dtype)
            for task, found in details.items():
                metrics |= {f"{task}_{name}": value for name, value in found["metrics"].items()}
        source = config.finished_run
        result = results.write_result(
            config.directory(),
            {
                "config_hash": config.digest(),
                "config": config.as_dict(),
                "identity": config.identity(),
                "seed": config.seed if source is None else source.result["seed"],
                "tier": config.tier,
                "weights": config.weights,
                "metrics": metrics,
                "tasks": details,
                "sparsity": legality.total(rows),
                "linears": [row.as_dict() for row in rows],
                "converted": list(patterns),
            },
        )
    report(summary(result))
    return result


def summary(result: dict[str, Any]) -> str:
    """The numbers of a result, one a line, after the weights that gave them."""
    lines = [
        f"weights {result['weights']}: density {result['sparsity']['density']:.4f}, "
        f"{result['sparsity']['illegal_groups']} of {result['sparsity']['groups']} groups illegal"
    ]
    lines += [
        f"{name} {value:.4f}" if isinstance(value, float) else f"{name} {value}"
        for name, value in result["metrics"].items()
    ]
    return "\n".join(lines)


def _described(config: EvaluateConfig) -> str:
    if config.run is None:
        return f"as they are stored in {config.model.path}"
    if config.weights == "dense":
        return f"dense, the master weights of {config.run}"
    return f"sparse, as the method of {config.run} ended (weights=dense for the master weights)"


def _model(config: EvaluateConfig) -> tuple[nn.Module, dict[str, tuple[int, int]]]:
    """The model on the CPU, and the pattern of each linear whose legality is shown.

    Of a folder these are the linears in its mask file; without one, all of them, as 2:4.
    """
    if config.finished_run is not None:
        run = config.finished_run
        return run.model(config.weights), {name: run.pattern(name) for name in run.converted}
    assert config.hf is not None
    model = config.hf.build()
    stored = export.read_patterns(config.hf.folder)
    if not stored:
        return model, {
            name: (2, 4)
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and module.in_features % 4 == 0
        }
    return model, {
        f"model.{tensor.removesuffix('.weight')}": (found["n"], found["m"])
        for tensor, found in stored.items()
    }


def _check_causal(model: nn.Module) -> None:
    if not isinstance(model, GPT | CausalLM):
        raise UserError(
            f"ppl and tasks need a causal language model, this one is a {type(model).__name__}"
        )


def _check_classifier(model: nn.Module) -> None:
    if not isinstance(model, ViT):
        raise UserError(f"images need a ViT, this is a {type(model).__name__}")
    if not model.config.n_classes:
        raise UserError("images need a ViT with classes; this one ends in its features")


def _windows(config: EvaluateConfig, model: Any) -> torch.Tensor | None:
    """The text of `ppl` as windows of tokens; None without one."""
    if config.text is None:
        return None
    longest = getattr(model, "config", model).block_size
    block = config.block_size or longest
    if block > longest:
        raise UserError(f"block_size={block}, but the model takes at most {longest} tokens")
    content = config.text.content
    run, hf = config.finished_run, config.hf
    encoding = run.tokenizer() if run is not None else folder_tokenizer(str(hf and hf.folder))
    return windows(encoding.encode_ordinary_batch([content])[0], block)


@torch.no_grad()
def _accuracy(
    config: EvaluateConfig, model: Any, batch: int, dtype: torch.dtype | None
) -> dict[str, Any]:
    """`val_loss`, `val_top1` and `val_top5` (percent) over all validation images."""
    assert config.finished_run is not None
    data: Any = config.finished_run.data
    if config.data.source is not None:
        data = dataclasses.replace(data, name="images", source=config.data.source)
    source = ImageSource(data, model.config, seed=0, batch_size=2, workers=config.impl.workers)
    images = source.images.val
    device, count = next(model.parameters()).device, len(images.labels)
    sums: dict[str, float] = {}
    for part in source.eval_batches(count, batch):
        on_device = {name: tensor.to(device) for name, tensor in part.items()}
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            output, loss = model(**on_device)
        found, _ = source.score(output, loss, on_device)
        for name, value in found.items():
            sums[name] = sums.get(name, 0.0) + float(value)
    return {f"val_{name}": value / count for name, value in sums.items()} | {"val_images": count}


def _tasks(
    config: EvaluateConfig, model: nn.Module, batch: int, dtype: torch.dtype | None
) -> dict[str, Any]:
    tokenizer: Any
    if config.finished_run is not None:
        tokenizer = export.tokenizer_of(config.finished_run, model)
        if tokenizer is None:
            raise UserError(f"{config.run} came without a tokenizer, which tasks need")
    else:
        from transformers import AutoTokenizer

        assert config.hf is not None
        tokenizer = AutoTokenizer.from_pretrained(config.hf.folder, trust_remote_code=False)
    device = next(model.parameters()).device
    export.merge_low_rank(model)
    return zero_shot.evaluate(
        export.to_transformers(model).to(device),
        tokenizer,
        config.tasks,
        task_folder=config.task_folder,
        num_fewshot=config.num_fewshot,
        limit=config.limit,
        batch=batch,
        dtype=dtype,
        seed=config.seed,
    )


@driver("evaluate", freeze)
def main(config: EvaluateConfig) -> None:
    run(config)


if __name__ == "__main__":
    main()
