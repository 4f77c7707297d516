"""Pre-train a model from scratch with a method: `python -m experiments.pretrain method=s_ste`.

With `init=RUN` it starts from the weights of that finished run, with `model=hf model.path=FOLDER`
from a checkpoint of transformers.

Writes into the run directory (`runs/<model>-<data>/<method>-<hash>/seed<n>`): `config.json`,
`metrics.jsonl`, `checkpoints/` while it runs, and at the end `model.safetensors` (plain weights,
pruned entries zero) and `result.json`. A finished run is recognised and not repeated; one that was
stopped goes on from its last checkpoint. Under torchrun the ranks share each batch.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from common_kernels import backend, check_nm
from experiments import checkpoint, results
from experiments.config import ImplConfig, RunConfig, driver
from experiments.data import Corpus, check_fits, fingerprint, load_tokens, read_manifest
from experiments.distributed import World, world
from experiments.errors import UserError
from experiments.initial import WEIGHTS
from experiments.tracking import check_viewers, read_metrics
from experiments.trainer import DTYPES, Trainer, micro_batches
from methods import Method, Report
from models.gpt2 import GPTConfig

CALIBRATION_BATCH = 8  # sequences per forward pass; their statistics are sums


def finished(config: RunConfig) -> dict[str, Any] | None:
    """The result of this very config on this very corpus, if it was run to the end."""
    path = config.directory() / results.FILE
    if not path.exists():
        return None
    result = json.loads(path.read_text(encoding="utf-8"))
    if result["schema"] != results.SCHEMA or result["config_hash"] != config.digest():
        return None
    manifest = config.data.directory / "manifest.json"
    if manifest.exists() and fingerprint(read_manifest(config.data)) != result["corpus_hash"]:
        return None
    return result


def run(config: RunConfig, report: Callable[[str], None] = print) -> dict[str, Any]:
    """Train, or go on, or do nothing if it is done; returns the content of `result.json`.

    Raises:
        UserError: before anything is written, if config, data and machine do not fit together.
    """
    with process_settings(config.impl), world(config.impl.device) as here:
        report = report if here.is_main else _silent
        done = finished(config)
        if done is not None:
            report(f"done already: {config.directory()}")
            return done
        micro_batches(config.train.batch_size, config.impl.micro_batch, here.size)
        check_viewers(config.impl.loggers)
        model, method, converted, corpus, block = _prepare(config, here)
        directory = config.directory()
        with checkpoint.exclusive(directory) if here.is_main else nullcontext():
            trainer = Trainer(
                model=model,
                method=method,
                corpus=corpus,
                train=config.train,
                block=block,
                seed=config.seed,
                identity=config.digest(),
                directory=directory,
                world=here,
                dtype=config.impl.dtype,
                compiled=config.impl.compile,
                micro_batch=config.impl.micro_batch,
                checkpoint_every=config.impl.checkpoint_every,
                loggers=config.impl.loggers,
                report=report,
            )
            trainer.resume()
            if here.is_main:
                checkpoint.write_json(directory / "config.json", config.as_dict())
            report(f"{config.method}, seed {config.seed}: {converted} -> {directory}")
            return _train(config, trainer, converted, report)


def _prepare(config: RunConfig, here: World) -> tuple[nn.Module, Method, Report, Corpus, int]:
    """The converted model on its device, the corpus, and the tokens per sequence.

    What can be refused without the corpus is refused before it is prepared.
    """
    torch.manual_seed(config.seed)
    model = config.build_model().to(here.device)
    shape: Any = config.model if isinstance(config.model, GPTConfig) else model
    method: Any = config.build_method()
    block: int = shape.block_size

    @functools.cache
    def load_corpus() -> Corpus:
        corpus = here.main_first(lambda: load_tokens(config.data, config.seed))
        check_fits(corpus, shape.vocab_size, block)
        corpus.eval_batches(config.train.eval_sequences, 1, block)  # enough text?
        return corpus

    try:
        backend.resolve(here.device)
        if count := getattr(method, "calibration_sequences", 0):
            batches = load_corpus().calibration_batches(count, CALIBRATION_BATCH, block)
            on_device = ({k: v.to(here.device) for k, v in b.items()} for b in batches)
            method.calibrate(model, on_device)
        converted = method.convert(model, dtype=DTYPES[config.impl.dtype])
        size, _ = micro_batches(config.train.batch_size, config.impl.micro_batch, here.size)
        matmul = config.impl.matmul  # auto leaves the word to the environment
        method.accelerate(size * block, None if matmul == "auto" else matmul)
    except (ValueError, RuntimeError) as error:
        raise UserError(str(error)) from error
    return model, method, converted, load_corpus(), block


def _train(
    config: RunConfig, trainer: Trainer, converted: Report, report: Callable[[str], None]
) -> dict[str, Any]:
    started = time.time()
    here, model, directory = trainer.world, trainer.model, trainer.directory
    if here.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    layers = trainer.method.sparse_layers
    products = {name: dataclasses.asdict(layer.accelerated) for name, layer in layers.items()}
    trainer.fit()
    last = trainer.method.metrics()
    trainer.method.finalize(model)
    val_loss = trainer.evaluate()
    result = {
        "config_hash": config.digest(),
        "config": config.as_dict(),
        "corpus_hash": trainer.corpus.fingerprint,
        "corpus": trainer.corpus.manifest,
        "seed": config.seed,
        "tier": config.tier,
        "steps": trainer.step,
        "tokens": trainer.step * config.train.batch_size * trainer.block,
        "metrics": {
            "val_loss": val_loss,
            "val_tokens": config.train.eval_sequences * trainer.block,
            "flip_rate": last["flip_rate"],
            "skipped_steps": trainer.skipped_steps,
        },
        "sparsity": measure_sparsity(model, trainer.method, converted.names),
        "converted": list(converted.names),
        "backend": backend.resolve(here.device),
        "matmul": products,
        "world_size": here.size,
        "train_seconds": trainer.seconds,
        "started": started,
        "ended": time.time(),
    }
    if not here.is_main:
        return result
    result["step_seconds"] = statistics.median(
        r["step_seconds"] for r in read_metrics(directory / "metrics.jsonl") if "loss" in r
    )
    save_model(model, directory / WEIGHTS)
    # Before the result: with it, the run counts as finished and is not looked at again.
    shutil.rmtree(trainer.checkpoints, ignore_errors=True)
    result = results.write_result(directory, result)
    report(f"val loss {val_loss:.4f}, {trainer.seconds:.0f} s of training")
    return result


@contextmanager
def process_settings(impl: ImplConfig) -> Iterator[None]:
    """Threads and backend of this run; what they were comes back for the next one."""
    threads, name = torch.get_num_threads(), backend.ENVIRONMENT_VARIABLE
    before = os.environ.get(name)
    if impl.threads:
        torch.set_num_threads(impl.threads)
    if impl.backend != "auto":
        os.environ[name] = impl.backend
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


def measure_sparsity(model: nn.Module, method: Method, names: tuple[str, ...]) -> dict[str, Any]:
    """Density, and groups of m inputs with more than n non-zeros, over the named linears."""
    entries = nonzeros = groups = illegal = 0
    for name in names:
        weight, (n, m) = model.get_parameter(f"{name}.weight").detach(), method.pattern(name)
        entries += weight.numel()
        nonzeros += int(torch.count_nonzero(weight))
        groups += weight.numel() // m
        illegal += int(check_nm(weight, n, m))
    return {"density": nonzeros / entries, "illegal_groups": illegal, "groups": groups}


def save_model(model: nn.Module, path: Path) -> None:
    """All parameters as safetensors, atomically; a tied tensor is stored under its first name."""
    tensors = {n: p.detach().cpu().contiguous() for n, p in model.named_parameters()}
    checkpoint.write_atomic(path, lambda p: save_file(tensors, p))


def _silent(message: str) -> None:
    """Ranks other than 0 report nothing."""


@driver("pretrain")
def main(config: RunConfig) -> None:
    run(config)


if __name__ == "__main__":
    main()
