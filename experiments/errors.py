"""What ends a driver early: an error for the user, printed as one line, or a signal."""

import signal


class UserError(Exception):
    """What is wrong, with which value, and what to do."""


class Terminated(BaseException):
    """SIGTERM, as the managers of shared machines send it; no `except Exception` swallows it."""


def raise_on_sigterm() -> None:
    """Let SIGTERM unwind the program as Ctrl-C does, so that locks and progress bars are closed."""

    def stop(*_: object) -> None:
        raise Terminated

    signal.signal(signal.SIGTERM, stop)
