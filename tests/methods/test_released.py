"""Each defect of released code shows, and all else is the method that has none, bit for bit."""

import pytest
import torch
from torch import nn

import methods
from methods import slope, t_sr_ste
from methods.released import slope as released_slope
from methods.released import t_sr_ste as released_fst


def converted(kind, dtype=torch.float32, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)).to(dtype)
    method = kind.Method(kind.Config(include=["*"], exclude=[], **options))
    method.convert(model)
    return model, method, torch.optim.SGD(model.parameters(), lr=0.1)


def step_of(run, step):
    """One step on inputs that follow from its number: output, gradient of the input, gradients."""
    model, method, optimizer = run
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(3, 4, 16, generator=generator, dtype=model[0].bias.dtype, requires_grad=True)
    method.on_step_begin(step)
    method.open_micro_batch()
    y = model(x)
    y.sin().sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    method.on_gradients(step, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    method.on_step_end(step)
    return y.detach(), x.grad, gradients


def assert_same(first, second, but=()):
    assert first.keys() == second.keys()
    assert {name for name in first if not torch.equal(first[name], second[name])} == set(but)


def test_they_are_found_by_name_and_offered_to_nobody():
    assert methods.module("released.slope") is released_slope
    assert methods.build("released.slope", include=["*"]).Linear is released_slope.Linear
    assert not [name for name in methods.available() if "released" in name]
    with pytest.raises(ValueError, match=r"no method 'released.gone'; choose one of ast, bi_mask"):
        methods.module("released.gone")


# ---------------------------------------------------------------- SLoPe's copy of the weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slope_gives_dx_of_the_first_weight(dtype):
    right, released = (converted(kind, dtype) for kind in (slope, released_slope))
    layer = released[0][0]
    before = {name: layer.state_dict()[name].clone() for name in ("first", "column_mask")}
    (y, dx, gradients), (other_y, other_dx, others) = step_of(right, 0), step_of(released, 0)
    assert torch.equal(y, other_y) and torch.equal(dx, other_dx)
    assert_same(gradients, others)

    # From here on dX differs, and through it what the first layer gains; nothing else does.
    (y, dx, gradients), (other_y, other_dx, others) = step_of(right, 1), step_of(released, 1)
    assert torch.equal(y, other_y) and not torch.equal(dx, other_dx)
    assert_same(gradients, others, but=("0.values", "0.bias"))
    assert_same(before, {name: layer.state_dict()[name] for name in before})


def test_slope_keeps_the_copy_in_its_state():
    run = converted(released_slope)
    operand = backward_operand(run[0][0])
    for step in range(3):
        step_of(run, step)
    assert torch.equal(backward_operand(run[0][0]), operand)
    again = converted(released_slope, mask="magnitude")
    again[0].load_state_dict(run[0].state_dict())
    methods.refresh(again[0])
    assert torch.equal(backward_operand(again[0][0]), operand)
    weight = run[0][0].weight
    run[1].finalize(run[0])
    assert type(run[0][0]) is nn.Linear and torch.equal(run[0][0].weight, weight)


def backward_operand(layer):
    """The weight [out, in] that dX is computed with: dX for dY = I."""
    x = torch.zeros(16, 16, requires_grad=True)
    (grad,) = torch.autograd.grad(layer(x), x, torch.eye(16))
    return grad


def test_slope_has_no_adapters():
    with pytest.raises(ValueError, match=r"adapter_rank=2; released.slope has no adapters"):
        released_slope.Method(released_slope.Config(adapter_rank=2, total_steps=9))


# ---------------------------------------------------------------- FST started again


def test_fst_is_sparse_again_after_a_new_start():
    """20 steps, the last 10 of them dense; a new process begins with step 15."""
    options = {"total_steps": 20, "dense_fraction": 0.5, "refresh_every": 4, "alpha": 0.1}
    right, released = (converted(kind, **options) for kind in (t_sr_ste, released_fst))
    for step in range(15):
        assert_equal_steps(right, released, step)
        assert right[1].phase() == released[1].phase() == ("sparse" if step < 10 else "dense")
    assert_same(right[0].state_dict(), released[0].state_dict())

    # What the right method does that has this checkpoint, no dense phase, and starts to count here.
    fresh = converted(t_sr_ste, **{**options, "dense_fraction": 0.0})
    sparse = {f"{name}.dense": torch.tensor(False) for name in (0, 2)}
    fresh[0].load_state_dict({**released[0].state_dict(), **sparse})
    methods.refresh(fresh[0])
    fresh[1]._chooses = lambda step: step == 18
    changed = []
    for step in range(15, 20):
        mask = released[0][0].mask.clone()
        assert_equal_steps(fresh, released, step)
        assert released[1].phase() == "sparse"
        if not torch.equal(mask, released[0][0].mask):
            changed.append(step)
    assert_same(fresh[0].state_dict(), released[0].state_dict())
    assert changed == [15, 18]  # not 19, as the right method's number of the step would have it
    assert right[1].ends_dense and not released[1].ends_dense
    assert released[1].metrics()["illegal_groups"] == 0


def assert_equal_steps(first, second, step):
    (y, dx, gradients), (other_y, other_dx, others) = step_of(first, step), step_of(second, step)
    assert torch.equal(y, other_y) and torch.equal(dx, other_dx)
    assert_same(gradients, others)


def test_fst_needs_a_dense_end():
    for options in ({"dense_fraction": 0.0}, {"dense_phase": "start"}):
        with pytest.raises(
            ValueError, match=r"released.t_sr_ste is about a dense phase at the end"
        ):
            released_fst.Method(released_fst.Config(total_steps=9, **options))
