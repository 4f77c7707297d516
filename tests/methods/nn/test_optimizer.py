"""`FusedAdamW` beside `torch.optim.AdamW`: what it takes over, and that the step is the same.

That no bit changes on a CPU, for every method, refresh and phase, is in test_contract.py.
"""

import copy

import pytest
import torch
from torch import nn

import methods
from common_kernels import nm_mask, transposable_mask24
from methods.nn.gemms import Products
from tests.methods.loop import Parts, training_step

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # for kernels; with the rest no bit changes
FST = {"alpha": 0.1, "mvue": "off", "total_steps": 8, "refresh_every": 2}
TAKEN = [
    ("ste", {}),
    ("sr_ste", {"alpha": 0.1}),
    ("sr_ste", {"alpha": 0.1, "decay_on": "weights"}),
    ("fst", FST | {"dense_fraction": 0.5}),
    ("semi_sparse", {"algorithm": "exact"}),
    ("semi_sparse", {}),
    ("s_ste", {"mvue": "off"}),
]
LEFT = [
    ("bi_mask", {}),
    ("gmp", {"total_steps": 8}),
    ("s_ste", {"gamma": 0.1}),
    ("s_ste", {"beta": "mse_dynamic"}),
    ("s_ste", {"mvue_weight": True}),
    ("fst", FST | {"algorithm": "two_approx"}),
]


def fused(params, **settings):
    return torch.optim.AdamW(params, fused=True, **settings)


class Run(Parts):
    """Two sparse linears and a dense one, with gradients that follow from the step."""

    def __init__(self, name, options, make=methods.FusedAdamW, packed=False, device="cpu", **rest):
        torch.manual_seed(0)
        linears = nn.Linear(64, 128), nn.Linear(128, 64), nn.Linear(64, 8)
        self.model = nn.Sequential(*linears).to(device)
        self.method = methods.build(name, include=["0", "1"], measure_every=0, **options)
        self.method.convert(self.model, dtype=torch.bfloat16)
        for layer in self.method.sparse_layers.values() if packed else ():
            products = layer.sparse_products()
            layer.accelerate(Products(fprop=products.fprop, dgrad=products.dgrad))
        self.optimizer = make(self.model.parameters(), lr=1e-2, **rest)

    def gradients(self, step, seed=None):
        """Begin the step and make its gradients."""
        self.method.on_step_begin(step)
        self.method.open_micro_batch()
        generator = torch.Generator().manual_seed(step if seed is None else seed)
        for parameter in self.model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.grad = drawn.to(parameter.device)

    def step(self, step):
        with training_step(self.method, step, self.optimizer):
            self.gradients(step)

    def works(self, step):
        """The layers whose work the optimizer has taken over in this step."""
        self.gradients(step)
        self.method.on_gradients(step, self.optimizer)
        return self.method._works.keys()


def both(name, options):
    """A run by our optimizer and one by torch's."""
    return Run(name, options), Run(name, options, fused)


def assert_equal(one, other, of=(nn.Module.named_parameters, nn.Module.named_buffers)):
    for each in of:
        for (name, a), (_, b) in zip(each(one.model), each(other.model), strict=True):
            assert torch.equal(a, b), name


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_takes_over_the_work_and_derives_the_same(packed, monkeypatch):
    """After a step of the kernels, masks and operands are exactly those of the new weights, over
    refreshes and a change of phase; from equal states the weights are torch's to rounding."""
    for name, options in TAKEN:
        run = Run(name, options, packed=packed, device=DEVICE)
        other = Run(name, options, fused, packed=packed, device=DEVICE)
        for step in (3, 4, 5) if name == "fst" else (3,):  # in step 4 of 8 fst turns dense
            run.method.on_step_begin(step)
            other.load(run.state())
            assert run.works(step) == {"0", "1"}
            with monkeypatch.context() as patch:
                patch.setenv("SPARSE24_BACKEND", "triton")
                run.optimizer.step()
            with monkeypatch.context() as patch:
                for layer in run.method.sparse_layers.values():
                    patch.setattr(layer, "refresh", lambda: pytest.fail("derived again"))
                    patch.setattr(layer, "refresh_mask", lambda: pytest.fail("chosen again"))
                run.method.on_step_end(step)
            other.step(step)
            for a, b in zip(run.model.parameters(), other.model.parameters(), strict=True):
                # A first step moves an entry by lr; a few roundings of that, and of the entry.
                # Torch's kernel of a GPU has 1 - beta2 in fp32, where one of beta2 is 1000 times
                # as much.
                rounding = 8 * (b.abs() + 10 * 1e-2) + 1e-2 / (1 - 0.999)
                assert ((a - b).abs() <= 2**-24 * rounding).all()
            derived = copy.deepcopy(run)
            for layer in derived.model[:2]:
                if run.method._chooses(step):
                    layer.refresh_mask()
                layer.refresh()
            assert_equal(run, derived)


def test_leaves_other_work_to_the_hooks():
    for name, options in LEFT:
        assert not Run(name, options).works(0)
    tied = Run("sr_ste", {"alpha": 0.1})  # a weight that two layers share
    for name in ("weight", "mask"):
        setattr(tied.method.layers["1"], name, getattr(tied.method.layers["0"], name))
    assert not tied.works(0)


def test_state_dicts_of_torchs_adamw_load_and_are_loaded():
    other = Run("sr_ste", {}, torch.optim.AdamW)
    other.step(0)
    one, reference = both("sr_ste", {})
    for run in (one, reference):
        run.load(other.state())
    assert all(group["fused"] for group in one.optimizer.param_groups)
    reference.optimizer.param_groups[0].update(fused=True, foreach=False)
    one.step(1), reference.step(1)
    assert_equal(one, reference)
    other.load(one.state())
    other.step(2), one.step(2)
    assert_equal(other, one)  # it goes on with torch's fused kernel, as the state says


def test_a_step_that_a_scaler_skips_still_chooses_the_mask_that_is_due():
    """The mask is that of the unchanged weights, as with the hooks. A loop need not wait for the
    device to learn whether to call `on_gradients`."""
    for hook in (True, False):
        runs = both("fst", FST)
        for run in runs:
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            run.step(0)
            before = [p.detach().clone() for p in run.model.parameters()]
            run.gradients(1)
            run.model[0].weight.grad[3, 5] = torch.inf
            scaler.scale(torch.ones(()))  # makes the scale
            scaler.unscale_(run.optimizer)
            if hook and run is runs[0]:
                run.method.on_gradients(1, run.optimizer)
            scaler.step(run.optimizer)
            scaler.update()
            run.method.on_step_end(1)
            assert all(map(torch.equal, run.model.parameters(), before))
            assert run.optimizer.state[run.model[0].weight]["step"] == 1
            assert "found_inf" not in vars(run.optimizer)
            mask = transposable_mask24(run.model[0].weight.detach())
            assert torch.equal(run.model[0].mask, mask)
        assert_equal(*runs)


def test_clipping_by_a_scale_of_the_gradients():
    """`grad_scale` divides gradients in the step itself; by a power of two no bit differs."""
    runs = [Run("sr_ste", {"alpha": 0.1}) for _ in range(2)]
    for run in runs:
        with training_step(run.method, 0, run.optimizer):
            run.gradients(0)
            if run is runs[0]:
                run.optimizer.grad_scale = torch.tensor(4.0)
            for parameter in run.model.parameters() if run is runs[1] else ():
                parameter.grad /= 4
    assert_equal(*runs)


def test_any_setting_and_defect_gives_the_step_of_torch():
    """Rates in tensors; other forms of AdamW; layers that choose their masks otherwise."""
    rates = {"lr": torch.tensor(0.03), "betas": (0.5, 0.75), "weight_decay": 0.5, "eps": 1e-3}
    for name, options, settings in (
        ("ste", {}, rates),
        ("ste", {}, {"amsgrad": True}),
        ("ste", {}, {"maximize": True}),
        ("released.fst", FST, {}),
    ):
        runs = both(name, options)
        for step in range(3 if not settings else 1):
            for run in runs:
                run.optimizer.param_groups[0].update(settings)
                run.step(step)
            assert_equal(*runs)


def test_two_models_share_an_optimizer():
    """One optimizer that steps two models keeps the decay of both methods."""
    pairs = []
    for make in (methods.FusedAdamW, fused):
        runs = [Run("sr_ste", {"alpha": 1.0}, make) for _ in range(2)]
        optimizer = make([p for run in runs for p in run.model.parameters()], lr=1e-2)
        for step in range(3):
            for number, run in enumerate(runs):
                run.gradients(step, 2 * step + number)
            for run in runs:
                run.method.on_gradients(step, optimizer)
            optimizer.step()
            for run in runs:
                run.method.on_step_end(step)
        pairs.append(runs)
    for run, other in zip(*pairs, strict=True):
        assert_equal(run, other)


def test_hooks_do_what_the_optimizer_did_not_come_to():
    """Hooks do the work if a loop leaves `optimizer.step` out or gives `on_gradients` no
    optimizer."""
    run, other = both("sr_ste", {"alpha": 0.1})
    assert run.works(0)
    with torch.no_grad():
        run.model[0].weight.add_(torch.randn(128, 64))
    run.method.on_step_end(0)
    assert torch.equal(run.model[0].mask, nm_mask(run.model[0].weight.detach()))

    other.load(run.state())
    for each in (run, other):
        each.gradients(1)
        each.method.on_gradients(1)
        each.optimizer.step()
        each.method.on_step_end(1)
    assert_equal(run, other)
