"""Pre-train a model from scratch with a method: `python -m experiments.pretrain method=s_ste`.

Writes into the run directory (`runs/<model>-<data>/<method>-<hash>/seed<n>`): `config.json`,
`metrics.jsonl`, `checkpoints/` while it runs, and at the end `model.safetensors` (plain weights,
pruned entries zero) and `result.json`. A finished run is recognised and not repeated; one that was
stopped goes on from its last checkpoint. Under torchrun the ranks share each batch.
"""

from __future__ import annotations

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

from common_kernels import backend, check24
from experiments import checkpoint, results
from experiments.config import ImplConfig, RunConfig, driver
from experiments.data import check_fits, fingerprint, load_tokens, read_manifest
from experiments.distributed import world
from experiments.errors import UserError
from experiments.tracking import check_viewers, read_metrics
from experiments.trainer import DTYPES, Trainer, micro_batches
from methods import Report
from models.gpt2 import GPT


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
        torch.manual_seed(config.seed)
        model = GPT(config.model).to(here.device)
        method = config.build_method()
        try:
            backend.resolve(here.device)
            converted = method.convert(model, dtype=DTYPES[config.impl.dtype])
        except (ValueError, RuntimeError) as error:
            raise UserError(str(error)) from error
        corpus = here.main_first(lambda: load_tokens(config.data, config.seed))
        check_fits(corpus, config.model.vocab_size, config.model.block_size)
        corpus.eval_batches(config.train.eval_sequences, 1, config.model.block_size)  # enough text?
        directory = config.directory()
        with checkpoint.exclusive(directory) if here.is_main else nullcontext():
            trainer = Trainer(
                model=model,
                method=method,
                corpus=corpus,
                train=config.train,
                block=config.model.block_size,
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


def _train(
    config: RunConfig, trainer: Trainer, converted: Report, report: Callable[[str], None]
) -> dict[str, Any]:
    started = time.time()
    here, model, directory = trainer.world, trainer.model, trainer.directory
    if here.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
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
        "tokens": trainer.step * config.train.batch_size * config.model.block_size,
        "metrics": {
            "val_loss": val_loss,
            "val_tokens": config.train.eval_sequences * config.model.block_size,
            "flip_rate": last["flip_rate"],
            "skipped_steps": trainer.skipped_steps,
        },
        "sparsity": measure_sparsity(model, converted.names),
        "converted": list(converted.names),
        "backend": backend.resolve(here.device),
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
    save_model(model, directory / "model.safetensors")
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


def measure_sparsity(model: nn.Module, names: tuple[str, ...]) -> dict[str, Any]:
    """Density and groups of four with more than two non-zeros, over the named linears."""
    weights = [model.get_parameter(f"{name}.weight").detach() for name in names]
    entries = sum(w.numel() for w in weights)
    nonzeros = sum(int(torch.count_nonzero(w)) for w in weights)
    return {
        "density": nonzeros / entries,
        "illegal_groups": sum(int(check24(w)) for w in weights),
        "groups": entries // 4,
    }


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
