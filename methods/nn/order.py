"""The order of a training loop's calls, told from the weights."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


class CallOrder:
    """Notices weights that an optimizer changed outside of the steps that a method is told of.

    Each call is given the weights that are trained.
    """

    def __init__(self) -> None:
        self._begun: int | None = None  # the step that has begun and not ended
        self._versions: dict[int, int] = {}

    def remember(self, weights: Iterable[Tensor], begun: int | None) -> None:
        """From here on, a change is that of an optimizer step."""
        self._begun, self._versions = begun, {id(w): w._version for w in weights}

    def _moved(self, weights: Iterable[Tensor]) -> bool:
        return any(self._versions.get(id(w), w._version) != w._version for w in weights)

    def check_ended(self, weights: Iterable[Tensor], step: int) -> None:
        """Raise RuntimeError if a step before this one was not ended.

        One that was left out, because its gradient was not finite, say, changed no weight and need
        not be ended.
        """
        if self._begun is not None and self._begun < step and self._moved(weights):
            raise RuntimeError(
                f"the weights changed in step {self._begun} and on_step_end({self._begun}) was not "
                "called: masks and operands are stale; call it after every optimizer.step()"
            )

    def check_begun(self, weights: Iterable[Tensor], step: int) -> None:
        """Raise RuntimeError if this step, which ends, was not begun."""
        if self._begun is None and self._moved(weights):
            raise RuntimeError(
                f"on_step_end({step}) without on_step_begin({step}): phases and random bits stand "
                "still; call it before the first micro-batch of every step"
            )
