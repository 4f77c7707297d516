"""Predicted and actual change of the loss in a step: against one's own passes, and to no effect."""

import pytest
import torch

from experiments.training import descent, pretraining
from tests.experiments.conftest import quiet, untimed

SHORT = ("train.steps=6", "train.warmup_steps=2", "train.log_every=1")


def changes(config):
    pretraining.run(config, quiet)
    log = untimed(config)
    return {r["step"]: r for r in log if "actual_change" in r}, log


@pytest.mark.parametrize("own", ["method.fp8=hopper_delayed", "method.refresh_every=2"])
def test_the_training_stays_the_same(own, tiny):
    method = "s_ste" if "fp8" in own else "fst"
    plain, observed = (
        tiny(f"method={method}", *SHORT, own, *more) for more in ([], ["train.descent_every=2"])
    )
    assert plain.directory() != observed.directory()
    found, log = changes(observed)
    _, want = changes(plain)
    assert [r for r in log if "actual_change" not in r] == want
    assert list(found) == [0, 2, 4]
    assert all(("old_masks_change" in r) is (method != "s_ste") for r in found.values())
    # The first step has a learning rate of 0: nothing changes.
    assert all(value == 0.0 for name, value in found[0].items() if name != "step")
    assert found[2]["predicted_change"] < 0


def test_what_is_measured(tiny, monkeypatch):
    """Against passes by hand: the batch's loss at either end, the gradient at the start."""
    seen = []

    class Spy(descent.Descent):
        def __init__(self, optimization, batches, shares):
            self.gradients = by_hand(optimization.model, batches)[1]
            super().__init__(optimization, batches, shares)
            assert all(p.grad is None for p in optimization.model.parameters())

        def after(self):
            found, model = super().after(), self.optimization.model
            moves = [p.detach() - w for p, w, _ in self.weights]
            want = sum((g * d).sum() for g, d in zip(self.gradients, moves, strict=True))
            seen.append((found, float(want), float(by_hand(model, self.batches)[0] - self.loss)))
            assert all(p.grad is None for p in model.parameters())
            return found

    monkeypatch.setattr("experiments.training.trainer.Descent", Spy)
    # Two micro-batches; no sampling, so that the gradient is the same whenever it is taken.
    changes(tiny("method=ste", *SHORT, "train.descent_every=1", "impl.micro_batch=2"))
    assert len(seen) == 6
    for found, predicted, actual in seen:  # the masks that were put in for old_masks are out again
        assert float(found["predicted_change"]) == pytest.approx(predicted, rel=1e-4, abs=1e-9)
        assert float(found["actual_change"]) == pytest.approx(actual, abs=1e-6)


def by_hand(model, batches):
    """(mean loss of equal micro-batches, gradients)."""
    loss = sum(model(**batch)[1] for batch in batches) / len(batches)
    return loss.detach(), torch.autograd.grad(loss, list(model.parameters()))
