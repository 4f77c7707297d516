"""Layers whose weights FSDP2 has sharded; the methods under it: tests/methods/test_sharding.py."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

import methods
from common_kernels import nm_mask
from methods.nn import sharding
from methods.nn.gemms import Products


@pytest.fixture
def mesh(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


class Blocks(nn.Module):
    """Two linears; `forward` returns (outputs, loss) as the models of the project do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x):
        y = self.second(torch.relu(self.first(x)))
        return y, y.square().mean()


def converted(name="sr_ste", **options):
    model = Blocks()
    method = methods.build(name, include=["first", "second"], **options)
    method.convert(model)
    return model, method


def one_step(model, method):
    method.on_step_begin(0)
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0), requires_grad=True)
    method.loss(model, {"x": x}).backward()
    return x.grad


def test_masks_are_placed_as_their_weights_and_no_operand_is_kept(mesh):
    model, method = converted()
    fully_shard(model, mesh=mesh)
    one_step(model, method)
    layer = model.first
    assert isinstance(layer.mask, DTensor) and layer.mask.placements == layer.weight.placements
    assert layer.operand is None
    assert f"{type(layer).__name__}" == "ShardedMaskedLinear" and "method=sr_ste" in repr(layer)


@pytest.mark.parametrize("name", ["fst", "bi_mask", "one_shot", "slope"])
def test_derived_operands_do_not_wait_for_the_backward_pass(name, mesh):
    options = {"dense_fraction": 0.0} if name == "fst" else {}
    model, method = converted(name, **options)
    expected = one_step(model, method)
    model, method = converted(name, **options)
    fully_shard(model, mesh=mesh)
    method.on_step_begin(0)
    made, derived = [], type(model.first)._derived
    for layer in (model.first, model.second):
        layer._derived = lambda *like, layer=layer: made.append(layer) or derived(layer, *like)
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0), requires_grad=True)
    loss = method.loss(model, {"x": x})
    assert made == [model.first, model.second]
    loss.backward()
    assert made == [model.first, model.second, model.second, model.first]
    torch.testing.assert_close(x.grad, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "options"),
    [("sr_ste", {}), ("s_ste", {}), ("fst", {"refresh_every": 3, "total_steps": 6})],
)
@pytest.mark.parametrize("backend", ["cpu", "triton"])
def test_a_fused_optimizer_updates_rows(name, options, backend, mesh, monkeypatch):
    """To rounding as whole weights: where a mask is due, torch's kernel and the method do it."""
    if backend == "triton":
        pytest.importorskip("triton", reason="no Triton for this platform")
    found, taken = [], []
    for sharded in (False, True):
        model, method = converted(name, **options)
        if sharded:
            fully_shard(model, mesh=mesh)
        optimizer = methods.FusedAdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        for step in range(6):
            method.on_step_begin(step)
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
            method.loss(model, {"x": x}).backward()
            method.on_gradients(step, optimizer)
            taken.append(len(method._works))
            with monkeypatch.context() as patch:
                patch.setenv("SPARSE24_BACKEND", backend if sharded else "cpu")
                optimizer.step()
            optimizer.zero_grad()
            method.on_step_end(step)
        assert isinstance(optimizer.state[model.first.weight]["exp_avg"], DTensor) == sharded
        state = model.state_dict()
        found.append({n: sharding.full(t) for n, t in state.items()})
    assert taken[:6] == [2] * 6
    due = {"sr_ste": range(6), "s_ste": (), "fst": (2, 5)}[name]
    assert taken[6:] == [0 if step in due else 2 for step in range(6)]
    for name, tensor in found[0].items():
        torch.testing.assert_close(found[1][name], tensor, rtol=0, atol=1e-6, msg=name)


def test_mixed_precision_is_that_of_fsdp(mesh):
    """Weights are gathered in bf16; masters, gradients and masks stay what they are."""
    for name in methods.available():
        losses = []
        for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)):
            options = {"total_steps": 4, "alpha": 1e-4} if name == "ast" else {"total_steps": 4}
            model, method = converted(name, **options)
            for each in (model, getattr(method, "teacher", None)):
                if each is not None:
                    fully_shard(each, mesh=mesh, mp_policy=policy)
            optimizer = method.optimizer(model.parameters(), lr=1e-3)
            method.on_step_begin(0)
            loss = method.loss(model, {"x": torch.ones(8, 16)})
            loss.backward()
            assert all(
                p.grad.dtype == torch.float32 for p in model.parameters() if p.grad is not None
            )
            method.on_gradients(0, optimizer)
            optimizer.step()
            method.on_step_end(0)
            losses.append(loss.item())
        assert losses[1] == pytest.approx(losses[0], rel=2**-5) and losses[1] != losses[0]


def test_weights_that_were_changed_by_hand_are_followed(mesh):
    model, _ = converted()
    fully_shard(model, mesh=mesh)
    with torch.no_grad():
        model.first.weight.copy_(model.first.weight.flip(1))
    methods.refresh(model)
    weight, mask = model.first.weight.full_tensor(), model.first.mask.full_tensor()
    assert torch.equal(mask, nm_mask(weight))


def test_a_compiled_model_computes_the_same(mesh):
    found = []
    for compiled in (False, True):
        torch._dynamo.reset()
        model, method = converted("fst", dense_fraction=0.0)
        if compiled:
            model.compile(backend="aot_eager")
        fully_shard(model, mesh=mesh)
        one_step(model, method)
        found.append([p.grad.full_tensor() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    torch._dynamo.reset()


def test_a_model_that_was_evaluated_before_a_step_is_noticed(mesh):
    """FSDP leaves the root's weights gathered after a forward pass without a backward pass."""
    model, method = converted()
    fully_shard(model, mesh=mesh)
    with torch.no_grad():
        model(torch.ones(2, 16))
    assert not isinstance(model.first.weight, DTensor)
    before = method.metrics()
    assert isinstance(model.first.mask, DTensor) and before["density"] == 0.5
    one_step(model, method)
    method.on_gradients(0)
    method.on_step_end(0)
    method.finalize(model)
    assert type(model.second) is nn.Linear and isinstance(model.second.weight, DTensor)


def test_what_cannot_be_sharded_is_refused_in_a_line(mesh, monkeypatch):
    model = fully_shard(Blocks(), mesh=mesh)
    with pytest.raises(ValueError, match=r"first.weight is sharded already; call convert\(model\)"):
        methods.build("ste", include=["first"]).convert(model)
    with pytest.raises(ValueError, match="sharded already"):
        methods.build("ast", include=["first"], total_steps=3).convert(model)

    model, method = converted()
    fully_shard(model, mesh=mesh, shard_placement_fn=lambda p: Shard(p.ndim - 1))
    with pytest.raises(ValueError, match="shard it along dim 0"):
        method.on_step_begin(0)

    model, method = converted()
    model.first.accelerated = Products(fp8=True)
    fully_shard(model, mesh=mesh)
    with pytest.raises(ValueError, match="FP8 units need whole weights"):
        method.on_step_begin(0)

    model, method = converted()
    fully_shard(model, mesh=mesh)
    method.on_step_begin(0)
    with pytest.raises(ValueError, match="FP8 units need whole weights"):
        model.first.accelerate(Products(fp8=True))
    with pytest.raises(ValueError, match="no operand of sharded weights is held"):
        model.first.accelerate(Products(dgrad=True, repack=True))


def test_a_conv1d_is_refused(mesh, hf_model):
    model = hf_model("gpt2")
    method = methods.build("ste", include=["*mlp.c_fc"])
    method.convert(model)
    fully_shard(model, mesh=mesh)
    with pytest.raises(ValueError, match="Conv1D of transformers cannot be sharded"):
        method.on_step_begin(0)


def test_codes_and_their_scales_are_those_of_a_whole_layer(mesh):
    """Simulated FP8, after a dense phase where there is one; scales stay in fp32."""
    for autocast in (False, True):
        for name in ("ste", "fst", "s_ste"):
            options = {"dense_fraction": 0.5, "total_steps": 2, "dense_phase": "start"}
            found = []
            for sharded in (False, True):
                model, method = converted(name, fp8="paper", **(options if name == "fst" else {}))
                if sharded:
                    fully_shard(model, mesh=mesh)
                for step in (0, 1):
                    method.on_step_begin(step)
                    x = torch.randn(
                        8, 16, generator=torch.Generator().manual_seed(0), requires_grad=True
                    )
                    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                        method.loss(model, {"x": x}).backward()
                    method.on_gradients(step)
                    method.on_step_end(step)
                found.append(x.grad)
            assert torch.equal(*found)


@pytest.mark.parametrize(("name", "masks", "chosen"), [("fst", 1, 0), ("slope", 2, 1)])
def test_masks_are_gathered_when_they_have_changed_and_not_in_a_pass(
    name, masks, chosen, mesh, counted
):
    model, method = converted(name, **{"dense_fraction": 0.0} if name == "fst" else {})
    fully_shard(model, mesh=mesh)
    one_step(model, method)
    assert len(counted) == 2 * masks  # nobody had gathered them before the first pass
    method.on_gradients(0)
    method.on_step_end(0)
    assert len(counted) == 2 * (masks + chosen)
    with torch.no_grad():
        for layer in (model.first, model.second):
            rows = next(layer.parameters()).to_local()  # not every torch can flip a DTensor
            rows.copy_(rows.flip(0, 1))
            layer.refresh_mask()
            layer.refresh()
    del counted[:]
    found = one_step(model, method)
    assert not counted
    whole, other = converted(name, **{"dense_fraction": 0.0} if name == "fst" else {})
    whole.load_state_dict(
        {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in model.state_dict().items()}
    )
    torch.testing.assert_close(found, one_step(whole, other), rtol=0, atol=1e-6)


def test_masks_that_were_loaded_are_those_of_the_next_pass(mesh):
    """Into a model that has gathered its own ones before."""
    for name in ("fst", "slope"):
        options = {"dense_fraction": 0.0} if name == "fst" else {}
        (sharded, method), (whole, other) = (converted(name, **options) for _ in range(2))
        with torch.no_grad():
            for parameter in whole.parameters():
                parameter.copy_(parameter.flip(0))
            methods.refresh(whole)
        fully_shard(sharded, mesh=mesh)
        one_step(sharded, method)
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(sharded, whole.state_dict(), options=options)
        found = one_step(sharded, method)
        torch.testing.assert_close(found, one_step(whole, other), rtol=0, atol=1e-6)


@pytest.fixture
def counted(monkeypatch):
    """The layers' own gathers."""
    calls, gather = [], sharding.gathered
    monkeypatch.setattr(sharding, "gathered", lambda *of: calls.append(of) or gather(*of))
    return calls
