"""Delayed scaling: which scales a step takes, what it remembers, and what stays current."""

import torch

from common_kernels.fp8.cpu import codes_of, scale_from
from methods.nn.delayed import HISTORY
from tests.methods.nn import test_fp8_linear
from tests.methods.nn.test_fp8_linear import DEVICE, step


def converted(name="ste", fp8="hopper_delayed", **options):
    return test_fp8_linear.converted(name, fp8, **options)


def assert_equal(one, other):
    """Assert that y, dX and dW of two steps agree to the last bit."""
    (y, dx, grads), (other_y, other_dx, other_grads) = one[0], other[0]
    assert torch.equal(y, other_y) and torch.equal(dx, other_dx)
    assert torch.equal(grads["weight"], other_grads["weight"])


def test_the_first_step_has_scales_of_its_own_and_those_after_it_the_history_s():
    for name, options in (("ste", {}), ("fst", {"dense_fraction": 0.0, "mvue": "off"})):
        late, now = converted(name, **options), converted(name, "hopper", **options)
        first = step(*late, 0)
        assert_equal(first, step(*now, 0))
        _, x, dy = first
        layer = late[0]
        assert torch.equal(layer.amax, torch.stack([x.abs().max(), dy.abs().max()]))
        # Of the next step everything is smaller, so that current scales would be larger.
        (y, *_), x, _ = step(*late, 1, scale=0.3)
        scale = 448 / layer.amax_history[0, 1]
        codes = codes_of(x, scale_from(layer.amax_history[0, 1], "e4m3"), "e4m3").float()
        want = codes @ layer.codes.float().t() / (scale * layer.code_scales[0])
        want += layer.bias.detach()
        torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-4)
        assert not torch.equal(y, step(*now, 1, scale=0.3)[0][0])


def test_the_largest_of_so_many_steps_counts():
    layer, method = converted()
    scales = [2.0, *([1.0] * HISTORY)]
    seen = [step(layer, method, n, scale=scale)[1].abs().max() for n, scale in enumerate(scales)]
    assert layer.amax[0] == max(seen[1:]) and seen[0] > layer.amax[0]
    assert torch.equal(layer.amax_history[0].flip(0), torch.stack(seen[1:]))


def test_micro_batches_count_together():
    layer, method = converted()
    method.on_step_begin(0)
    for size in (0.5, 3.0, 1.0):
        method.open_micro_batch()
        layer(torch.full((4, 64), size, device=DEVICE)).sum().backward()
    assert layer.amax_seen.tolist() == [3.0, 1.0] and not layer.amax.any()
    method.on_gradients(0)
    method.on_step_end(0)
    assert layer.amax.tolist() == [3.0, 1.0] and not layer.amax_seen.any()


def test_gradients_that_have_no_scale_leave_the_last_one():
    """A GradScaler skips steps with such gradients; a layer that took no part has zeros. A first
    step without a gradient is no history: a scale of nothing would make the next gradient one of
    largest codes."""
    for size in (torch.inf, torch.nan, 0.0):
        layer, method = converted()
        dy = step(layer, method, 0)[2]
        for number in range(1, HISTORY + 2):
            step(layer, method, number, size=size)
            assert layer.amax_history.isfinite().all()
        assert layer.amax[1] == dy.abs().max()
        # The next finite one counts at once.
        later = step(layer, method, HISTORY + 2)[2]
        assert layer.amax[1] == layer.amax_history[1, 0] == later.abs().max()
        y, dx, grads = step(layer, method, HISTORY + 3)[0]
        assert all(result.isfinite().all() for result in (y, dx, grads["weight"]))

        layer, method = converted()
        step(layer, method, 0, size=size)
        assert not layer.has_history and layer.amax[0] > 0 == layer.amax[1]
        fresh, _ = converted()
        fresh.load_state_dict(layer.state_dict())
        assert not fresh.has_history
        assert_equal(step(layer, method, 1), step(*converted(fp8="hopper"), 1))
        assert layer.has_history and layer.bfloat16().amax.dtype == torch.float32
