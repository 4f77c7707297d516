"""Errors and signals that end a driver early, each printed as one line."""

import difflib
import errno
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

# Error numbers for no more room: disk full, quota exceeded, file too large.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Also characters that change the direction of writing, and bytes that are not UTF-8.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class UserError(Exception):
    """An error that the user can fix; its one-line message says what is wrong, with which value,
    and what to do. elsewhere: another rank prints it. status: of commands that return one."""

    elsewhere = False
    status = 1


class Diverged(UserError):
    """A training has come to nothing. reason: why; the message adds what to do."""

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(f"{reason}; {advice}")
        self.reason = reason


def suggestion(word: str, known: Iterable[str]) -> str:
    """The end of a sentence that suggests the one of `known` closest to `word`, or ending in it."""
    known = [*known]
    ends = [name for name in known if name.endswith(f".{word}")]
    found = ends or difflib.get_close_matches(word, known, 1, 0.66)
    return f"; {found[0]} may be meant" if found else ""


def check_installed(module: str, what: str, extra: str) -> None:
    """Raise a UserError that says `what`, and how to install the extra, if the module is absent."""
    if find_spec(module) is None:
        raise UserError(f"{what}: {installing(extra)}")


def installing(extra: str) -> str:
    """The command that installs an extra of this project."""
    return f"pip install -c constraints.txt -e '.[{extra}]' in the checkout"


def one_line(error: BaseException) -> str:
    """The message of an error, its line breaks replaced by spaces."""
    return printable(" ".join(str(error).split()))


def printable(text: str) -> str:
    """The text with control characters (not tabs and line breaks) as Python writes them."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def first_line(error: BaseException) -> str:
    """The class of an error and the first line of its message, if any. For an error that only
    reports another one, as those of datasets do, the other one."""
    while type(error).__name__ == "DatasetGenerationError" and error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return ": ".join([type(error).__name__, *lines[:1]])


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """A context for writing `path`: a full disk raises a `UserError`, other errors of the system,
    which torch hides and safetensors only quotes, an `OSError`, both naming `path`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and getattr(cause, "errno", None) not in _FULL:
            cause = cause.__cause__ or cause.__context__
        quoted = re.search(r"\(os error (\d+)\)", str(error))
        hidden = None if isinstance(error, OSError) else getattr(error.__context__, "errno", None)
        number = getattr(cause, "errno", None) or (int(quoted[1]) if quoted else hidden)
        if number in _FULL:
            raise UserError(
                f"{path} cannot be written: {os.strerror(number)}; make room there, or choose "
                "another place, and run the same command again"
            ) from error
        if number is not None:
            raise OSError(number, os.strerror(number), str(path)) from error
        raise


class Terminated(BaseException):
    """Raised on SIGTERM, which cluster managers send, and when the terminal is closed. It is no
    `Exception`, so that no `except Exception` catches it."""


@contextmanager
def exit_with_one_line(after_stop: str) -> Iterator[None]:
    """End the process with one line of message: on a `UserError`, a file that cannot be written or
    lack of memory with status 1, on an interrupt with 130, on SIGTERM with 143. A signal reaches
    every rank, and rank 0 reports it. after_stop: what the same command does then, unless the
    interrupt's own arguments say it."""
    raise_on_sigterm()
    try:
        yield
        sys.stdout.flush()  # in here: at the exit of Python it is too late to handle a broken pipe
    except UserError as error:
        sys.exit(1 if error.elsewhere else f"error: {one_line(error)}")
    except BrokenPipeError:  # the reader has enough, as in `--help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # it is flushed at the end
        sys.exit(141)  # the shell's status for a program that SIGPIPE ends
    except OSError as error:
        if error.errno is None:
            raise
        # Some errors, such as a full disk, have no file name.
        place, reason = Path(error.filename or "a file"), error.strerror
        if isinstance(error, FileExistsError) and place.is_symlink():
            reason = f"a link to {place.readlink()}, which does not exist"
        sys.exit(printable(f"error: {place}: {reason}"))
    except (MemoryError, RuntimeError) as error:
        from experiments.support import memory  # imports torch

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


def exit_status(work: Callable[[], int], after_stop: str) -> int:
    """The exit status of `work`, whose errors are printed as by `exit_with_one_line`."""
    try:
        with exit_with_one_line(after_stop):
            return work()
    except SystemExit as end:
        if not isinstance(end.code, str):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return getattr(end.__context__, "status", 1)


def raise_on_sigterm() -> None:
    """Make SIGTERM and a closed terminal unwind the program as Ctrl-C does, so that locks and
    progress bars are closed and child processes end. A second signal does not interrupt that."""
    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # nohup lets it be ignored
        numbers.append(signal.SIGHUP)

    def stop(*_: object) -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        raise Terminated

    for number in numbers:
        signal.signal(number, stop)


class Stop:
    """The signal that was received and the exception to raise for it; None before."""

    number: int | None = None
    kind: type[BaseException] | None = None


@contextmanager
def deferred_stop(*, again: bool = True) -> Iterator[Stop]:
    """Record the first Ctrl-C, SIGTERM or end of the terminal instead of raising it, so that a loop
    can check for it after each step and save its state. again: a second one is raised at once.
    Outside the main thread, which alone receives signals, this does nothing."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    kinds: dict[int, type[BaseException]] = {
        signal.SIGINT: KeyboardInterrupt,
        signal.SIGTERM: Terminated,
    }
    if callable(signal.getsignal(signal.SIGHUP)):  # it is raised (`raise_on_sigterm`)
        kinds[signal.SIGHUP] = Terminated
    before = {number: signal.getsignal(number) for number in kinds}

    def note(number: int, _: object) -> None:
        if stop.kind is None:
            stop.number, stop.kind = number, kinds[number]
        elif again:
            raise kinds[number]

    for number in kinds:
        signal.signal(number, note)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
