"""Conversion, protocol and bookkeeping shared by all methods."""

import copy
import operator
import re
import warnings
from pathlib import Path

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import methods
from methods import dense, s_ste, ste


def mlp(width=8):
    torch.manual_seed(0)
    return nn.ModuleDict(
        {
            "mlp": nn.Sequential(nn.Linear(width, 16), nn.GELU(), nn.Linear(16, width)),
            "head": nn.Linear(width, 4),
        }
    )


def test_the_config_of_another_method_is_refused():
    told = r"methods\.s_ste\.Method takes a methods\.s_ste\.Config, not a methods\.ste\.Config"
    with pytest.raises(TypeError, match=told):
        s_ste.Method(ste.Config())
    with pytest.raises(TypeError, match=r"methods\.ste\.Config, not a builtins\.dict"):
        ste.Method({"include": "all"})


def test_what_to_include_instead_can_be_converted_and_names_each_kind_of_layer_once():
    block = nn.ModuleDict({"attn": nn.MultiheadAttention(8, 2), "up": nn.Linear(8, 16)})
    model = nn.ModuleDict({"blocks": nn.ModuleList([block, copy.deepcopy(block)])})
    for include in ("ffn", "all", ["*.attn.*"]):
        with pytest.raises(ValueError, match=r"blocks\.") as error:
            methods.build("bi_mask", include=include).convert(model)
        assert str(error.value).endswith("; choose from include=['blocks.*.up']")
    report = methods.build("ste", include=["blocks.*.up"]).convert(model)
    assert report.names == ("blocks.0.up", "blocks.1.up")


def test_converting_twice_is_an_error():
    model = mlp()
    method = ste.Method(ste.Config())
    method.convert(model)
    with pytest.raises(ValueError, match="converted already"):
        method.convert(model)
    for name in ("s_ste", "ast"):
        with pytest.raises(ValueError, match="converted already"):
            methods.build(name, total_steps=4).convert(model)


def test_conversion_keeps_identity_hooks_flags_and_the_generator():
    model = mlp().eval()
    layer, weight = model["mlp"][0], model["mlp"][0].weight
    calls = []
    layer.register_forward_hook(lambda *_: calls.append(1))
    state = torch.get_rng_state()
    s_ste.Method(s_ste.Config()).convert(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert model["mlp"][0] is layer and layer.weight is weight and not layer.training
    layer(torch.randn(2, 8))
    assert calls == [1]


def test_build_errors_name_the_choices():
    with pytest.raises(ValueError, match=r"no method 'sste'; choose one of .*s_ste"):
        methods.build("sste")
    with pytest.raises(ValueError, match=r"ste has no option alpha; it takes include"):
        methods.build("ste", alpha=1.0)
    with pytest.raises(ValueError, match=r"beta='max'; choose one of none, keep_l1"):
        methods.build("s_ste", beta="max")
    with pytest.raises(ValueError, match="list of globs"):
        methods.build("ste", include="mlp")
    assert {"dense", "ste", "sr_ste", "s_ste"} <= set(methods.available())
    assert not {"base", "gemms"} & set(methods.available())


# ---------------------------------------------------------------- flip rate


def one_group(values):
    layer = nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(values).expand(4, 4))
    return layer


def step_to(method, layer, values, step):
    method.on_step_begin(step)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(values).expand(4, 4))
    method.on_step_end(step)
    return method.metrics()


def test_refresh_chooses_the_masks_of_weights_that_changed_outside():
    layer = one_group([4.0, 3.0, 2.0, 1.0])
    ste.Method(ste.Config(include=["*"])).convert(layer)
    with torch.no_grad():
        layer.weight.copy_(layer.weight.flip(1))
    methods.refresh(nn.Sequential(layer))
    assert layer.mask[0].tolist() == [False, False, True, True]


def test_seeds_and_numbers_of_steps_are_whole_numbers():
    for name in ("seed", "total_steps", "measure_every"):
        for bad in (1.0, True, "1"):
            with pytest.raises(ValueError, match=rf"^{name}={bad!r}; it must be a whole number$"):
                methods.build("ste", **{name: bad})


def test_flip_rate_by_hand():
    for module in (dense, ste, s_ste):
        layer = one_group([4.0, 3.0, 2.0, 1.0])
        method = module.Method(module.Config(include=["*"], measure_every=1))
        method.convert(layer)
        assert method.metrics()["flip_rate"] == 0.0  # the first masks changed nothing
        assert step_to(method, layer, [4.0, 3.0, 2.5, 1.0], 0)["flip_rate"] == 0.0
        # {0, 1} -> {0, 2}: two of four bits in every row.
        assert step_to(method, layer, [4.0, 3.0, 3.5, 1.0], 1)["flip_rate"] == 0.5
        assert step_to(method, layer, [1.0, 5.0, 1.5, 6.0], 2)["flip_rate"] == 1.0
        assert step_to(method, layer, [1.0, 5.0, 1.5, 6.0], 3)["flip_rate"] == 0.0


def test_flip_rate_per_step_and_per_refresh_differ_when_masks_are_kept():
    layer = one_group([4.0, 3.0, 2.0, 1.0])
    method = ste.Method(ste.Config(include=["*"]))
    method.mask_period = 2
    method.convert(layer)
    first = step_to(method, layer, [1.0, 2.0, 3.0, 4.0], 0)  # no choice is due after step 0
    assert (first["flip_rate"], first["flip_rate_refresh"]) == (0.0, 0.0)
    second = step_to(method, layer, [1.0, 2.0, 3.0, 4.0], 1)
    assert (second["flip_rate"], second["flip_rate_refresh"]) == (0.5, 1.0)  # in two steps
    third = step_to(method, layer, [1.0, 2.0, 3.0, 4.0], 2)
    assert (third["flip_rate"], third["flip_rate_refresh"]) == (0.5, 1.0)  # until the next choice


def test_flip_rates_of_the_layers_average_to_the_whole():
    model = mlp()
    method = ste.Method(ste.Config(include=["*"], measure_every=1, flips_by_layer=True))
    method.convert(model)
    assert not any("." in name for name in method.metrics())  # nothing is measured yet
    before = {name: layer.mask.clone() for name, layer in method.layers.items()}
    method.on_step_begin(0)
    with torch.no_grad():
        for layer in method.layers.values():
            layer.weight.copy_(torch.randn_like(layer.weight))
    method.on_step_end(0)
    found = method.metrics()
    sizes = {name: mask.numel() for name, mask in before.items()}
    for name, mask in before.items():
        changed = float((mask != method.layers[name].mask).float().mean())
        assert found[f"flip_rate.{name}"] == changed > 0
    whole = sum(found[f"flip_rate.{name}"] * size for name, size in sizes.items())
    assert found["flip_rate"] == pytest.approx(whole / sum(sizes.values()), rel=1e-12)
    fresh = ste.Method(method.config)
    fresh.load_state_dict(method.state_dict())  # a resumed run goes on with them
    assert fresh.flips_of_layers == method.flips_of_layers


def test_flips_count_in_a_layer_that_is_trained_in_part():
    for trained in ("weight", "bias"):
        layer = nn.Linear(4, 4)
        layer.requires_grad_(False).get_parameter(trained).requires_grad_(True)
        method = ste.Method(ste.Config(include=["*"], measure_every=1))
        method.convert(layer)
        step_to(method, layer, [1.0, 2.0, 3.0, 4.0], 0)
        assert step_to(method, layer, [4.0, 3.0, 2.0, 1.0], 1)["flip_rate"] == 1.0


def test_groups_with_three_non_zeros_are_illegal():
    for values, illegal in (([2.0, 0.0, 1.0, 0.0], 0), ([2.0, 0.0, 1.0, 3.0], 4), ([1.0] * 4, 4)):
        method = dense.Method(dense.Config(include=["*"]))
        method.convert(one_group(values))  # four rows of one group
        found = method.metrics()
        assert found["illegal_groups"] == illegal
        assert found["density"] == sum(value != 0 for value in values) / 4


def test_virtual_flip_rate_leaves_a_dense_model_untouched():
    model = mlp()
    before = copy.deepcopy(model.state_dict())
    method = dense.Method(dense.Config(measure_every=1))
    method.convert(model)
    method.on_step_begin(0)
    method.on_step_end(0)
    method.metrics()
    method.finalize(model)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)


@pytest.mark.parametrize("period", [1, 4])
def test_nothing_is_measured_with_zero(period, monkeypatch):
    """Copies of the masks and a comparison that waits for the GPU would be in every timing."""
    layer = one_group([4.0, 3.0, 2.0, 1.0])
    method = ste.Method(ste.Config(include=["*"], measure_every=0))
    method.mask_period = period
    method.convert(layer)
    monkeypatch.setattr(type(layer), "current_mask", lambda self: pytest.fail("measured"))
    for step in range(2 * period):
        assert step_to(method, layer, [1.0, 2.0, 3.0, 4.0], step)["flip_rate"] == 0.0
    assert layer.mask[0].tolist() == [False, False, True, True]  # and chosen all the same


def test_the_first_choice_at_or_after_a_multiple_is_measured():
    for period, every, measured in (
        (1, 3, {0, 3, 6, 9}),
        (4, 1, {3, 7, 11}),
        (2, 5, {1, 5, 11}),
        (4, 9, {3, 11}),
    ):
        method = ste.Method(ste.Config(measure_every=every))
        method.mask_period = period
        assert {step for step in range(12) if method._measures(step)} == measured


# ---------------------------------------------------------------- random keys


def test_keys_differ_by_layer_step_seed_and_micro_batch():
    def keys(seed, step, micro):
        model = mlp()
        method = s_ste.Method(s_ste.Config(seed=seed))
        method.convert(model)
        method.on_step_begin(step)
        for _ in range(micro + 1):
            method.open_micro_batch()
        return [tuple(layer.key.tolist()) for layer in method.sparse_layers.values()]

    everything = [
        key for seed in (0, 1) for step in (0, 1) for micro in (0, 1)
        for key in keys(seed, step, micro)
    ]  # fmt: skip
    assert len(set(everything)) == len(everything) == 16
    assert keys(0, 5, 1) == keys(0, 5, 1)


def test_a_model_that_returns_no_scalar_loss_is_told_so():
    model = mlp()
    model.forward = lambda x: (x, x)
    method = ste.Method(ste.Config())
    method.convert(model)
    with pytest.raises(TypeError, match=r"scalar loss.*open_micro_batch"):
        method.loss(model, {"x": torch.ones(2, 8)})


def test_a_linear_whose_weight_is_computed_is_refused():
    for normalise in (torch.nn.utils.weight_norm, torch.nn.utils.parametrizations.weight_norm):
        model = nn.Sequential(normalise(nn.Linear(8, 8)))
        with pytest.raises(ValueError, match="no plain nn"):
            ste.Method(ste.Config(include=["*"])).convert(model)


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
    for include in ("ffn", "all", ["0.layers.0.linear1"]):
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
        for mine, theirs in zip(shown, plain, strict=True):
            torch.testing.assert_close(mine, theirs)


# ---------------------------------------------------------------- what a user is told


def test_a_printed_model_shows_method_pattern_and_phase():
    model = mlp()
    methods.build("s_ste").convert(model)
    assert repr(model["mlp"][0]) == (
        "Linear(in_features=8, out_features=16, bias=True, method=s_ste, pattern=2:4, phase=sparse)"
    )
    variants = {
        "slope": ({"n": 1, "adapter_rank": 2, "adapter_fraction": 1.0}, "1:4, phase=adapters"),
        "fst": ({"dense_fraction": 1.0}, "2:4, phase=dense"),
        "gmp": ({"begin_fraction": 0.0, "end_fraction": 0.01}, "2:4, phase=sparse"),
    }
    for name, (options, shown) in variants.items():
        model = mlp()
        method = methods.build(name, include="ffn", total_steps=2, **options)
        method.convert(model)
        method.on_step_begin(1)
        assert f"method={name}, pattern={shown})" in repr(model)
        assert repr(method.finalize(model)["head"]) == repr(mlp()["head"])


def test_metrics_are_of_converted_layers():
    for name in ("dense", "s_ste", "slope"):
        model, method = mlp(), methods.build(name)
        with pytest.raises(ValueError, match=r"call metrics\(\) after convert"):
            method.metrics()
        method.convert(model)
        assert method.metrics()["density"] > 0
        method.finalize(model)
        with pytest.raises(ValueError, match=r"before finalize"):
            method.metrics()


LOOPS = [
    ("s_ste", {}),
    ("slope", {}),
    ("fst", {"dense_fraction": 0.0}),
    ("gmp", {"begin_fraction": 0.0, "prune_every": 1}),
    ("dense", {}),
]


class Loop:
    """A training loop, of which a test leaves out what it wants."""

    def __init__(self, name, options):
        torch.manual_seed(0)
        self.model = mlp()
        self.method = methods.build(name, include="ffn", total_steps=9, **options)
        self.method.convert(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def forward(self):
        self.method.open_micro_batch()
        return self.model["mlp"](torch.ones(4, 8)).square().mean()

    def update(self, step):
        self.forward().backward()
        self.method.on_gradients(step, self.optimizer)
        self.optimizer.step()
        self.optimizer.zero_grad()


def test_a_loop_without_its_hooks_is_told_at_its_second_step():
    for name, options in LOOPS:
        for hook, told in (
            ("on_step_begin", r"step 0 and on_step_end\(0\) was not called"),
            ("on_step_end", r"on_step_end\(1\) without on_step_begin\(1\)"),
            ("", r"no step has begun: .*call on_step_begin\(step\)"),
        ):
            loop = Loop(name, options)
            with pytest.raises(RuntimeError, match=told):
                for step in range(2):
                    if hook == "on_step_begin":
                        loop.method.on_step_begin(step)
                    loop.update(step)
                    if hook == "on_step_end":
                        loop.method.on_step_end(step)


@pytest.mark.parametrize("fused", [False, True])  # torch's does not count what it writes
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("name", "options"), LOOPS[:-1])  # all but dense
def test_an_own_loss_without_any_hook_is_told(name, options, compiled, fused):
    """Masks of a changed weight are stale, in training, in evaluation and at the end. A compiled
    pass is not checked."""
    loop = Loop(name, options)
    loop.optimizer = torch.optim.AdamW(loop.model.parameters(), lr=1e-2, fused=fused)
    if fused and name == "slope":
        return  # it computes with the values themselves
    run = torch.compile(loop.model["mlp"], backend="eager") if compiled else loop.model["mlp"]
    with torch.no_grad():
        for parameter in loop.model.parameters() if name != "slope" else ():
            parameter.mul_(1)  # as DDP does once; a layer without an operand cannot tell
        loop.model["mlp"](torch.ones(4, 8))
    run(torch.ones(4, 8)).square().mean().backward()
    loop.optimizer.step()
    told = r"changed, and masks and operands did not follow: call on_step_begin"
    for again in (
        lambda: loop.model["mlp"](torch.ones(4, 8)),
        lambda: loop.method.finalize(loop.model),
    ):
        with pytest.raises(RuntimeError, match=told):
            again()
    methods.refresh(loop.model)
    run(torch.ones(4, 8))
    twin, method = copy.deepcopy((loop.model, loop.method))
    twin["mlp"](torch.ones(4, 8))
    method.finalize(twin)
    assert "seen" not in vars(twin["mlp"][0])


def test_a_loop_that_opens_no_micro_batch_is_told():
    loop = Loop("s_ste", {})
    loop.method.on_step_begin(0)
    loop.model["mlp"](torch.ones(4, 8)).square().mean().backward()
    with pytest.raises(RuntimeError, match=r"step 0, .* call open_micro_batch\(\) before each"):
        loop.method.on_gradients(0, loop.optimizer)


SEVERAL = [
    ("fst", {"alpha": 0.1}),
    ("sr_ste", {"alpha": 0.1, "decay_on": "weights"}),
    ("step", {"min_fraction": 0.1, "max_fraction": 0.1}),
    ("ast", {"alpha": 0.1, "ramp_steps": 0}),
    ("slope", {"adapter_rank": 2}),
]


def test_two_optimizers_are_given_as_a_list():
    """They then train as one does."""
    for make in ("optimizer", "fused"):
        for name, options in SEVERAL:
            if make == "fused" and name in ("ast", "step"):
                continue  # their own update rules
            losses = []
            for count in (1, 2):
                loop = Loop(name, options)
                new = loop.method.optimizer if make == "optimizer" else methods.FusedAdamW
                parts = [[p for p in loop.model.parameters() if p.ndim > n] for n in (0, 1)]
                weights = set(parts[1])
                parts = (
                    [parts[0]]
                    if count == 1
                    else [[p for p in parts[0] if p not in weights], parts[1]]
                )
                several = [new(part, lr=1e-2) for part in parts]
                for step in range(4):
                    loop.method.on_step_begin(step)
                    losses.append(loop.forward())
                    losses[-1].backward()
                    loop.method.on_gradients(step, several if count == 2 else several[0])
                    for own in several:
                        own.step()
                        own.zero_grad()
                    loop.method.on_step_end(step)
            assert losses[:4] == losses[4:]


def test_muon_does_not_train_compressed_values():
    loop = Loop("slope", {})
    muon = torch.optim.Muon([p for p in loop.model.parameters() if p.ndim == 2])
    rest = torch.optim.AdamW([p for p in loop.model.parameters() if p.ndim != 2])
    with pytest.raises(ValueError, match=r"Muon would orthogonalise mlp\.0\.values, .* to AdamW$"):
        loop.method.on_gradients(0, [muon, rest])


ACTING = [
    *((name, {}) for name in ("sr_ste", "fst", "step", "bi_mask", "ast")),
    ("ast", {"decay_route": "gradient"}),
    ("slope", {"adapter_rank": 2}),
    ("released.slope_dense", {}),
]


def test_a_loop_without_on_gradients_is_told_where_it_would_train_by_another_method():
    for name, options in ACTING:
        loop = Loop(name, options)
        loop.method.on_step_begin(0)
        loop.forward().backward()
        loop.optimizer.step()
        with pytest.raises(RuntimeError, match=r"on_gradients\(0, optimizer\) was not called"):
            loop.method.on_step_end(0)


def resumed(name, options, state=None, drop=()):
    """A loop whose model has loaded a checkpoint without these entries, and its method the state,
    if one is given."""
    loop = Loop(name, options)
    saved = loop.model.state_dict()
    loop.model.load_state_dict(
        {k: v for k, v in saved.items() if not k.endswith(drop)}, strict=not drop
    )
    if state is not None:
        loop.method.load_state_dict(state)
    return loop


def test_a_training_that_goes_on_without_the_state_of_step_is_an_error():
    """It would be dense again."""
    told = r"on_step_begin\(5\) after .*load_state_dict was not called: .*phase 2"
    with pytest.raises(RuntimeError, match=told):
        resumed("step", {}).method.on_step_begin(5)


def test_a_training_that_goes_on_without_its_teacher_is_warned_of():
    """The copy in this process is right if the model was the same before `convert`."""
    with pytest.warns(UserWarning, match=r"was not called: the teacher is a copy .*saved with the"):
        resumed("ast", {"decay_route": "gradient"}).method.on_step_begin(5)


@pytest.mark.filterwarnings("error")
def test_a_training_that_goes_on_with_its_state_or_needs_none_is_told_nothing():
    for name, options in (*LOOPS, ("step", {}), ("ast", {})):
        resumed(name, options, Loop(name, options).method.state_dict()).method.on_step_begin(5)
        resumed(name, options, drop=("mask", "dense")).method.on_step_begin(
            5
        )  # a plain model's state
        resumed(name, options).method.on_step_begin(1)  # a loop that counts from 1
        Loop(name, options).method.on_step_begin(5)  # converted in the middle of a training
        loop = resumed(name, options)
        loop.method.on_step_begin(0)
        loop.method.on_step_begin(5)
        loop = resumed(name, options)
        loop.method.finalize(loop.model)
        assert "was_loaded" not in vars(loop.model["mlp"][0])


@pytest.mark.filterwarnings("error")
def test_a_state_that_no_step_depends_on_may_be_left_out():
    for name in ("ste", "sr_ste", "fst", "s_ste", "slope", "gmp", "bi_mask"):
        resumed(name, {}).method.on_step_begin(5)
        distils = resumed("ast", {})
        distils.method.set_teacher(mlp())
        distils.method.on_step_begin(5)


def test_steps_that_are_counted_anew_in_each_epoch_or_beyond_the_total_are_warned_of():
    loop = Loop("s_ste", {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(9):
            loop.method.on_step_begin(step)
            loop.update(step)
            loop.method.on_step_end(step)
    with pytest.warns(UserWarning, match=r"^on_step_begin\(9\) with total_steps=9, of which 8 is"):
        loop.method.on_step_begin(9)
    with pytest.warns(UserWarning, match=r"^on_step_begin\(0\) after on_step_end\(8\).*epoch$"):
        loop.method.on_step_begin(0)


UNFINISHED = [
    ("fst", {"dense_fraction": 0.5}),
    ("slope", {"adapter_rank": 2}),
    ("gmp", {"begin_fraction": 0.0, "end_fraction": 0.9}),
]


def test_an_end_before_the_last_phase_is_warned_of():
    """`total_steps` that counts micro-batches, say."""
    for name, options in UNFINISHED:
        for steps in (4, 9):
            model = mlp()
            method = methods.build(name, include="ffn", total_steps=9, **options)
            method.convert(model)
            for step in range(steps):
                method.on_step_begin(step)
                method.on_step_end(step)
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                method.finalize(model)
            assert [str(w.message)[:39] for w in told] == (
                ["finalize after step 3 with total_steps="] if steps < 9 else []
            )


def test_a_copy_is_not_finalized_without_its_method():
    """It would stay converted, and be saved with dense weights."""
    for name, options in LOOPS:
        loop = Loop(name, options)
        for other in (copy.deepcopy(loop.model), mlp()):
            with pytest.raises(
                ValueError, match=r"takes the model that this method converted, not a"
            ):
                loop.method.finalize(other)
        model, method = copy.deepcopy((loop.model, loop.method))
        method.finalize(nn.Sequential(model))  # in a wrapper, as of DDP
        assert type(model["mlp"][0]) is nn.Linear
        loop.method.finalize(loop.model)
        loop.method.finalize(loop.model)  # once more does nothing
        assert type(loop.model["mlp"][0]) is nn.Linear


def test_a_batch_that_is_no_dict_is_refused_with_the_way_out():
    for batch in (torch.ones(2, 8), (torch.ones(2, 8), torch.ones(2))):
        loop = Loop("ste", {})
        with pytest.raises(TypeError, match=r"a batch is a dict .*, not a .*open_micro_batch\(\)"):
            loop.method.loss(loop.model, batch)


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
            if step == 5:  # what was begun and not ended is forgotten
                method.on_step_begin(6)
                model.load_state_dict(state[0])
                method.load_state_dict(state[1])
                method.on_step_begin(7)
        average = copy.deepcopy(model.state_dict())
        model.load_state_dict({k: v * 1 for k, v in average.items()})  # averages, say, for a while
        method.on_step_end(7)
        method.on_step_end(7)


def test_what_only_some_methods_need_has_a_default_in_all():
    """So a driver asks no method whether it has a hook."""
    method = ste.Method(ste.Config())
    assert method.calibration_sequences == 0
    method.calibrate(mlp(), [])
    with pytest.raises(ValueError, match="ste does not distil"):
        method.set_teacher(mlp())


def test_what_methods_share_knows_no_method():
    for path in (Path(methods.__file__).parent / "nn").glob("*.py"):
        code = path.read_text()
        assert not re.search(r"^\s*(from|import) (\.\.|methods)", code, re.M), path.name
