"""Runs a block: `python -m reproduce run BLOCK [minutes=N] [per_gpu=N]`.

A run is done if it has a record in `reproduce/evidence` or `runs/evidence`; one from which others
start is trained all the same if its weights are missing. The time budget stops running ones.
"""

from pathlib import Path
from typing import Any

from experiments.data.manifest import DataConfig
from experiments.data.prepare import prepare
from experiments.images.dataset import load_images
from experiments.support.errors import UserError
from reproduce.execute.blocks import EVIDENCE, Block, BlockRun
from reproduce.execute.jobs import Report
from reproduce.execute.processes import Launch
from reproduce.execute.queue import Queue, lacking


def run_block(
    block: Block,
    runs: Path,
    minutes: float | None = None,
    per_gpu: int = 1,
    report: Report = print,
    committed: Path = EVIDENCE,
) -> bool:
    """Run everything that has no record yet, seed by seed; return True if all runs have a record in
    the end. minutes, per_gpu: as on the command line. committed: folder of committed records."""
    every, folders = list(block.runs(runs)), (committed, runs / "evidence")
    trainings = _missing(every, folders)
    launch = Launch(per_gpu=per_gpu)
    queue = Queue(trainings, report, launch, lambda run: _kept(run, folders))
    sources = sum(run.block != block.name for run in trainings)
    done = f"{len(every) + sources - queue.total} done already"
    report(f"{block.name}: {len(every)} runs, {done}; {len(queue.places)} at a time")
    if block.source is not None and sources:
        report(f"before them {sources} of block {block.source.name}, where they start")
    _prepare(block, [run.intended for run in trainings])
    queue.work(minutes)
    if queue.left:
        report(f"{queue.left} runs are left; start the same command again to go on")
    return queue.done == queue.total


def _missing(every: list[BlockRun], folders: tuple[Path, Path]) -> list[BlockRun]:
    """The runs to train, in order, each after its source if the source's weights are missing."""
    trainings: dict[str, BlockRun] = {}
    for run in every:
        if run.record(*folders) is None and run.keep(folders[1]) is None:
            if run.source is not None and _kept(run.source, folders) is None:
                # The one for which the queue lets this run wait.
                run.source = trainings.setdefault(run.source.digest(), run.source)
            same = trainings.get(run.digest(), run)
            if same.block == run.block and same is not run:
                both = f"{same.variant} and {run.variant} have the same config"
                raise UserError(f"block {run.block}: {both}; leave one out")
            trainings[run.digest()] = run
    return list(trainings.values())


def _kept(run: BlockRun, folders: tuple[Path, Path]) -> dict[str, Any] | None:
    """The result of a run, if it has ended and its weights are here. Its record is saved, unless
    there is one already (for a source that was made again)."""
    if run.ended() is None or (run.record(*folders) or run.keep(folders[1])) is None:
        return None
    return run.ended()


def _prepare(block: Block, configs: list[Any]) -> None:
    """Check that the trainings can begin, and prepare their data once, not in every process."""
    if why := lacking(configs):
        raise UserError(f"block {block.name}: {why}")
    for data in {config.data for config in configs}:
        if isinstance(data, DataConfig):
            prepare(data)
            if data.other_corpus is not None:
                prepare(data.other_corpus)
        else:
            load_images(data)  # raises an error if they are missing
