"""`FusedAdamW` beside `torch.optim.AdamW`: what it takes over, and that the step is the same.

That no bit changes on a CPU, for every method, refresh and phase, is in test_contract.py.
"""

import copy
import io

import pytest
import torch
from torch import nn

import methods
from common_kernels import nm_mask, transposable_mask24
from common_kernels.fp8 import cpu
from methods.nn.gemms import Products

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # for kernels; with the rest no bit changes
T_SR_STE = {"alpha": 0.1, "mvue": "off", "total_steps": 8, "refresh_every": 2}
TAKEN = [
    ("ste", {}),
    ("sr_ste", {"alpha": 0.1}),
    ("sr_ste", {"alpha": 0.1, "decay_on": "weights"}),
    ("fst", T_SR_STE | {"dense_fraction": 0.5}),
    ("semi_sparse", {"algorithm": "exact"}),
    ("semi_sparse", {}),
    ("s_ste", {"mvue": "off"}),
]
LEFT = [
    ("bi_mask", {}),
    ("gmp", {"total_steps": 8}),
    ("s_ste", {"fp8": "paper", "mvue_weight": True}),
    ("s_ste", {"gamma": 0.1}),
    ("s_ste", {"beta": "mse_dynamic"}),
    ("s_ste", {"mvue_weight": True}),
    ("semi_sparse", {"mode": "activation"}),
    ("fst", T_SR_STE | {"algorithm": "two_approx"}),
]


class Run:
    """Two sparse linears and a dense one, with gradients that follow from the step."""

    def __init__(
        self, name, options, make=methods.FusedAdamW, packed=False, device="cpu", **settings
    ):
        torch.manual_seed(0)
        linears = nn.Linear(64, 128), nn.Linear(128, 64), nn.Linear(64, 8)
        self.model = nn.Sequential(*linears).to(device)
        self.method = methods.build(name, include=["0", "1"], measure_every=0, **options)
        self.method.convert(self.model, dtype=torch.bfloat16)
        if packed:
            for layer in self.method.sparse_layers.values():
                products = layer.sparse_products()
                layer.accelerate(Products(fprop=products.fprop, dgrad=products.dgrad))
        self.optimizer = make(self.model.parameters(), lr=1e-2, **settings)

    def gradients(self, step):
        self.method.open_micro_batch()
        generator = torch.Generator().manual_seed(step)
        for parameter in self.model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.grad = drawn.to(parameter.device)

    def step(self, step):
        self.method.on_step_begin(step)
        self.gradients(step)
        self.method.on_gradients(step, self.optimizer)
        self.optimizer.step()
        self.method.on_step_end(step)

    def tensors(self):
        return {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}

    def state(self):
        parts = self.model, self.method, self.optimizer
        torch.save([part.state_dict() for part in parts], buffer := io.BytesIO())
        buffer.seek(0)
        return torch.load(buffer, weights_only=True)

    def load(self, state):
        for part, saved in zip((self.model, self.method, self.optimizer), state, strict=True):
            part.load_state_dict(saved)


def fused(params, **settings):
    return torch.optim.AdamW(params, fused=True, **settings)


def assert_equal(one, other):
    tensors = other.tensors()
    assert one.tensors().keys() == tensors.keys()
    for name, tensor in one.tensors().items():
        assert torch.equal(tensor, tensors[name]), name


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_takes_over_the_work_and_derives_the_same(packed, monkeypatch):
    """After a step of the kernels, masks and operands are exactly those of the new weights, over
    refreshes and a change of phase; from equal states the weights are torch's to rounding."""
    for name, options in TAKEN:
        run = Run(name, options, packed=packed, device=DEVICE)
        other = Run(name, options, fused, packed=packed, device=DEVICE)
        for step in (3, 4, 5):
            run.method.on_step_begin(step)  # in step 4 of 8 fst turns dense
            other.load(run.state())
            run.gradients(step)
            run.method.on_gradients(step, run.optimizer)
            assert run.method._works.keys() == {"0", "1"}
            with monkeypatch.context() as patch:
                patch.setenv("SPARSE24_BACKEND", "triton")
                run.optimizer.step()
            with monkeypatch.context() as patch:
                for layer in run.method.sparse_layers.values():
                    patch.setattr(layer, "refresh", lambda: pytest.fail("derived again"))
                    patch.setattr(layer, "refresh_mask", lambda: pytest.fail("chosen again"))
                run.method.on_step_end(step)
            other.step(step)
            for (n, a), (_, b) in zip(
                run.model.named_parameters(), other.model.named_parameters(), strict=True
            ):
                # A first step moves an entry by lr; a few roundings of that, and of the entry.
                # Torch's kernel of a GPU has 1 - beta2 in fp32, where one of beta2 is 1000 times
                # as much.
                rounding = 8 * (b.abs() + 10 * 1e-2) + 1e-2 / (1 - 0.999)
                assert ((a - b).abs() <= 2**-24 * rounding).all(), n
            derived = copy.deepcopy(run.model)
            for layer in derived[:2]:
                if run.method._chooses(step):
                    layer.refresh_mask()
                layer.refresh()
            for (n, a), (_, b) in zip(
                run.model.named_buffers(), derived.named_buffers(), strict=True
            ):
                assert torch.equal(a, b), n


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ste", {"fp8": "paper"}),
        ("fst", T_SR_STE | {"fp8": "hopper"}),
        ("s_ste", {"fp8": "hopper"}),
    ],
)
def test_codes_in_fp8_are_derived_by_the_hooks(name, options, monkeypatch):
    """The optimizer does decay, masks and the largest magnitude, which codes need first."""
    run, other = (
        Run(name, options | {"total_steps": 8}, make) for make in (methods.FusedAdamW, fused)
    )
    for step in (3, 4, 5):
        run.step(step), other.step(step)
        assert_equal(run, other)
    run.method.on_step_begin(7)
    run.gradients(7)
    run.method.on_gradients(7, run.optimizer)
    assert run.method._works.keys() == {"0", "1"}
    run.optimizer.step()
    for layer in run.method.sparse_layers.values():
        monkeypatch.setattr(layer, "refresh_mask", lambda: pytest.fail("chosen again"))
        monkeypatch.setattr(cpu, "amax_of", lambda _: pytest.fail("searched again"))
    run.method.on_step_end(7)


def test_leaves_other_work_to_the_hooks():
    for name, options in LEFT:
        run = Run(name, options)
        run.method.on_step_begin(0)
        run.gradients(0)
        run.method.on_gradients(0, run.optimizer)
        assert not run.method._works


def test_state_dicts_of_torchs_adamw_load_and_are_loaded():
    for make in (torch.optim.AdamW, fused):
        one, other = Run("sr_ste", {}), Run("sr_ste", {}, make)
        other.step(0)
        one.load(other.state())
        assert all(group["fused"] for group in one.optimizer.param_groups)
        reference = Run("sr_ste", {}, fused)
        reference.load(other.state())
        reference.optimizer.param_groups[0].update(fused=True, foreach=False)
        for run in (one, reference):
            run.step(1)
        assert_equal(one, reference)
        other.load(one.state())
        assert (
            other.optimizer.state_dict()["state"].keys()
            == one.optimizer.state_dict()["state"].keys()
        )
        other.step(2), one.step(2)
        assert_equal(other, one)  # it goes on with torch's fused kernel, as the state says


def test_a_step_that_a_scaler_skips_still_chooses_the_mask_that_is_due():
    """The mask is that of the unchanged weights, as with the hooks. A loop need not wait for the
    device to learn whether to call `on_gradients`."""
    for hook in (True, False):
        runs = [Run("fst", T_SR_STE, make) for make in (methods.FusedAdamW, fused)]
        for run in runs:
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            run.step(0)
            before = [p.detach().clone() for p in run.model.parameters()]
            run.method.on_step_begin(1)
            run.gradients(1)
            run.model[0].weight.grad[3, 5] = torch.inf
            scaler.scale(torch.ones(()))  # makes the scale
            scaler.unscale_(run.optimizer)
            if hook and run is runs[0]:
                run.method.on_gradients(1, run.optimizer)
            scaler.step(run.optimizer)
            scaler.update()
            run.method.on_step_end(1)
            assert all(
                torch.equal(a, b) for a, b in zip(run.model.parameters(), before, strict=True)
            )
            assert run.optimizer.state[run.model[0].weight]["step"] == 1
            assert "found_inf" not in vars(run.optimizer)
            mask = transposable_mask24(run.model[0].weight.detach())
            assert torch.equal(run.model[0].mask, mask)
        assert_equal(*runs)


def test_clipping_by_a_scale_of_the_gradients():
    """`grad_scale` divides gradients in the step itself; by a power of two no bit differs."""
    runs = [Run("sr_ste", {"alpha": 0.1}) for _ in range(2)]
    for run, scaled in zip(runs, (True, False), strict=True):
        run.method.on_step_begin(0)
        run.gradients(0)
        if scaled:
            run.optimizer.grad_scale = torch.tensor(4.0)
        else:
            for parameter in run.model.parameters():
                parameter.grad /= 4
        run.method.on_gradients(0, run.optimizer)
        run.optimizer.step()
        run.method.on_step_end(0)
    assert_equal(*runs)


def test_rates_of_a_group_and_in_tensors():
    run, other = (Run("ste", {}, make) for make in (methods.FusedAdamW, fused))
    for each in (run, other):
        (group,) = each.optimizer.param_groups
        group.update(lr=torch.tensor(0.03), betas=(0.5, 0.75), weight_decay=0.5, eps=1e-3)
        each.step(0)
    assert_equal(run, other)


def test_defects_of_released_code_are_the_same_in_one_pass():
    """A layer that chooses its masks otherwise keeps its own choice."""
    for name in ("released.semi_sparse", "released.fst"):
        options = T_SR_STE if name.endswith("fst") else {"algorithm": "greedy"}
        run, other = (Run(name, options, make) for make in (methods.FusedAdamW, fused))
        for step in range(3):
            run.step(step)
            other.step(step)
            assert_equal(run, other)


def test_two_models_share_an_optimizer():
    """One optimizer that steps two models keeps the decay of both methods."""
    pairs = []
    for make in (methods.FusedAdamW, fused):
        runs = [Run("sr_ste", {"alpha": 1.0}, make) for _ in range(2)]
        weights = [p for run in runs for p in run.model.parameters()]
        optimizer = make(weights, lr=1e-2)
        for step in range(3):
            for number, run in enumerate(runs):
                run.method.on_step_begin(step)
                run.gradients(2 * step + number)
            for run in runs:
                run.method.on_gradients(step, optimizer)
            optimizer.step()
            for run in runs:
                run.method.on_step_end(step)
        pairs.append(runs)
    for run, other in zip(*pairs, strict=True):
        assert_equal(run, other)


def test_a_hook_of_the_optimizer_runs_once_a_step():
    run, calls = Run("ste", {}), []
    run.optimizer.register_step_post_hook(lambda *_: calls.append(1))
    run.step(0)
    assert calls == [1]


def test_hooks_do_what_the_optimizer_did_not_come_to():
    """Hooks do the work if a loop leaves `optimizer.step` out, gives `on_gradients` no optimizer,
    or steps other weights."""
    run, other = Run("sr_ste", {"alpha": 0.1}), Run("sr_ste", {"alpha": 0.1}, fused)
    run.method.on_step_begin(0)
    run.gradients(0)
    run.method.on_gradients(0, run.optimizer)
    with torch.no_grad():
        run.model[0].weight.add_(torch.randn(128, 64))
    run.method.on_step_end(0)
    assert torch.equal(run.model[0].mask, nm_mask(run.model[0].weight.detach()))

    other.load(run.state())
    for each in (run, other):
        each.method.on_step_begin(1)
        each.gradients(1)
        each.method.on_gradients(1)
        each.optimizer.step()
        each.method.on_step_end(1)
    assert_equal(run, other)

    run.gradients(2)
    run.model[0].weight.grad = None
    run.optimizer.param_groups[0]["params"] = list(run.model[0].parameters())
    run.method.on_gradients(2, run.optimizer)
    assert not run.method._works


def test_other_forms_of_adamw_are_torchs():
    for option in ("amsgrad", "maximize"):
        run, other = (Run("ste", {}, make) for make in (methods.FusedAdamW, fused))
        for each in (run, other):
            each.optimizer.param_groups[0][option] = True
            each.step(0)
        assert_equal(run, other)


def test_weights_that_two_layers_share_are_left_to_the_hooks():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    method = methods.build("sr_ste", include=["*"], alpha=0.1)
    method.convert(model)
    model[1].weight = model[0].weight
    optimizer = methods.FusedAdamW(model.parameters())
    model[0].weight.grad = torch.ones(8, 8)
    method.on_gradients(0, optimizer)
    assert not method._works


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("name", "options"), TAKEN, ids=str)
def test_replayed_from_a_cuda_graph_it_is_the_launched_step(name, options):
    """Hooks and optimizer in one graph, with a mask that is due, give the launched step's bits."""
    launched, replayed = (
        Run(name, options, packed=True, device="cuda", capturable=True) for _ in range(2)
    )
    for step in (1, 3):
        launched.step(step)
    replayed.load(launched.state())
    launched.step(5)  # so that nothing is compiled during the capture
    replayed.method.on_step_begin(5)
    replayed.gradients(5)
    before = [p.clone() for p in replayed.model.parameters()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed.method.on_gradients(5, replayed.optimizer)
        replayed.optimizer.step()
        replayed.method.on_step_end(5)
    assert all(torch.equal(*pair) for pair in zip(replayed.model.parameters(), before, strict=True))
    graph.replay()
    assert_equal(replayed, launched)
    graph.replay()
    launched.step(5)
    assert_equal(replayed, launched)
