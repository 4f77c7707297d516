"""Measure a trained model: `python -m experiments.evaluate run=DIR ppl=wikitext2`.

    run=DIR              a finished run, or model.path=FOLDER, a causal model of transformers
    weights=sparse       the method's final weights; dense: the dense weights under the masks
    ppl=wikitext2        perplexity on the test split of WikiText-2 or a FILE, by the protocol of
                         experiments/evaluation/perplexity.py
    tasks=[arc_easy]     zero-shot tasks of lm-eval (experiments/evaluation/zero_shot.py);
                         ast, slope and slope_glue select the tasks of these papers
    task_folder=FOLDER   your own task files, in lm-eval's format; if they name Python code, that is
                         refused without allow_code=true
    images=val           top-1 and top-5 on the validation images of the run, or of data.source

Density and illegal groups of every converted linear are always measured. Computation is in fp32
unless `dtype` says otherwise. `result.json` is written to `<run>/evaluate/<hash>`, or for a folder
of transformers to `<runs>/evaluate/<folder>-<hash>`. Existing results are not computed again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from experiments.config.driver import driver
from experiments.config.run import Run, resolve
from experiments.data.source import Batch, send
from experiments.data.tokenizer import check_vocabulary, folder_tokenizer, pretrained_tokenizer
from experiments.evaluation import zero_shot
from experiments.evaluation.config import EvaluateConfig, freeze_evaluation
from experiments.evaluation.config import load as load
from experiments.evaluation.perplexity import perplexity, windows
from experiments.exporting import export, files
from experiments.exporting.files import tokenizer_of
from experiments.images.dataset import load_images
from experiments.images.source import ImageSource
from experiments.support import checkpoint, results
from experiments.support.errors import UserError
from experiments.support.progress import say
from experiments.training import legality
from experiments.training.distributed import World, world
from experiments.training.optimization import DTYPES
from experiments.training.pretraining import held_out
from experiments.training.routine import process_settings
from methods.nn import lowrank
from models.gpt2 import GPT
from models.hf import CausalLM

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BATCH = 8  # windows, images or questions per forward pass, unless impl.micro_batch is set


def finished(config: EvaluateConfig) -> dict[str, Any] | None:
    """The stored result of this config and these weights, or None."""
    return _find(resolve(config))


def _find(run: Run[EvaluateConfig]) -> dict[str, Any] | None:
    result = results.read_finished(run.directory, run.id)
    return result if result is not None and result["files"] == run.config.files else None


def run(config: EvaluateConfig, report: Callable[[str], None] = say) -> dict[str, Any]:
    """Evaluate, unless there is a result; return the content of `result.json`."""
    run = resolve(config)
    if (result := _find(run)) is not None:
        report(f"done already: {run.directory}")
    else:
        with process_settings(config.impl), world(config.impl.device) as here:
            if here.size > 1:
                raise UserError("an evaluation runs in one process; start it without torchrun")
            result = _evaluate(run, here, report)
    report(summary(result))
    return result


def _evaluate(
    run: Run[EvaluateConfig], here: World, report: Callable[[str], None]
) -> dict[str, Any]:
    config = run.config
    model, patterns = _model(config)
    _check(config, model)
    tokenizer = _tokenizer(config, model) if config.tasks else None
    stream = _windows(config, model)
    rows = legality.measure(model, patterns)
    report(f"WEIGHTS: {_described(config)}")
    report(legality.table(rows, dense=config.kind == "dense"))
    with checkpoint.exclusive(run.directory):
        if (done := _find(run)) is not None:  # another process may have finished it meanwhile
            return done
        model.to(here.device).eval()
        metrics: dict[str, Any] = {}
        details: dict[str, Any] = {}
        batch, dtype = config.impl.micro_batch or BATCH, DTYPES[config.dtype]
        if stream is not None:
            metrics |= perplexity(model, stream, batch, dtype)
        if config.images is not None:
            metrics |= _accuracy(config, model, batch, dtype)
        if tokenizer is not None:  # tasks come last, because they may change the model
            lowrank.merge(model)
            theirs = files.to_transformers(model).to(here.device)
            longest: Any = getattr(model, "config", model)
            details = zero_shot.evaluate(
                config, theirs, tokenizer, longest.block_size, batch, dtype
            )
            for task, found in details.items():
                metrics |= {f"{task}_{name}": value for name, value in found["metrics"].items()}
        source = config.finished_run
        return results.write_result(
            run.directory,
            {
                "config_hash": run.id,
                "config": config.as_dict(),
                "identity": config.identity(),
                "seed": config.seed if source is None else source.result["seed"],
                "tier": config.tier,
                "weights": config.kind,
                "files": config.files,
                "metrics": metrics,
                "tasks": details,
                "sparsity": legality.total(rows),
                "linears": rows,
                "converted": list(patterns),
            },
        )


def summary(result: dict[str, Any]) -> str:
    """The kind of weights and every metric of a result, one a line."""
    lines = [f"weights {result['weights']}: density {result['sparsity']['density']:.4f}"]
    if result["weights"] != "dense":
        illegal, groups = (result["sparsity"][key] for key in ("illegal_groups", "groups"))
        lines[0] += f", {illegal} of {groups} groups illegal"
    lines += [
        f"{name} {value:.4f}" if isinstance(value, float) else f"{name} {value}"
        for name, value in result["metrics"].items()
    ]
    return "\n".join(lines)


def _described(config: EvaluateConfig) -> str:
    run = config.finished_run
    if run is None:
        return f"as they are stored in {config.path}"
    if run.trained_with.capabilities.ends_dense:
        return f"dense, as the method ({run.method}) of {config.run} ended"
    if config.weights == "dense":
        return f"dense, the master weights of {config.run}"
    return f"sparse, as the method of {config.run} ended (weights=dense for the master weights)"


def _model(config: EvaluateConfig) -> tuple[nn.Module, dict[str, tuple[int, int]]]:
    """(the model on the CPU, the N:M pattern of each linear whose legality is reported): in a
    folder those of its record or, without one, 2:4 for all linears."""
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
    return model, {f"model.{name.removesuffix('.weight')}": nm for name, nm in stored.items()}


def _check(config: EvaluateConfig, model: Any) -> None:
    """Raise a `UserError` unless the model can be measured so, on images with its own classes."""
    if (config.ppl is not None or config.tasks) and not isinstance(model, GPT | CausalLM):
        raise UserError(
            f"ppl and tasks need a causal language model, this one is a {type(model).__name__}"
        )
    if config.images is None:
        return
    images = load_images(config.image_data, ("val",))
    if not model.config.n_classes:
        raise UserError("images=val needs a ViT with classes, this one ends in its features")
    assert config.finished_run is not None
    trained, found = config.finished_run.result["corpus"]["classes"], list(images.classes)
    if found != trained:
        raise UserError(
            f"{images.directory} has other classes, or in another order, than {config.run} was "
            f"trained on: {', '.join(found[:20])} for {', '.join(trained[:20])}"
        )


def _windows(config: EvaluateConfig, model: Any) -> torch.Tensor | None:
    """The tokens of the text `ppl` as windows [n, block]; None if no text is given."""
    if config.text is None:
        return None
    shape = getattr(model, "config", model)
    block = config.block_size or shape.block_size
    if block > shape.block_size:
        raise UserError(
            f"block_size={block}, but the model takes at most {shape.block_size} tokens"
        )
    run, hf = config.finished_run, config.hf
    encoding = run.tokenizer() if run is not None else folder_tokenizer(str(hf and hf.folder))
    stream = windows(encoding.encode_ordinary_batch([config.text.content])[0], block)
    check_vocabulary(int(stream.max()), shape.vocab_size)
    return stream


@torch.no_grad()
def _accuracy(
    config: EvaluateConfig, model: Any, batch: int, dtype: torch.dtype | None
) -> dict[str, Any]:
    """`val_loss`, `val_top1` and `val_top5` (percent) over all validation images."""
    source = ImageSource(
        config.image_data,
        model.config,
        seed=0,
        batch_size=2,
        workers=config.impl.workers,
        splits=("val",),
    )
    device, count = next(model.parameters()).device, len(source.images.splits["val"].labels)

    def forward(part: Batch) -> tuple[Any, Any, Batch]:
        on_device = {name: send(tensor, device) for name, tensor in part.items()}
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            return *model(**on_device), on_device

    return held_out(source, count, batch, forward) | {"val_images": count}


def _tokenizer(config: EvaluateConfig, model: nn.Module) -> PreTrainedTokenizerBase:
    """The tokenizer in transformers' form, which lm-eval takes."""
    run, hf = config.finished_run, config.hf
    tokenizer = tokenizer_of(run, model) if run else pretrained_tokenizer(str(hf and hf.folder))
    if tokenizer is None:
        raise UserError(f"{config.run} came without a tokenizer, which tasks need")
    size: Any = getattr(model, "config", model).vocab_size
    check_vocabulary(max(tokenizer.get_vocab().values()), size)
    return tokenizer


main = driver("evaluate", freeze_evaluation, "begins it anew")(run)


if __name__ == "__main__":
    main()
