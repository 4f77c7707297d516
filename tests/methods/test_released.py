"""Each defect of released code shows, and all else is the method that has none, bit for bit."""

import torch
from torch import nn

import methods
from common_kernels import compress_nm, unpack_mask
from methods import ast, fst, semi_sparse, slope
from methods.released import ast as released_ast
from methods.released import fst as released_fst
from methods.released import semi_sparse as released_semi_sparse
from methods.released import slope as released_slope
from methods.released import slope_dense, slope_mask
from tests.methods.loop import convert, dgrad_operand, training_step


def converted(kind, dtype=torch.float32, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)).to(dtype)
    name = kind.__name__.removeprefix("methods.")
    _, method = convert(name, model, exclude=[], **options)
    return model, method, torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)


def step_of(run, step):
    """One step on inputs that follow from its number: output, gradient of the input, gradients."""
    model, method, optimizer = run
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(3, 4, 16, generator=generator, dtype=model[0].bias.dtype, requires_grad=True)
    with training_step(method, step, optimizer):
        method.open_micro_batch()
        y = model(x)
        y.sin().sum().backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    return y.detach(), x.grad, gradients


def assert_same(first, second, but=()):
    assert first.keys() == second.keys()
    assert {name for name in first if not torch.equal(first[name], second[name])} == set(but)


def test_they_are_found_by_name_and_offered_to_nobody():
    assert methods.module("released.slope") is released_slope
    assert not [name for name in methods.available() if "released" in name]


def test_slope_gives_dx_of_the_first_weight():
    for dtype in (torch.float32, torch.bfloat16):
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
    operand = dgrad_operand(run[0][0])
    for step in range(3):
        step_of(run, step)
    assert torch.equal(dgrad_operand(run[0][0]), operand)
    again = converted(released_slope, mask="magnitude")
    again[0].load_state_dict(run[0].state_dict())
    methods.refresh(again[0])
    assert torch.equal(dgrad_operand(again[0][0]), operand)
    weight = run[0][0].weight
    run[1].finalize(run[0])
    assert type(run[0][0]) is nn.Linear and torch.equal(run[0][0].weight, weight)


def test_fst_is_sparse_again_after_a_new_start():
    """20 steps, the last 10 of them dense; a new process begins with step 15."""
    options = {"total_steps": 20, "dense_fraction": 0.5, "refresh_every": 4, "alpha": 0.1}
    right, released = (converted(kind, **options) for kind in (fst, released_fst))
    for step in range(15):
        assert_equal_steps(right, released, step)
        assert right[1].phase() == released[1].phase() == ("sparse" if step < 10 else "dense")
    assert_same(right[0].state_dict(), released[0].state_dict())

    # What the right method does that has this checkpoint, no dense phase, and starts to count here.
    fresh = converted(fst, **{**options, "dense_fraction": 0.0})
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
    assert right[1].capabilities.ends_dense
    assert not released[1].capabilities.ends_dense
    assert released[1].metrics()["illegal_groups"] == 0


def assert_equal_steps(first, second, step):
    (y, dx, gradients), (other_y, other_dx, others) = step_of(first, step), step_of(second, step)
    assert torch.equal(y, other_y) and torch.equal(dx, other_dx)
    assert_same(gradients, others)


def test_slope_takes_the_gradients_of_pruned_neighbours():
    right, released = converted(slope), converted(slope_mask)
    seen = {}
    released[0][2].register_forward_hook(lambda m, x, y: seen.update(x=x[0], y=y))
    released[0][2].register_full_backward_hook(lambda m, dx, dy: seen.update(dy=dy[0]))
    (y, dx, gradients), (other_y, other_dx, others) = step_of(right, 0), step_of(released, 0)
    assert torch.equal(y, other_y) and torch.equal(dx, other_dx)
    assert_same(gradients, others, but=("0.values", "2.values"))
    kept = unpack_mask(released[0][2].row_mask, 16)
    dweight = seen["dy"].reshape(-1, 16).t() @ seen["x"].detach().reshape(-1, 16)
    # By hand: of the first group of a row the two that are pruned, in the order of the kept ones.
    assert others["2.values"][5, :2].tolist() == dweight[5, :4][~kept[5, :4]].tolist()
    assert torch.equal(others["2.values"].flatten(), dweight[~kept])
    assert torch.equal(gradients["2.values"], compress_nm(dweight, right[0][2].row_mask))


def test_slope_leaves_what_is_dense_where_it_was():
    right, released = converted(slope), converted(slope_dense)
    before = {name: p.detach().clone() for name, p in released[0].named_parameters()}
    assert_equal_steps(right, released, 0)
    for name, parameter in released[0].named_parameters():
        same = dict(right[0].named_parameters())[name]
        assert torch.equal(parameter, same if name.endswith("values") else before[name])
        assert not torch.equal(same, before[name])


def test_semi_sparse_keeps_the_largest_values():
    right, released = converted(semi_sparse), converted(released_semi_sparse)
    weight, mask = released[0][0].weight, released[0][0].mask
    for top, left in ((0, 0), (4, 8), (12, 12)):
        tile = weight[top : top + 4, left : left + 4].tolist()
        kept = torch.zeros(4, 4, dtype=torch.bool)
        for _, i, j in sorted((tile[i][j], i, j) for i in range(4) for j in range(4))[::-1]:
            kept[i, j] = kept[i].sum() < 2 and kept[:, j].sum() < 2
        assert torch.equal(mask[top : top + 4, left : left + 4], kept)
    assert not torch.equal(mask, right[0][0].mask)
    for model, _, _ in (right, released):  # it is the method where no weight is negative
        with torch.no_grad():
            for layer in (model[0], model[2]):
                layer.weight.abs_()
        methods.refresh(model)
    assert_equal_steps(right, released, 0)


def retrained(kind, **options):
    """First weight, its mask; weight, bias and second moments after steps of AST's optimizer."""
    torch.manual_seed(0)
    layer = nn.Linear(8, 4)
    method = kind.Method(kind.Config(include=["*"], kl_weight=0.0, ramp_steps=0, **options))
    method.convert(layer)
    before, mask = layer.weight.detach().clone(), layer.mask.clone()
    optimizer = method.optimizer(layer.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    for step in range(3):
        with training_step(method, step, optimizer):
            for parameter in layer.parameters():
                generator = torch.Generator().manual_seed(step)
                parameter.grad = torch.randn(parameter.shape, generator=generator)
    state = {name: optimizer.state[p]["exp_avg_sq"] for name, p in layer.named_parameters()}
    return before, mask, layer.weight.detach(), layer.bias.detach(), state


def test_ast_is_the_released_formula():
    """The formula is written as in the released code, with its names: an int32 mask, `~`, and the
    first moment apart."""
    before, mask, after, _, _ = retrained(released_ast, alpha=0.5, refresh_every=0)
    p, exp_avg, exp_avg_sq = before.clone(), torch.zeros(4, 8), torch.zeros(4, 8)
    for step in range(3):
        grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
        p.mul_(1 - 1e-3 * 0.1)
        decay_term = p * ~mask.int() * 0.5
        exp_avg.lerp_(grad, 1 - 0.9)  # there mul_ and add_, which round differently
        actual_update = exp_avg + decay_term
        exp_avg_sq.mul_(0.999).addcmul_(actual_update, actual_update, value=1 - 0.999)
        denom = (exp_avg_sq / (1 - 0.999 ** (step + 1))).sqrt_().add_(1e-8)
        p.addcdiv_(actual_update, denom, value=-1e-3 / (1 - 0.9 ** (step + 1)))
    assert torch.equal(p, after)


def test_ast_is_the_method_without_decay_and_where_nothing_is_masked():
    *tensors, state = retrained(ast, alpha=0.0)
    *others, other_state = retrained(released_ast, alpha=0.0)
    assert all(map(torch.equal, tensors, others))
    assert_same(state, other_state)
    right, released = retrained(ast, alpha=0.5), retrained(released_ast, alpha=0.5)
    assert torch.equal(right[3], released[3]) and not torch.equal(right[2], released[2])
