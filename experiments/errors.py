"""What ends a driver early: an error for the user, printed as one line, or a signal."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class UserError(Exception):
    """What is wrong, with which value, and what to do."""


class Terminated(BaseException):
    """SIGTERM, as the managers of shared machines send it; no `except Exception` swallows it."""


def raise_on_sigterm() -> None:
    """Let SIGTERM unwind the program as Ctrl-C does, so that locks and progress bars are closed."""

    def stop(*_: object) -> None:
        raise Terminated

    signal.signal(signal.SIGTERM, stop)


class Stop:
    """A signal that has come. `kind` is what it is to raise, None as long as there is none."""

    kind: type[BaseException] | None = None


@contextmanager
def deferred_stop() -> Iterator[Stop]:
    """Note the first Ctrl-C or SIGTERM in place of raising it, for a loop that asks after each step
    and saves what it has; a second one is raised at once. Elsewhere than in the main thread, which
    alone hears signals, nothing changes.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    kinds: dict[int, type[BaseException]] = {
        signal.SIGINT: KeyboardInterrupt,
        signal.SIGTERM: Terminated,
    }
    before = {number: signal.getsignal(number) for number in kinds}

    def note(number: int, _: object) -> None:
        if stop.kind is not None:
            raise kinds[number]
        stop.kind = kinds[number]

    for number in kinds:
        signal.signal(number, note)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
