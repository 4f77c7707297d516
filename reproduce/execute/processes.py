"""Processes whose output goes to a file, and the GPUs that they may use."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PATIENCE = 60.0  # seconds that a run may take to save its checkpoint


@dataclass(frozen=True)
class Launch:
    """How jobs are started as processes."""

    # The beginning of a training's command, such as torchrun and its options; () = Python.
    words: tuple[str, ...] = ()
    # So many jobs at once on each GPU, or on the CPU; None = one after the other on all GPUs.
    per_gpu: int | None = None
    prints: bool = False  # the commands of missing runs are printed instead

    def places(self) -> list[str | None]:
        """The GPU of each job that runs at the same time; None = all, or the CPU."""
        return [None] if self.per_gpu is None else (visible_gpus() or [None]) * self.per_gpu


class Process:
    """A process that runs a command, whose output is appended to `log`. If this process dies,
    however it does, it gets SIGTERM, where there is Linux's setpriv.

    gpu: the only one that it sees; None = all. at_once: so many processes share the CPU.
    """

    def __init__(
        self, command: Sequence[str], log: Path, gpu: str | None = None, at_once: int = 1
    ) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "OMP_NUM_THREADS": str(max(1, cores() // at_once))}
        if gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = gpu
        ending = ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []
        with log.open("ab") as file:
            self.begin = file.tell()
            # A separate session, so that Ctrl-C does not reach the run: our SIGTERM would be its
            # second signal and end it before it has saved.
            self.process = subprocess.Popen(
                [*ending, *command],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=environment,
                start_new_session=True,
            )

    def reason(self) -> str:
        """The reason why the process failed, in one line."""
        if (status := self.process.returncode) < 0:
            return f"it was ended by {signal.Signals(-status).name}; see {self.log}"
        text = self.log.read_bytes()[self.begin :].decode(errors="replace")
        said = [line.strip() for line in text.splitlines() if line.strip()]
        return f"{said[-1] if said else 'it printed nothing'} (see {self.log})"


def cores() -> int:
    """The number of cores that this process may use; macOS tells only of all."""
    mine = getattr(os, "sched_getaffinity", None)
    return len(mine(0)) if mine is not None else os.cpu_count() or 1


def terminate(processes: Sequence[Process]) -> None:
    """Terminate the processes; each finishes its step and saves a checkpoint."""
    for one in processes:
        one.process.terminate()
    deadline = time.monotonic() + PATIENCE
    for one in processes:
        try:
            one.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(one.process.pid, signal.SIGKILL)  # torchrun's ranks, too
            one.process.wait()


def visible_gpus() -> list[str | None]:
    """The names of the GPUs that this process may use, as in CUDA_VISIBLE_DEVICES. CUDA is not
    initialised for this, since it would take memory on each GPU."""
    import torch

    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    count = torch.cuda.device_count()
    return [*names[:count]] if names[0] else [str(number) for number in range(count)]
