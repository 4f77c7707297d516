"""Linears that run packed: the same product from the crossover on, dense wherever that is not safe.

cuSPARSELt's products are emulated where there is no GPU."""

import copy
import itertools
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from common_kernels import matmul, nm_mask
from methods.nn import lowrank
from models import limits, packed
from models.packed import Limits
from models.quantized import quantize
from models.sparse import add_low_rank

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")


def pruned(*widths, dtype=torch.bfloat16, device=DEVICE):
    torch.manual_seed(0)
    layers = [nn.Linear(a, b, bias=a < b) for a, b in itertools.pairwise(widths)]
    with torch.no_grad():
        for layer in layers:
            layer.weight *= nm_mask(layer.weight)
    return nn.Sequential(*layers).to(device, dtype)


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gate_proj, self.up_proj = (nn.Linear(64, n, bias=False) for n in (128, 64))
        for layer in self.children():
            layer.weight.data *= nm_mask(layer.weight)
        self.to(DEVICE, torch.bfloat16)

    def forward(self, x):
        return torch.cat([self.gate_proj(x).sigmoid(), self.up_proj(x)], -1)


def spoil(layer):
    """The packed weights are worthless from here on, so that it shows which ones are used."""
    layer.packed.values.zero_()
    if layer.fragments is not None:
        layer.fragments.values.zero_()


@pytest.mark.parametrize("layout", ["cusparselt_sm90", *matmul.cuda.LAYOUTS])
@torch.no_grad()
def test_packed_products_are_those_of_the_dense_weights(layout, monkeypatch):
    """In the layout of cuSPARSELt's kernels, or of our own that was measured to be the fastest."""
    if CUDA and "cutlass" in layout and (why := matmul.unavailable("cuda", DEVICE, torch.bfloat16)):
        pytest.skip(why)
    monkeypatch.setattr(packed, "_layout_of", lambda *_, measures: layout)
    wide = 2 if layout == matmul.cuda.LAYOUTS[1] else 1
    shapes = ((1,), (5,), (64,), (65,), (2, 70), (3, 2, 16), (0,), (2, 0))
    for shape in shapes[:: 1 if layout == "cusparselt_sm90" else 3]:
        model = pruned(64 * wide, 128, 64)
        dense = copy.deepcopy(model)
        x = torch.randn(*shape, 64 * wide, device=DEVICE).bfloat16()
        want = dense(x)
        for own in (Limits(0, 0), Limits(5, 0), Limits(8, None)):
            assert packed.pack(model, own) == {"0": own, "1": own} == packed.limits_of(model)
            assert (model[0].fragments is not None) == (own.few > 0)
            found = model(x)
            # Both sum in fp32 and round to bf16 once for each layer.
            torch.testing.assert_close(found, want, rtol=2**-6, atol=2**-6)
            assert found.is_contiguous() and found.shape == want.shape


@torch.no_grad()
def test_the_dense_weight_is_used_between_the_limits():
    model = pruned(64, 128)
    dense = copy.deepcopy(model)
    packed.pack(model, Limits(1, 6))
    spoil(model[0])
    x = torch.randn(3, 2, 64, device=DEVICE).bfloat16()
    assert torch.equal(model(x[:, :1]), dense(x[:, :1])) and torch.equal(model(x[0]), dense(x[0]))
    for given in (x, x[:1, :1]):
        assert torch.equal(model(given), model[0].bias.expand(*given.shape[:2], -1))


def test_it_is_dense_where_the_packed_copy_would_be_wrong():
    for change in (
        lambda model, x: (model, x.requires_grad_()),
        lambda model, x: (model.requires_grad_(), x),
        lambda model, x: (model.float(), x.float()),
        lambda model, x: (model.load_state_dict(model.state_dict()) and model, x),
        lambda model, x: (model[0].weight.mul_(2) is None or model, x),
        # A new tensor has the version that the packed one had.
        lambda model, x: (model.load_state_dict(model.state_dict(), assign=True) and model, x),
        lambda model, x: (copy.deepcopy(model), x),
    ):
        model = pruned(64, 128).requires_grad_(False)
        model[0].weight = nn.Parameter(model[0].weight.clone(), requires_grad=False)
        assert not model[0].weight._version
        packed.pack(model, Limits(0, 0))
        spoil(model[0])
        model, x = change(model, torch.randn(8, 64, device=DEVICE).bfloat16())
        assert torch.equal(model(x), nn.functional.linear(x, model[0].weight, model[0].bias))


@torch.no_grad()
def test_parameters_stay_inference_mode_changes_nothing_and_a_model_is_packed_anew():
    model, x = pruned(64, 128), torch.randn(8, 64, device=DEVICE).bfloat16()
    with torch.inference_mode():
        packed.pack(model, Limits(0, 1))
        want = model(x)
    assert set(model.state_dict()) == {"0.weight", "0.bias"}
    assert torch.equal(model(x), want)
    model[0].weight.data.mul_(2)
    assert packed.pack(model, Limits(0, 3)) == {"0": (0, 3)} == packed.limits_of(model)
    want = nn.functional.linear(x, model[0].weight, model[0].bias)
    torch.testing.assert_close(model(x), want, rtol=2**-7, atol=2**-7)


@torch.no_grad()
def test_accelerate_s_hooks_call_the_packed_product_and_a_moved_layer_is_a_linear_again():
    """Loaded with `device_map`, each layer has a hook, which keeps the forward of its class."""
    hooks = pytest.importorskip("accelerate.hooks")
    model, x = pruned(64, 128), torch.randn(8, 64, device=DEVICE).bfloat16()
    hooks.add_hook_to_module(model[0], hooks.AlignDevicesHook(execution_device=DEVICE))
    want = model(x)
    packed.pack(model, Limits(0, 1))
    assert type(model.to(DEVICE)[0]) is not nn.Linear
    spoil(model[0])
    assert torch.equal(model(x), model[0].bias.expand(8, -1))
    assert type(model.half()[0]) is nn.Linear and not hasattr(model[0], "packed")
    torch.testing.assert_close(model(x.half()), want.half(), rtol=2**-7, atol=2**-7)


@torch.no_grad()
def test_packed_linears_are_compiled_into_one_graph():
    model, x = pruned(64, 128), torch.randn(8, 64, device=DEVICE).bfloat16()
    packed.pack(model, Limits(0, 4))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
    for rows in (x, x[:2]):
        assert torch.equal(compiled(rows), model(rows))
    spoil(model[0])
    assert torch.equal(compiled(x), model[0].bias.expand(8, -1))  # it was the packed product


@torch.no_grad()
def test_a_model_of_transformers_is_packed_and_saved_as_before(hf_model, tmp_path):
    for model, dim, count in (
        (hf_model("gpt2", hidden_size=64), 0, 4),
        (hf_model("llama", hidden_size=64, intermediate_size=128), 1, 6),
    ):
        model.to(DEVICE, torch.bfloat16)
        for name, parameter in model.named_parameters():
            if "mlp" in name and parameter.ndim == 2:
                parameter *= nm_mask(parameter, dim=dim)
        ids = torch.randint(0, 320, (2, 12), device=DEVICE)
        want = model(input_ids=ids).logits
        model.save_pretrained(tmp_path)
        before = (tmp_path / "model.safetensors").read_bytes()
        found = packed.pack(model, Limits(0, 1))
        assert len(found) == count and all(".mlp." in n for n in found)
        logits = model(input_ids=ids).logits
        torch.testing.assert_close(logits.float(), want.float(), rtol=2**-5, atol=2**-5)
        model.save_pretrained(tmp_path)
        assert (tmp_path / "model.safetensors").read_bytes() == before


@torch.no_grad()
def test_each_shape_has_its_own_and_dense_ones_stay_linears(monkeypatch):
    model = pruned(64, 128, 64, 128)
    asked = []

    def measured(layers, graphs):
        asked.append([layer.packed.shape for layer in layers])
        return {128: Limits(0, 256), 64: Limits(0, None)}[layers[0].packed.shape[0]]

    monkeypatch.setattr(packed, "measured", measured)
    monkeypatch.setattr(packed, "_layout_of", lambda *_, measures: "cusparselt_sm90")
    assert packed.pack(model) == {"0": (0, 256), "1": None, "2": (0, 256)}
    assert asked == [[(128, 64), (128, 64)], [(64, 128)]]
    assert [type(m).__name__ for m in model] == ["PackedLinear", "Linear", "PackedLinear"]
    assert type(model[1]) is nn.Linear and not hasattr(model[1], "packed")


@pytest.mark.skipif(CUDA, reason="is about machines without a GPU")
def test_what_cannot_be_packed_is_one_line():
    dense, single = nn.Linear(64, 64, dtype=torch.bfloat16), pruned(64, 64, dtype=torch.float32)
    for refuse, said in (
        (lambda: packed.pack(dense, Limits(0, 0)), r"2:4 \(.* method\.finalize\(model\) first"),
        (lambda: quantize(dense, 4), r"2:4 \(.* method\.finalize\(model\) first"),
        (lambda: packed.pack(pruned(64, 64)), "cannot be measured on a cpu; pass them as limits"),
        (lambda: packed.pack(single, Limits(0, 0)), r"takes bf16, .* here, not torch\.float32"),
        (
            lambda: packed.pack(pruned(64, 32), Limits(0, 0)),
            r"^0 cannot be packed: shape \(32, 64\)",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            refuse()
    assert packed.pack(pruned(64, 32, 64), Limits(0, 0)) == {"0": None, "1": (0, 0)}
    model = pruned(64, 64, 64)
    model[0].to("meta")  # as accelerate leaves what does not fit
    assert packed.pack(model, Limits(0, 0)) == {"1": (0, 0)}


@torch.no_grad()
def test_few_tokens_are_multiplied_with_the_integers_of_quantised_weights():
    for bits, rtol in ((8, 2**-7), (4, 0.2)):
        model = Gated()
        before, x = copy.deepcopy(model), torch.randn(4, 64, device=DEVICE).bfloat16()
        assert quantize(model, bits) == ["gate_proj", "up_proj"]
        for layer, own in zip(model.children(), before.children(), strict=True):
            difference = (layer.weight - own.weight).float()
            assert 0 < difference.norm() <= rtol * own.weight.float().norm()
        dense = copy.deepcopy(model)
        packed.pack(model, Limits(4, None))
        assert model.gate_proj.joined[0].fragments.bits == model.up_proj.fragments.bits == bits
        # The dense weights were rounded to bf16 once more.
        torch.testing.assert_close(model(x), dense(x), rtol=2**-6, atol=2**-6)
        assert not torch.equal(model(x), before(x))
        model.up_proj.weight[40, :4] *= 0.7  # it is not made of integers any more
        packed.pack(model, Limits(4, None))
        assert (model.gate_proj.fragments.bits, model.up_proj.fragments.bits) == (bits, 16)
        dense.up_proj.weight[40, :4] *= 0.7
        torch.testing.assert_close(model(x), dense(x), rtol=2**-6, atol=2**-6)
        packed.pack(model.half(), Limits(4, None))
        assert (model.gate_proj.fragments.bits, model.up_proj.fragments.bits) == (bits, 16)
        torch.testing.assert_close(model(x.half()), dense(x).half(), rtol=2**-6, atol=2**-6)


@torch.no_grad()
def test_a_product_in_the_middle_is_taken_once():
    """The input is overwritten before the last of the linears has run."""
    model = nn.ModuleDict({n: pruned(64, 64)[0] for n in ("q_proj", "k_proj", "v_proj")})
    for layer in model.values():
        layer.bias = None
    dense = copy.deepcopy(model)
    packed.pack(model, Limits(4, None))
    x = torch.randn(2, 64, device=DEVICE).bfloat16()
    for name in ("k_proj", "k_proj", *model):
        torch.testing.assert_close(model[name](x), dense[name](x), rtol=2**-6, atol=2**-6)
        x.mul_(-2)


@torch.no_grad()
def test_linears_with_one_input_run_as_one_product(monkeypatch):
    model = Gated()
    dense, calls, few = copy.deepcopy(model), [], packed.few_tokens24
    monkeypatch.setattr(packed, "few_tokens24", lambda w, *o: calls.append(w.shape) or few(w, *o))
    packed.pack(model, Limits(4, None))
    x, other = torch.randn(2, 2, 2, 64, device=DEVICE).bfloat16()
    for given in (x, other, x, other.clone()):
        torch.testing.assert_close(model(given), dense(given), rtol=2**-6, atol=2**-6)
    assert calls == [(192, 64)] * 4
    both, _ = model.gate_proj.joined
    assert both.made is None and model.up_proj.joined == (both, 1)
    own, whole = model.up_proj.fragments.values, both.fragments.values
    assert own.data_ptr() == whole[-len(own) :].data_ptr()
    # In any order, of an input that is overwritten as a graph's is, after a weight has changed.
    static = x.clone()
    for name, given in (("up_proj", other), ("gate_proj", x), ("gate_proj", other)):
        static.copy_(given)
        found, want = (getattr(m, name)(static) for m in (model, dense))
        torch.testing.assert_close(found, want, rtol=2**-6, atol=2**-6)
    for changed in (model, dense):
        changed.gate_proj.weight.mul_(2)
    torch.testing.assert_close(model(x), dense(x), rtol=2**-6, atol=2**-6)


def with_low_rank(kind):
    """Two 2:4 linears whose low-rank terms have the form of `kind`."""
    model = pruned(64, 128, 64).requires_grad_(False)
    for n, layer in enumerate(model):
        left, right = torch.randn(4, layer.in_features), torch.randn(4, layer.out_features)
        if kind == "slope":
            lowrank.attach(model, {f"{n}.left": left, f"{n}.right": right})
            layer.left.data.copy_(left), layer.right.data.copy_(right)
        elif kind == "export":
            add_low_rank(layer, left, right)
        else:
            state = {f"{n}.slorb_s": right.t()} | ({f"{n}.slorb_x": left} if n else {})
            lowrank.attach(model, state)
            layer.load_state_dict({k.removeprefix(f"{n}."): v for k, v in state.items()}, False)
    return model.to(DEVICE, torch.bfloat16)


@pytest.mark.parametrize("kind", ["slope", "slorb", "export"])
@torch.no_grad()
def test_low_rank_terms_follow_the_packed_product(kind):
    model = with_low_rank(kind)
    dense = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert packed.pack(model, Limits(4, 8)) == {"0": (4, 8), "1": (4, 8)}
    for tokens in (1, 4, 6, 8, 70):
        x = torch.randn(tokens, 64, device=DEVICE).bfloat16()
        for layer, own in zip(model, dense, strict=True):
            y = own(x).float()
            # Y1, both parts of Y2, their sum and Y are rounded to bf16, each by up to 2^-9.
            left, right, scale = own.low_rank()
            left = None if left is None else left.abs()
            terms = scale * packed.reduced(x.abs(), left, len(right)).float() @ right.float().abs()
            assert ((layer(x).float() - y).abs() <= 5 * 2**-9 * (y.abs() + terms)).all()
            x = own(x)
    x = torch.randn(4, 128, device=DEVICE).bfloat16()
    assert model[1].below == 32
    for own in (model, dense):
        own[1].low_rank()[0].mul_(2)  # the packed factor is that of before
    assert torch.equal(model[1](x), dense[1](x))
    packed.pack(model, Limits(4, 8))
    with torch.enable_grad():  # which the packed product does not give
        model[1].low_rank()[0].requires_grad_()
        model[1](x).sum().backward()
        assert model[1].low_rank()[0].grad is not None
    quantize(model, 8)
    packed.pack(model, Limits(4, 8))
    assert [(layer.below, layer.fragments.bits) for layer in model] == [(0, 8)] * 2


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
@pytest.mark.parametrize("graphs", [False, True])
@torch.no_grad()
def test_limits_are_measured_and_packed_ones_agree(graphs):
    model = pruned(2048, 5632, 2048)
    dense = copy.deepcopy(model)
    found = packed.pack(model, graphs=graphs)
    assert found.keys() == {"0", "1"} and all(n is None or any(n) for n in found.values())
    for tokens in (1, 7, 64, 100, 1000, 4096):
        x = torch.randn(tokens, 2048, device=DEVICE).bfloat16()
        want = dense(x).float()
        assert (model(x).float() - want).norm() <= 2**-6 * want.norm()


def test_few_tokens_have_their_form_where_it_is_faster_than_that_of_many(monkeypatch):
    layer = SimpleNamespace(fragments=object())

    def ms(form, tokens):
        if form == limits.MANY:
            return 7 if tokens >= first else 11
        return 10 if form is None else 6 + tokens / 4

    def faster(layers, graphs, tokens, form=limits.MANY, other=None):
        return ms(form, tokens) < ms(other, tokens)

    monkeypatch.setattr(limits, "_faster", faster)
    for first, expected in ((8, (4, 8)), (256, (8, 256)), (10**9, (8, None))):  # noqa: B007 - `ms` reads it
        assert limits.measured([layer], False) == expected


@torch.no_grad()
def test_both_times_are_of_the_same_layers_and_inputs(monkeypatch):
    """A shape is faster where the table says so and the layers, launched one by one, agree."""
    layers = [pruned(64, 128)[0] for _ in range(2)]
    packed.pack(nn.Sequential(*layers), Limits(0, 1))
    seen = []
    monkeypatch.setattr(limits, "is_faster", lambda problem, device: problem.tokens >= 64)

    def timed(variants, products, graphs):
        assert [run.args[1:] for run in variants] == [(layers, None), (layers, (0, 0))]
        for run in variants:
            run()
        x = variants[0].args[0]
        a, b = layers[0].dense(x), layers[0](x)
        torch.testing.assert_close(a, b, rtol=2**-7, atol=2**-7)
        seen.append(len(a))
        return [1.0, 0.5 if len(a) >= 128 else 2.0]

    monkeypatch.setattr(limits, "times_ms", timed)
    found = [limits._faster(layers, False, n) for n in (8, 56, 64, 127, 128)]
    assert found == [False] * 4 + [True] and seen == [64, 127, 128]
    # In a graph the table's verdict does not count.
    assert [limits._faster(layers, True, n) for n in (8, 128)] == [False, True]
    assert seen[3:] == [8, 128]
