"""Layers whose weights FSDP2 has sharded; the methods under it: tests/methods/test_sharding.py."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

import methods
from common_kernels import nm_mask
from methods.nn import sharding
from tests.methods.loop import training_step


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


def converted(name="sr_ste", mesh=None, **options):
    """Two linears and their method; sharded over the mesh, if one is given."""
    model = Blocks()
    if name == "fst":
        options = {"dense_fraction": 0.0, **options}
    method = methods.build(name, include=["first", "second"], **options)
    method.convert(model)
    if mesh is not None:
        fully_shard(model, mesh=mesh)
    return model, method


def one_step(model, method, step=0):
    """dX of the passes of a step that has not ended."""
    method.on_step_begin(step)
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step), requires_grad=True)
    method.loss(model, {"x": x}).backward()
    return x.grad


@pytest.mark.parametrize("name", ["bi_mask", "one_shot"])
def test_derived_operands_do_not_wait_for_the_backward_pass(name, mesh, monkeypatch):
    expected = one_step(*converted(name))
    model, method = converted(name, mesh)
    method.on_step_begin(0)
    made, derive = [], sharding.Shards.derive
    monkeypatch.setattr(
        sharding.Shards, "derive", lambda shards, *of: made.append(of[0]) or derive(shards, *of)
    )
    found = one_step(model, method)
    assert made == [model.first, model.second, model.second, model.first]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "options", "due"),
    [
        ("s_ste", {}, ()),
        ("fst", {"refresh_every": 3, "total_steps": 6, "dense_fraction": 0.167}, (2, 5)),
    ],
)
def test_a_fused_optimizer_updates_rows(name, options, due, mesh, monkeypatch):
    """To rounding as whole weights: where a mask is due, torch's kernel and the method do it. The
    CPU's kernels are those of tests/methods/test_sharding.py."""
    pytest.importorskip("triton", reason="no Triton for this platform")
    found, taken = [], []
    for over in (None, mesh):
        model, method = converted(name, over, **options)
        optimizer = methods.FusedAdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        for step in range(6):
            one_step(model, method, step)
            method.on_gradients(step, optimizer)
            taken.append(len(method._works))
            with monkeypatch.context() as patch:
                patch.setenv("SPARSE24_BACKEND", "triton" if over else "cpu")
                optimizer.step()
            optimizer.zero_grad()
            method.on_step_end(step)
        moments = optimizer.state[model.first.weight]["exp_avg"]
        assert isinstance(moments, DTensor) == (over is mesh)
        found.append({n: sharding.full(t) for n, t in model.state_dict().items()})
    assert taken == [2] * 6 + [0 if step in due else 2 for step in range(6)]
    torch.testing.assert_close(*found, rtol=0, atol=1e-6)


def test_mixed_precision_is_that_of_fsdp(mesh):
    """Weights are gathered in bf16; masters, gradients and masks stay what they are."""
    for name in {*methods.available()} - {"act24"}:  # which needs another activation
        losses = []
        for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)):
            options = {"total_steps": 4, "alpha": 1e-4} if name == "ast" else {"total_steps": 4}
            model, method = converted(name, **options)
            for each in (model, getattr(method, "teacher", None)):
                if each is not None:
                    fully_shard(each, mesh=mesh, mp_policy=policy)
            optimizer = method.optimizer(model.parameters(), lr=1e-3)
            with training_step(method, 0, optimizer):
                loss = method.loss(model, {"x": torch.ones(8, 16)})
                loss.backward()
                grads = [p.grad for p in model.parameters() if p.grad is not None]
                assert {grad.dtype for grad in grads} == {torch.float32}
            losses.append(loss.item())
        assert losses[1] == pytest.approx(losses[0], rel=2**-5) and losses[1] != losses[0]


@pytest.mark.parametrize("name", ["fst", "s_ste", "slope"])
def test_a_compiled_model_computes_the_same(name, mesh):
    """Compiled as one graph: its products prune what FSDP gathers, and nothing else is kept."""
    found = []
    for compiled in (False, True):
        torch._dynamo.reset()
        model, method = converted(name)
        if compiled:
            model.forward = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
        fully_shard(model, mesh=mesh)
        one_step(model, method)
        found.append([p.grad.full_tensor() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    torch._dynamo.reset()


def test_a_compiled_model_has_the_masks_of_weights_that_were_changed(mesh):
    torch._dynamo.reset()
    model, _ = converted("sr_ste", mesh)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.ones(2, 16, requires_grad=True)
    compiled(x)
    weights = {n: sharding.full(t).flip(-1) for n, t in model.state_dict().items()}
    for module in model.modules():
        module.reshard() if isinstance(module, FSDPModule) else None
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.to_local().copy_(weights[name])
    methods.refresh(model)
    weight, mask = model.first.weight.full_tensor(), model.first.mask.full_tensor()
    assert torch.equal(mask, nm_mask(weight))
    found = compiled(x)[0]
    torch.testing.assert_close(found, model(x)[0], rtol=0, atol=1e-6)
    torch._dynamo.reset()


def test_a_model_that_was_evaluated_before_a_step_is_noticed(mesh):
    """FSDP leaves the root's weights gathered after a forward pass without a backward pass."""
    model, method = converted(mesh=mesh)
    with torch.no_grad():
        model(torch.ones(2, 16))
    assert not isinstance(model.first.weight, DTensor)
    before, mask = method.metrics(), model.first.mask
    assert isinstance(mask, DTensor) and before["density"] == 0.5
    assert mask.placements == model.first.weight.placements and "method=sr_ste" in repr(model)
    one_step(model, method)
    method.on_gradients(0)
    method.on_step_end(0)
    method.finalize(model)
    assert type(model.second) is nn.Linear and isinstance(model.second.weight, DTensor)


def test_what_cannot_be_sharded_is_refused_in_a_line(mesh, hf_model):
    model = fully_shard(Blocks(), mesh=mesh)
    with pytest.raises(ValueError, match=r"first.weight is sharded already; call convert\(model\)"):
        methods.build("ste", include=["first"]).convert(model)

    model, method = converted()
    fully_shard(model, mesh=mesh, shard_placement_fn=lambda p: Shard(p.ndim - 1))
    with pytest.raises(ValueError, match="shard it along dim 0"):
        method.on_step_begin(0)

    model, method = hf_model("gpt2"), methods.build("ste", include=["*mlp.c_fc"])
    method.convert(model)
    fully_shard(model, mesh=mesh)
    with pytest.raises(ValueError, match="Conv1D of transformers cannot be sharded"):
        method.on_step_begin(0)


@pytest.mark.parametrize(("name", "chosen"), [("fst", 0), ("slope", 1)])
def test_masks_are_gathered_together_when_they_have_changed_and_not_in_a_pass(
    name, chosen, mesh, monkeypatch
):
    counted, gather = [], sharding.all_gather
    monkeypatch.setattr(sharding, "all_gather", lambda *of: counted.append(of) or gather(*of))
    model, method = converted(name, mesh)
    one_step(model, method)
    assert len(counted) == 1  # nobody had gathered them before the first pass
    method.on_gradients(0)
    method.on_step_end(0)
    assert len(counted) == 1 + chosen
    with torch.no_grad():
        for layer in (model.first, model.second):
            rows = next(layer.parameters()).to_local()  # not every torch can flip a DTensor
            rows.copy_(rows.flip(0, 1))
            layer.refresh_mask()
            layer.refresh()
    del counted[:]
    found = one_step(model, method, 1)
    assert not counted
    whole, other = converted(name)
    whole.load_state_dict({key: sharding.full(v) for key, v in model.state_dict().items()})
    torch.testing.assert_close(found, one_step(whole, other, 1), rtol=0, atol=1e-6)
