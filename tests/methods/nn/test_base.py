"""Bookkeeping that all methods share: flips, random keys, the order of a loop's calls."""

import copy
import itertools
import operator
import warnings
from dataclasses import replace

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import methods
from methods import s_ste, ste
from tests.methods.loop import convert, linear_of, training_step


def mlp():
    torch.manual_seed(0)
    return nn.ModuleDict(
        {
            "mlp": nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)),
            "head": nn.Linear(8, 4),
        }
    )


def converted(name, **options):
    return convert(name, mlp(), **{"include": "ffn", **options})


def test_what_is_no_method_option_or_model_of_it_is_refused():
    for name, options, told in (
        ("s-ste", {}, r"no method 's-ste'; did you mean s_ste\? choose one of act24, "),
        ("fst", {"alfa": 1.0}, r"no option alfa; did you mean alpha\? it takes inc"),
        ("ste", {"include": "mlp"}, "list of globs"),
        ("ste", {"seed": 1.0}, r"^seed=1\.0; it must be a whole number$"),
    ):
        with pytest.raises(ValueError, match=told):
            methods.build(name, **options)
    with pytest.raises(TypeError, match=r"takes a methods\.ste\.Config, not a "):
        ste.Method(s_ste.Config())
    model, method = converted("ste")
    for again in (method, methods.build("ast", total_steps=4)):
        with pytest.raises(ValueError, match="converted already"):
            again.convert(model)
    with pytest.raises(ValueError, match="ste does not distil"):
        method.set_teacher(mlp())
    method.finalize(model)
    with pytest.raises(ValueError, match=r"call metrics\(\) after convert.* before finalize"):
        method.metrics()


def test_conversion_keeps_identity_hooks_flags_and_the_generator():
    model = mlp().eval()
    layer, weight = model["mlp"][0], model["mlp"][0].weight
    calls = []
    layer.register_forward_hook(lambda *_: calls.append(1))
    state = torch.get_rng_state()
    methods.build("s_ste").convert(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert model["mlp"][0] is layer and layer.weight is weight and not layer.training
    layer(torch.randn(2, 8))
    assert calls == [1]


def one_group(values, name="ste", period=1, **options):
    """A layer of four rows, each of one group with these values, and its method."""
    layer = linear_of(values)
    method = methods.build(name, include=["*"], **options)
    choose_every(method, period)
    method.convert(layer)
    return layer, method


def choose_every(method, period):
    """Let `method` choose its masks once in `period` steps."""
    kind = type(method)

    class Slow(kind):
        @property
        def capabilities(self):
            return replace(super().capabilities, mask_period=period)

    method.__class__ = Slow


def step_to(method, layer, values, step):
    method.on_step_begin(step)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(values).expand(4, 4))
    method.on_step_end(step)
    return method.metrics()


def test_flip_rate_by_hand():
    for name in ("dense", "ste"):
        layer, method = one_group([4.0, 3.0, 2.0, 1.0], name, measure_every=1)
        assert method.metrics()["flip_rate"] == 0.0  # the first masks changed nothing
        assert step_to(method, layer, [4.0, 3.0, 2.5, 1.0], 0)["flip_rate"] == 0.0
        # {0, 1} -> {0, 2}: two of four bits in every row.
        assert step_to(method, layer, [4.0, 3.0, 3.5, 1.0], 1)["flip_rate"] == 0.5
        assert step_to(method, layer, [1.0, 5.0, 1.5, 6.0], 2)["flip_rate"] == 1.0
    with torch.no_grad():  # of weights that changed outside
        layer.weight.copy_(layer.weight.flip(1))
    methods.refresh(nn.Sequential(layer))
    assert layer.mask[0].tolist() == [True, False, True, False]


def test_flip_rate_per_step_and_per_refresh_differ_when_masks_are_kept():
    layer, method = one_group([4.0, 3.0, 2.0, 1.0], period=2)
    found = [step_to(method, layer, [1.0, 2.0, 3.0, 4.0], step) for step in range(3)]
    # No choice is due after step 0; that of step 1 stands for two steps and until the next one.
    rates = [(each["flip_rate"], each["flip_rate_refresh"]) for each in found]
    assert rates == [(0.0, 0.0), (0.5, 1.0), (0.5, 1.0)]


def test_flip_rates_of_the_layers_average_to_the_whole():
    _, method = converted("ste", include=["*"], measure_every=1, flips_by_layer=True)
    before = {name: layer.mask.clone() for name, layer in method.layers.items()}
    method.on_step_begin(0)
    with torch.no_grad():
        for layer in method.layers.values():
            layer.weight.copy_(torch.randn_like(layer.weight))
    method.on_step_end(0)
    found, whole = method.metrics(), 0
    for name, mask in before.items():
        changed = mask != method.layers[name].mask
        assert found[f"flip_rate.{name}"] == float(changed.float().mean()) > 0
        whole += int(changed.sum())
    total = sum(mask.numel() for mask in before.values())
    assert found["flip_rate"] == pytest.approx(whole / total, rel=1e-6)


def test_nothing_is_measured_with_zero(monkeypatch):
    """Copies of the masks and a comparison that waits for the GPU would be in every timing."""
    layer, method = one_group([4.0, 3.0, 2.0, 1.0], measure_every=0)
    monkeypatch.setattr(type(layer), "current_mask", lambda self: pytest.fail("measured"))
    assert step_to(method, layer, [1.0, 2.0, 3.0, 4.0], 0)["flip_rate"] == 0.0
    assert layer.mask[0].tolist() == [False, False, True, True]  # and chosen all the same


def test_the_first_choice_at_or_after_a_multiple_is_measured():
    for period, every, measured in (
        (1, 3, {0, 3, 6, 9}),
        (4, 1, {3, 7, 11}),
        (2, 5, {1, 5, 11}),
        (4, 9, {3, 11}),
    ):
        method = ste.Method(ste.Config(measure_every=every))
        choose_every(method, period)
        assert {step for step in range(12) if method._measures(step)} == measured


def test_keys_differ_by_layer_step_seed_and_micro_batch():
    keys = []
    for seed, step, micro in (*itertools.product((0, 1), repeat=3), (1, 1, 1)):
        _, method = converted("s_ste", seed=seed)
        method.on_step_begin(step)
        for _ in range(micro + 1):
            method.open_micro_batch()
        keys += [tuple(layer.key.tolist()) for layer in method.sparse_layers.values()]
    assert len({*keys}) == 16 and keys[-2:] == keys[-4:-2]


def test_torchs_encoder_computes_with_the_masks_in_evaluation_too():
    """Its fast path gives the weights to one kernel and never calls the linears; it is switched off
    for layers with a converted linear, and no others."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.ModuleList([nn.TransformerEncoder(layer, 2), copy.deepcopy(layer)]).eval()
    flags = ["layers.0.activation_relu_or_gelu", "layers.1.activation_relu_or_gelu"]
    flags.append("use_nested_tensor")
    of = operator.attrgetter(*flags)
    before, enabled = of(model[0]), torch.backends.mha.get_fastpath_enabled()
    x, padding = torch.randn(2, 5, 16), torch.arange(5) >= torch.tensor([[5], [3]])
    for include in ("ffn", ["0.layers.0.linear1"]):
        method = ste.Method(ste.Config(include=include, exclude=["1.*"]))
        method.convert(model)
        assert of(model[0]) == (False, include[0] == "0.layers.0.linear1" and 1, False)
        assert model[1].activation_relu_or_gelu == 1
        assert torch.backends.mha.get_fastpath_enabled() == enabled
        with torch.no_grad():
            shown = [model[0](x), model[0](x, src_key_padding_mask=padding)[~padding]]
            method.finalize(model)
            assert of(model[0]) == before
            plain = [model[0](x), model[0](x, src_key_padding_mask=padding)[~padding]]
        torch.testing.assert_close(shown, plain)


LOOPS = [
    ("s_ste", {}),
    ("slope", {}),
    ("fst", {"dense_fraction": 0.0}),
    ("gmp", {"begin_fraction": 0.0, "prune_every": 1}),
    ("dense", {}),
]


class Loop:
    """A training loop, of which a test leaves out what it wants."""

    def __init__(self, name, options=None):
        options = {"include": "ffn", "total_steps": 9, **(options or {})}
        self.model, self.method = converted(name, **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def forward(self):
        self.method.open_micro_batch()
        return self.model["mlp"](torch.ones(4, 8)).square().mean()


def test_a_loop_without_its_hooks_is_told_as_soon_as_it_is_certain():
    for name, options in LOOPS[:2]:
        for hook, told in (
            ("on_step_begin", r"step 0 and on_step_end\(0\) was not called"),
            ("on_step_end", "^no step has begun, "),
            ("", r"^no step has begun, .*call on_step_begin\(step\)"),
        ):
            loop, step = Loop(name, options), 0
            with pytest.raises(RuntimeError, match=told):
                for step in range(2):
                    if hook == "on_step_begin":
                        loop.method.on_step_begin(step)
                    loop.forward().backward()
                    loop.method.on_gradients(step, loop.optimizer)
                    loop.optimizer.step()
                    loop.optimizer.zero_grad()
                    if hook == "on_step_end":
                        loop.method.on_step_end(step)
            assert step == (hook == "on_step_begin")


@pytest.mark.parametrize(
    ("name", "options", "compiled"),
    [*((*loop, False) for loop in LOOPS[:-1]), (*LOOPS[0], True)],  # all but dense
)
def test_an_own_loss_without_any_hook_is_told(name, options, compiled):
    """Masks of a changed weight are stale, in training, in evaluation and at the end. A compiled
    pass is not checked. Torch's fused optimizer does not count what it writes; SLoPe, which
    computes with the values themselves, cannot tell then."""
    for fused in (False, True)[: 1 if name == "slope" else 2]:
        loop = Loop(name, options)
        mlp, ones = loop.model["mlp"], torch.ones(4, 8)
        optimizer = torch.optim.AdamW(loop.model.parameters(), lr=1e-2, fused=fused)
        run = torch.compile(mlp, backend="eager") if compiled else mlp
        with torch.no_grad():
            for parameter in loop.model.parameters() if name != "slope" else ():
                parameter.mul_(1)  # as DDP does once; a layer without an operand cannot tell
            mlp(ones)
        run(ones).square().mean().backward()
        optimizer.step()
        for call, argument in ((mlp, ones), (loop.method.finalize, loop.model)):
            with pytest.raises(RuntimeError, match="did not follow: call on_step_begin"):
                call(argument)
        methods.refresh(loop.model)
        run(ones)
        loop.method.finalize(loop.model)


SEVERAL = [
    ("sr_ste", {"alpha": 0.1, "decay_on": "weights"}),
    ("step", {"min_fraction": 0.1, "max_fraction": 0.1}),
    ("ast", {"alpha": 0.1, "ramp_steps": 0}),
]


def test_two_optimizers_are_given_as_a_list():
    """They then train as one does."""
    for name, options in SEVERAL:
        losses = []
        for several in (False, True):
            loop = Loop(name, options)
            parts = [[*loop.model.parameters()]]
            if several:
                parts = [[p for p in parts[0] if (p.ndim > 1) == flag] for flag in (True, False)]
            optimizers = [loop.method.optimizer(part, lr=1e-2) for part in parts]
            for step in range(4):
                loop.method.on_step_begin(step)
                losses.append(loop.forward())
                losses[-1].backward()
                loop.method.on_gradients(step, optimizers if several else optimizers[0])
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                loop.method.on_step_end(step)
        assert losses[:4] == losses[4:]


def test_a_loss_or_a_step_that_lacks_its_part_is_told():
    loop = Loop("s_ste")
    loop.method.on_step_begin(0)
    loop.model["mlp"](torch.ones(4, 8)).square().mean().backward()
    with pytest.raises(RuntimeError, match=r"step 0, .* call open_micro_batch\(\) before each"):
        loop.method.on_gradients(0, loop.optimizer)
    for name, options in (
        *((name, {}) for name in ("sr_ste", "step", "ast")),
        ("slope", {"adapter_rank": 2}),
    ):  # would train by another method
        loop = Loop(name, options)
        loop.method.on_step_begin(0)
        loop.forward().backward()
        loop.optimizer.step()
        with pytest.raises(RuntimeError, match=r"on_gradients\(0, optimizer\) was not called"):
            loop.method.on_step_end(0)
    loop = Loop("ste")
    loop.model.forward = lambda x: (x, x)
    for batch, told in (({"x": torch.ones(8)}, "scalar loss"), ([], "a batch is a dict .*, not a")):
        with pytest.raises(TypeError, match=rf"{told}.*open_micro_batch"):
            loop.method.loss(loop.model, batch)
    with pytest.raises(RuntimeError, match=r"no model: call convert\(model\) before the first"):
        methods.build("ste").on_step_begin(0)


def resumed(name, options=None, state=None):
    """A loop whose model has loaded a checkpoint, and its method the state, if one is given."""
    loop = Loop(name, options)
    loop.model.load_state_dict(loop.model.state_dict())
    if state is not None:
        loop.method.load_state_dict(state)
    return loop


def test_a_training_that_goes_on_without_the_state_it_needs_is_told():
    """STEP would be dense again; the teacher in this process is right if the model was the same
    before `convert`."""
    told = r"on_step_begin\(5\) after .*load_state_dict was not called: .*phase 2"
    with pytest.raises(RuntimeError, match=told):
        resumed("step").method.on_step_begin(5)
    with pytest.warns(UserWarning, match=r"was not called: the teacher is a copy .*saved with the"):
        resumed("ast", {"decay_route": "gradient"}).method.on_step_begin(5)


@pytest.mark.filterwarnings("error")
def test_a_training_that_goes_on_with_its_state_or_needs_none_is_told_nothing():
    for name, options in (*LOOPS, ("step", {}), ("ast", {})):
        state = Loop(name, options).method.state_dict()
        resumed(name, options, state).method.on_step_begin(5)
        # A loop that counts from 1, one converted in the middle.
        resumed(name, options).method.on_step_begin(1)
        Loop(name, options).method.on_step_begin(5)
    distils = resumed("ast")
    distils.method.set_teacher(mlp())
    distils.method.on_step_begin(5)


def test_steps_that_are_counted_anew_in_each_epoch_or_beyond_the_total_are_warned_of():
    loop = Loop("s_ste")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(9):
            with training_step(loop.method, step, loop.optimizer):
                loop.forward().backward()
    with pytest.warns(UserWarning, match=r"^on_step_begin\(9\) with total_steps=9, of which 8 is"):
        loop.method.on_step_begin(9)
    with pytest.warns(UserWarning, match=r"^on_step_begin\(0\) after on_step_end\(8\).*epoch$"):
        loop.method.on_step_begin(0)


def test_an_end_before_the_last_phase_is_warned_of():
    """`total_steps` that counts micro-batches, say."""
    for name, options in (("fst", {"dense_fraction": 0.5}), ("slope", {"adapter_rank": 2})):
        for steps in (4, 9):
            loop = Loop(name, options)
            for step in range(steps):
                loop.method.on_step_begin(step)
                loop.method.on_step_end(step)
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                loop.method.finalize(loop.model)
            early = ["finalize after step 3 with total_steps="] if steps < 9 else []
            assert [str(w.message)[:39] for w in told] == early


def test_a_copy_is_not_finalized_without_its_method():
    """It would stay converted, and be saved with dense weights."""
    for name, options in LOOPS:
        loop = Loop(name, options)
        with pytest.raises(ValueError, match="takes the model that this method converted"):
            loop.method.finalize(copy.deepcopy(loop.model))
        model, method = copy.deepcopy((loop.model, loop.method))
        method.finalize(nn.Sequential(model))  # in a wrapper, as of DDP
        assert type(model["mlp"][0]) is nn.Linear
        loop.method.finalize(loop.model)
        loop.method.finalize(loop.model)  # once more does nothing
        assert type(loop.model["mlp"][0]) is nn.Linear


def test_loops_that_are_right_are_told_nothing():
    for name, options in LOOPS:
        loop = Loop(name, options)
        model, method, optimizer = loop.model, loop.method, loop.optimizer
        state = copy.deepcopy((model.state_dict(), method.state_dict()))
        for step in range(6):
            method.on_step_begin(step)
            if step == 1:
                continue  # a loss that was not finite: nothing is updated, and nothing ended
            if step == 2:
                method.on_step_begin(step)  # the same step again
            for _ in range(2):  # accumulation, with activations computed anew
                torch.utils.checkpoint.checkpoint(loop.forward, use_reentrant=False).backward()
            if step == 3:
                optimizer.zero_grad()  # a GradScaler leaves the update out
            else:
                method.on_gradients(step, optimizer)
                optimizer.step()
            if step == 4:
                model, method, optimizer = copy.deepcopy((model, method, optimizer))
                loop.model, loop.method, loop.optimizer = model, method, optimizer
            method.on_step_end(step)
            model.eval()
            with torch.no_grad():
                loop.forward()
            model.train()
        method.on_step_begin(6)  # what was begun and not ended is forgotten
        model.load_state_dict(state[0])
        method.load_state_dict(state[1])
        method.on_step_begin(7)
        method.on_step_end(7)
