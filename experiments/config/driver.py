"""Makes a function of a config a command line, with one-line errors, exit codes and signals."""

from __future__ import annotations

import atexit
import functools
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from experiments.config.command_line import help_text, parse
from experiments.config.compose import check, one_line_errors
from experiments.config.run import freeze
from experiments.support import memory
from experiments.support.errors import (
    Diverged,
    Terminated,
    UserError,
    after_broken_pipe,
    one_line,
    printable,
    raise_on_sigterm,
)


def driver(
    config_name: str,
    typed: Callable[..., Any] = freeze,
    after_stop: str = "goes on from the last checkpoint, if there is one",
    texts: tuple[str, ...] = (),
    groups: tuple[str, ...] = (),
    after_sweep: Callable[[list[Any]], None] | None = None,
    worst: float = math.inf,
) -> Callable[[Callable[[Any], Any]], Callable[[], None]]:
    """Make `main(config)` a command line: hydra overrides, `-m` sweeps, errors in one line.

    Args:
        typed: makes the config of `main` from the composed one; it also gets the `texts` by name.
        after_stop: what the same command will do after an interrupt, for the message, unless the
            interrupt's own arguments say it.
        texts: arguments that are taken as typed and never parsed by hydra.
        groups: the config groups that `main` reads and `--help` shows; () = the whole config.
        after_sweep: called on rank 0 with the results of `main` for the runs of a sweep that
            succeeded.
        worst: what a sweeper gets for a run that diverged, after which it goes on.
    """

    def decorate(main: Callable[[Any], Any]) -> Callable[[], None]:
        @functools.wraps(main)
        def command() -> None:
            import hydra

            returned: list[Any] = []
            diverged: list[Diverged] = []

            def task(composed: Any) -> float | None:
                with exit_with_one_line(after_stop):
                    with one_line_errors():
                        config = typed(composed, **{name: vars(arguments)[name] for name in texts})
                    try:
                        returned.append(main(config))
                    except ValueError as error:  # a defect of ours, not a wrong argument
                        raise RuntimeError(str(error)) from error
                    except Diverged as error:
                        if "--multirun" not in arguments.hydra:
                            raise
                        diverged.append(error)
                        print(f"error: {one_line(error)}", file=sys.stderr)
                        return worst
                    return objective(returned[-1])

            # Hydra then raises its errors instead of printing them over several lines.
            os.environ["HYDRA_FULL_ERROR"] = "1"
            with exit_with_one_line(after_stop), one_line_errors():
                arguments = parse(sys.argv[1:], texts)
                check(config_name, arguments.overrides, sweep="--multirun" in arguments.hydra)
                if arguments.help:
                    module, says = main.__globals__["__spec__"].name, main.__globals__["__doc__"]
                    print(help_text(module, says, config_name, arguments.overrides, groups))
                    return
                sys.argv[1:] = [*arguments.hydra, *arguments.overrides]
                hydra.main(
                    config_path="pkg://experiments.conf",
                    config_name=config_name,
                    version_base="1.3",
                )(task)()
                if after_sweep and len(returned) > 1 and os.environ.get("RANK", "0") == "0":
                    after_sweep(returned)
                if diverged:
                    raise UserError(f"runs of the sweep that diverged: {len(diverged)}")
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                end_rank()

        return command

    return decorate


def objective(returned: Any) -> float | None:
    """The number that a sweeper such as Optuna's gets: the `val_loss` of a training, the `score` of
    a fine-tuning. returned: what `main` returned, a finished run or a result."""
    result = getattr(returned, "result", returned)
    metrics = result.get("metrics", {}) if isinstance(result, dict) else {}
    found = (metrics.get(name) for name in ("val_loss", "score"))
    return next((float(value) for value in found if value is not None), None)


def end_rank() -> NoReturn:
    """End this process with status 0 without finalising the interpreter.

    During finalisation a gloo thread that still waits for the interpreter's lock would abort the
    process, and torchrun would report a finished run as failed
    (github.com/pytorch/pytorch/pull/179291).
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


@contextmanager
def exit_with_one_line(after_stop: str) -> Iterator[None]:
    """End the process with one line of message: on a `UserError`, a file that cannot be written or
    lack of memory with status 1, on an interrupt with 130, on SIGTERM with 143. A signal reaches
    every rank, and rank 0 reports it.
    """
    raise_on_sigterm()
    try:
        yield
        sys.stdout.flush()  # in here: at the exit of Python it is too late to handle a broken pipe
    except UserError as error:
        if error.elsewhere:
            sys.exit(1)
        sys.exit("\n  ".join([f"error: {one_line(error)}", *map(printable, error.choices)]))
    except BrokenPipeError:
        sys.exit(after_broken_pipe())
    except OSError as error:
        if error.errno is None:
            raise
        # Some errors, such as a full disk, have no file name.
        place, reason = Path(error.filename or "a file"), error.strerror
        if isinstance(error, FileExistsError) and place.is_symlink():
            reason = f"a link to {place.readlink()}, which does not exist"
        sys.exit(f"error: {printable(f'{place}: {reason}')}")
    except (MemoryError, RuntimeError) as error:
        if not memory.is_exhausted(error):
            raise
        lines = str(error).strip().splitlines() or ["MemoryError"]
        sys.exit(
            f"error: out of memory ({lines[0]}); set a smaller impl.micro_batch, batch or model"
        )
    except (KeyboardInterrupt, Terminated) as stop:
        what, status = ("terminated", 143) if isinstance(stop, Terminated) else ("interrupted", 130)
        if os.environ.get("RANK", "0") == "0":
            then = stop.args[0] if stop.args else after_stop
            print(f"{what}; the same command {then}", file=sys.stderr)
        sys.exit(status)
