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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from common_kernels import backend, check24
from experiments import checkpoint, results
from experiments.config import RunConfig, driver
from experiments.data import Corpus, check_fits, load_tokens
from experiments.distributed import World, world
from experiments.errors import UserError
from experiments.tracking import read_metrics
from experiments.trainer import DTYPES, Trainer, micro_batches
from models.gpt2 import GPT


def finished(config: RunConfig) -> dict[str, Any] | None:
    """The result of this very config, if it was run to the end."""
    path = config.directory() / results.FILE
    if not path.exists():
        return None
    result = json.loads(path.read_text(encoding="utf-8"))
    same = result["schema"] == results.SCHEMA and result["config_hash"] == config.digest()
    return result if same else None


def run(config: RunConfig, report: Callable[[str], None] = print) -> dict[str, Any]:
    """Train, or go on, or do nothing if it is done; returns the content of `result.json`.

    Raises:
        UserError: before anything is written, if config, data and machine do not fit together.
    """
    if config.impl.threads:
        torch.set_num_threads(config.impl.threads)
    if config.impl.backend != "auto":
        os.environ[backend.ENVIRONMENT_VARIABLE] = config.impl.backend
    with world(config.impl.device) as here:
        done = finished(config)
        if done is not None:
            if here.is_main:
                report(f"done already: {config.directory()}")
            return done
        micro_batches(config.train.batch_size, config.impl.micro_batch, here.size)
        with here.main_first():
            corpus = load_tokens(config.data, config.seed)
        check_fits(corpus, config.model.vocab_size, config.model.block_size)
        try:
            backend.resolve(here.device)
        except RuntimeError as error:
            raise UserError(str(error)) from error
        return _run(config, corpus, here, report if here.is_main else _silent)


def _run(
    config: RunConfig, corpus: Corpus, here: World, report: Callable[[str], None]
) -> dict[str, Any]:
    started = time.time()
    if here.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(config.seed)
    model = GPT(config.model).to(here.device)
    method = config.build_method()
    try:
        converted = method.convert(model, dtype=DTYPES[config.impl.dtype])
    except ValueError as error:
        raise UserError(str(error)) from error
    directory = config.directory()
    report(f"{config.method}, seed {config.seed}: {converted} -> {directory}")
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
    if here.is_main:
        checkpoint.write_json(directory / "config.json", config.as_dict())
    trainer.fit()
    last = method.metrics()
    method.finalize(model)
    val_loss = trainer.evaluate()
    tokens = config.train.steps * config.train.batch_size * config.model.block_size
    result = {
        "config_hash": config.digest(),
        "config": config.as_dict(),
        "corpus": corpus.manifest,
        "seed": config.seed,
        "tier": config.tier,
        "steps": trainer.step,
        "tokens": tokens,
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
    result = results.write_result(directory, result)
    shutil.rmtree(trainer.checkpoints, ignore_errors=True)
    report(f"val loss {val_loss:.4f}, {trainer.seconds:.0f} s of training")
    return result


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
