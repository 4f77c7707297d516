"""Runs trainings as processes of their own, whose output goes to a file."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import torch

PATIENCE = 60.0  # seconds that a run may take to save its checkpoint


class Process:
    """A process that runs a command.

    Args:
        command: in words.
        log: the file for its output.
        gpu: the only one that it sees; None = all.
        at_once: so many processes share the CPU.
    """

    def __init__(
        self, command: Sequence[str], log: Path, gpu: str | None = None, at_once: int = 1
    ) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        threads = max(1, (os.cpu_count() or 1) // at_once)
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        if gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = gpu
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=environment,
                # A separate session, so that Ctrl-C does not reach the run: our SIGTERM would be
                # its second signal and end it before it has saved.
                start_new_session=True,
            )

    def ended(self) -> bool:
        """True if the process has ended."""
        return self.process.poll() is not None

    def reason(self) -> str:
        """The reason why the process failed, in one line."""
        status = self.process.returncode
        if status < 0:
            return f"it was ended by {signal.Signals(-status).name}; see {self.log}"
        return f"{last_line(self.log)} (see {self.log})"


def terminate(processes: Sequence[Process]) -> None:
    """Terminate the processes; each finishes its step and saves a checkpoint."""
    for one in processes:
        one.process.terminate()
    deadline = time.monotonic() + PATIENCE
    for one in processes:
        try:
            one.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            one.process.kill()
            one.process.wait()


def last_line(log: Path) -> str:
    """The last line of a process's output that is not empty."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it printed nothing"


def visible_gpus() -> list[str | None]:
    """The names of the GPUs that this process may use, as in CUDA_VISIBLE_DEVICES. CUDA is not
    initialised for this, since it would take memory on each GPU."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    count = torch.cuda.device_count()
    return [*names[:count]] if names[0] else [str(number) for number in range(count)]
