"""A check that a training loop calls a method's hooks in order, based on the weights' versions."""

import warnings
from collections.abc import Iterable

from torch import Tensor


class CallOrder:
    """Detects weights that an optimizer changed outside the steps that the method was told of.

    Each check takes the trained weights. resumed: the state of the method was loaded.
    """

    def __init__(self, resumed: bool = False) -> None:
        self._begun: int | None = None  # the step that has begun but not ended
        self._goes_on = resumed  # True once a step has ended
        self.ended: int | None = None  # the last step that has begun and ended
        self._versions: dict[int, int] = {}

    @property
    def new(self) -> bool:
        """True if no step has begun or ended, and no state was loaded."""
        return self._begun is None and not self._goes_on

    def remember(self, weights: Iterable[Tensor], begun: int | None) -> None:
        """Remember the weights' versions; later changes count as an optimizer step."""
        self._begun, self._versions = begun, {id(w): w._version for w in weights}

    def _moved(self, weights: Iterable[Tensor]) -> bool:
        return any(self._versions.get(id(w), w._version) != w._version for w in weights)

    def check_ended(self, weights: Iterable[Tensor], step: int) -> None:
        """Raise RuntimeError if an earlier step changed weights and was not ended; warn if this
        step has ended already.

        A step that was skipped (because of a gradient that is not finite, for example) changed no
        weight and need not be ended.
        """
        if self._begun is not None and self._begun < step and self._moved(weights):
            raise RuntimeError(
                f"the weights changed in step {self._begun} and on_step_end({self._begun}) was not "
                "called: masks and operands are stale; call it after every optimizer.step()"
            )
        if self.ended is not None and step <= self.ended:  # on purpose in a benchmark
            warnings.warn(
                f"on_step_begin({step}) after on_step_end({self.ended}): phases and random bits "
                "follow from the number of the optimizer's step; count it from the start of the "
                "training, not anew in each epoch",
                stacklevel=4,
            )

    def check_step_begun(self, weights: Iterable[Tensor], changing: bool = False) -> None:
        """Raise RuntimeError if weights changed, or are `changing` soon, and no step has begun."""
        if self._begun is not None:
            return
        if changing or self._moved(weights):
            raise RuntimeError(
                "no step has begun, on which phases, masks and random bits depend: call "
                "on_step_begin(step) before the first micro-batch of every step and "
                "on_step_end(step) after optimizer.step()"
            )
        if not self._versions:
            self.remember(weights, None)

    def check_on_gradients(self, weights: Iterable[Tensor], step: int) -> None:
        """Raise RuntimeError if the weights changed in this step without `on_gradients`."""
        if self._begun == step and self._moved(weights):
            raise RuntimeError(
                f"the weights changed in step {step} and on_gradients({step}, optimizer) was not "
                "called, where this method does its part; call it before every optimizer.step()"
            )

    def end(self, step: int) -> None:
        if self._begun is not None:
            self.ended = step
        self._goes_on = True


def without_state(step: int, effect: str) -> str:
    """The message that a training goes on from a checkpoint without the method's state."""
    return (
        f"on_step_begin({step}) after the model's state was loaded, and method.load_state_dict was "
        f"not called: {effect}; call method.load_state_dict(state), with the method.state_dict() "
        "that was saved with the model's"
    )
