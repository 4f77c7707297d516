"""The inside of a step, and what of a run's state outlives its process."""

import copy
import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import methods
from experiments.config.settings import learning_rate
from experiments.support.errors import UserError
from experiments.training import averages, graphs, pretraining
from experiments.training import optimization as module
from experiments.training.distributed import World
from experiments.training.optimization import DTYPES, micro_batch_size
from experiments.training.pretraining import held_out
from experiments.training.trainer import Built, Trainer
from methods import FusedAdamW, fst, s_ste, sr_ste, ste
from methods.nn import linear
from models.gpt2 import GPT
from tests.experiments.conftest import Interrupted, quiet, untimed
from tests.lifetimes import Reads


@pytest.fixture
def build(tiny):
    """build(*overrides, kind=method class) -> Trainer on the CPU, at its first step.

    The losses of the steps in `nan` are NaN; the process ends at the beginning of step `dies`.
    """

    def trainer(*overrides, kind=ste.Method, nan=(), dies=None):
        class Method(kind):
            def on_step_begin(self, step):
                if step == dies:
                    raise Interrupted
                self.present = step
                super().on_step_begin(step)

            def micro_batch_loss(self, model, batch):
                value = super().micro_batch_loss(model, batch)
                return value * math.nan if self.present in nan else value

        name = kind.Config.__module__.removeprefix("methods.")
        config = tiny(f"method={name}", *overrides)
        torch.manual_seed(config.seed)
        model = GPT(config.model)
        method = Method(config.method_options)
        method.convert(model, dtype=DTYPES[config.train.dtype])
        source, quantizes = config.open_source(model), method.capabilities.quantizes
        micro_batch = micro_batch_size(config.train, config.impl.micro_batch, 1, quantizes)
        samples = config.train.eval_samples
        evaluation = lambda own: held_out(source, samples, own.micro_batch, own.forward)  # noqa: E731
        built = Built(model, method, source, evaluation, config.train, micro_batch, 0)
        here = World(0, 1, torch.device("cpu"))
        return Trainer(built, config.impl, here, config.directory(), config.digest(), {}, quiet)

    return trainer


def records(trainer):
    return untimed(SimpleNamespace(directory=lambda: trainer.directory))


class Recording(sr_ste.Method):
    """Writes down each call, and whether the weights had moved since the step began."""

    def __init__(self, config):
        super().__init__(config)
        self.calls, self.rates, self.decays = [], [], []

    def note(self, hook):
        weight = next(iter(self.layers.values())).weight
        self.calls.append((hook, self.present, not torch.equal(weight, self.before)))

    def on_step_begin(self, step):
        self.before = next(iter(self.layers.values())).weight.detach().clone()
        self.note("begin")
        super().on_step_begin(step)

    def open_micro_batch(self):
        self.note("open")
        super().open_micro_batch()

    def micro_batch_loss(self, model, batch):
        self.note("loss")
        return super().micro_batch_loss(model, batch)

    def on_gradients(self, step, optimizer=None):
        assert step == self.present
        self.note("gradients")
        self.rates.append({group["lr"] for group in optimizer.param_groups})
        self.decays.append([group["weight_decay"] for group in optimizer.param_groups])
        self.gradients = [
            p.grad.clone() for group in optimizer.param_groups for p in group["params"]
        ]
        super().on_gradients(step, optimizer)

    def on_step_end(self, step):
        assert step == self.present
        self.note("end")
        super().on_step_end(step)


def test_the_order_of_a_step(build):
    """The weights move between `on_gradients` and `on_step_end`, at the rate and the weight
    decay of this step; a hook of the model comes before the method's."""
    short = "train.steps=3", "train.warmup_steps=0", "train.weight_decay_end=0.4"
    trainer = build(*short, "impl.micro_batch=2", kind=Recording)
    calls = trainer.method.calls
    for hook in ("on_step_begin", "on_gradients", "on_step_end"):
        setattr(trainer.model, hook, lambda *args, own=hook: calls.append((own, *args)))
    trainer.fit()
    assert calls == [
        call
        for step in range(3)
        for call in (
            ("on_step_begin", step),
            *((hook, step, False) for hook in ("begin", *["open", "loss"] * 2)),
            ("on_gradients", step),
            ("gradients", step, False),
            ("on_step_end", step),
            ("end", step, True),
        )
    ]
    assert trainer.method.rates == [{learning_rate(trainer.train, step)} for step in range(3)]
    assert len(set(map(min, trainer.method.rates))) == 3
    # A quarter and three quarters of a cosine's way from 0.1 to 0.4; none on gains and biases.
    expected = [[0.1, 0.0], [0.175, 0.0], [0.325, 0.0]]
    assert trainer.method.decays == [pytest.approx(decays) for decays in expected]


def test_a_skipped_step_changes_no_weight(build):
    """`decay_on=weights` acts on the weights themselves, so it must not be asked at all."""
    decay = "method.decay_on=weights", "method.alpha=0.5"
    short = "train.steps=4", "train.warmup_steps=0", "train.dtype=fp16"
    trainer = build(*decay, *short, kind=Recording, nan=(2,))
    trainer.fit()
    assert trainer.optimization.skipped == 1
    moved = [moved for hook, _, moved in trainer.method.calls if hook == "end"]
    assert moved == [True, True, False, True]


@pytest.mark.parametrize("share", [0.0, 0.7, 2.0])
def test_the_method_sees_gradients_unscaled_and_clipped(build, share):
    """fp16 scales the loss by 2^16, and both micro-batches add up before anything is clipped.
    share: of the gradient's norm, the largest that is left; 0 turns clipping off."""
    short = "train.steps=1", "train.warmup_steps=0", "impl.micro_batch=2"
    trainer = build(*short, "train.dtype=fp16", kind=Recording)
    twin = copy.deepcopy(trainer.model)
    for first in (0, 2):
        [batch] = trainer.source.batches([(0, range(first, first + 2))])
        with torch.autocast("cpu", torch.float16):
            _, loss = twin(**batch)
        (loss * 2.0**16 / 2).backward()
    gradients = [p.grad / 2.0**16 for g in twin.param_groups(0.0) for p in g["params"]]
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients))
    clipped = dataclasses.replace(trainer.train, grad_clip=share * norm)
    trainer.optimization.train = clipped
    trainer.fit()
    factor = min(1.0, share) if share else 1.0
    for ours, expected in zip(trainer.method.gradients, gradients, strict=True):
        # The norm is a sum in fp32, and clipping adds 1e-6 to it.
        torch.testing.assert_close(ours, factor * expected, rtol=1e-5, atol=1e-9)
    (record,) = [r for r in records(trainer) if "loss" in r]
    assert record["grad_norm"] == pytest.approx(norm, rel=1e-5)  # before clipping


def test_only_skipped_steps_in_a_row_stop_the_run(build, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_SKIPPED_IN_A_ROW", 3)
    spread = build("train.dtype=fp16", nan=(1, 2, 4, 5))
    spread.fit()
    assert (spread.step, spread.optimization.skipped) == (12, 4)
    shown = {r["step"]: (r["loss"], r["skipped_steps"]) for r in records(spread) if "loss" in r}
    assert shown[1] == (None, 1) and shown[3][1] == 2  # JSON has no NaN
    stuck = build("train.dtype=fp16", f"runs={tmp_path / 'stuck'}", nan=range(4, 12))
    with pytest.raises(UserError, match="no finite gradient in 3 steps up to step 6"):
        stuck.fit()


def test_evaluation_is_without_dropout_and_counts_every_sequence_once(build):
    """Six sequences in batches of four: the mean is over sequences, not over batches."""
    trainer = build("model.dropout=0.5", "train.eval_samples=6", "train.steps=4")
    trainer.fit()
    trainer.model.train()
    first = trainer.evaluate()["val_loss"]
    assert trainer.model.training
    assert trainer.evaluate() == {"val_loss": first}
    trainer.model.eval()
    trainer.evaluate()
    assert not trainer.model.training
    with torch.no_grad():
        single = [float(trainer.model(**batch)[1]) for batch in trainer.source.eval_batches(6, 1)]
    assert len(single) == 6
    assert first == pytest.approx(sum(single) / 6, rel=1e-6)


def test_a_record_holds_the_mean_loss_since_the_last_one(build, tmp_path):
    every, third = build(), build("train.log_every=3", f"runs={tmp_path / 'third'}")
    every.fit()
    third.fit()
    single, found = (
        {r["step"]: r["loss"] for r in records(t) if "loss" in r} for t in (every, third)
    )
    spans = {0: [0], 3: [1, 2, 3], 6: [4, 5, 6], 9: [7, 8, 9], 11: [10, 11]}
    expected = {last: sum(single[s] for s in span) / len(span) for last, span in spans.items()}
    assert found == pytest.approx(expected, rel=1e-6)


def whole_and_interrupted(build, tmp_path, *overrides, dies, **options):
    """Two trainers at their last step, the second one resumed in a new process."""
    whole = build(*overrides, **options)
    whole.fit()
    overrides = (*overrides, f"runs={tmp_path / 'stopped'}")
    with pytest.raises(Interrupted):
        build(*overrides, dies=dies, **options).fit()
    torch.manual_seed(99)  # a new process has a generator of its own
    resumed = build(*overrides, **options)
    resumed.model.eval()  # as transformers' from_pretrained leaves a model
    resumed.resume()
    assert 0 < resumed.step < dies
    resumed.fit()
    return whole, resumed


def test_an_interrupted_run_goes_on_bit_for_bit(build, tmp_path, monkeypatch):
    """With dropout, averaged weights, a scale that doubles after five good steps, the flip rate of
    step 5 that is shown in 6, and the loss of both: the checkpoint before 6 must know them all."""
    scaler = torch.amp.GradScaler

    def growing(device, enabled):
        return scaler(device, init_scale=2.0**4, growth_interval=5, enabled=enabled)

    monkeypatch.setattr(torch.amp, "GradScaler", growing)
    overrides = [
        "model.dropout=0.2", "train.ema=0.5", "train.dtype=fp16", "method.measure_every=5",
        "train.log_every=2", "train.warmup_steps=0",
        # Its rates follow from counts of samples, which are NumPy's.
        "train.schedule=triangle", "train.min_learning_rate=0",
    ]  # fmt: skip
    whole, resumed = whole_and_interrupted(build, tmp_path, *overrides, nan=(1,), dies=8)
    # The skipped step halves the scale and starts the count again: steps 6 and 11 double 2^3.
    assert whole.optimization.scaler.get_scale() == 2.0**5
    assert resumed.optimization.scaler.state_dict() == whole.optimization.scaler.state_dict()
    assert resumed.optimization.skipped == 1
    (shown,) = [r for r in records(whole) if r["step"] == 6]
    assert shown["flip_rate"] > 0
    assert records(resumed) == records(whole)
    assert torch.equal(*(trainer.model.lm_head.weight for trainer in (whole, resumed)))


def capture_by_calling(model_of):
    """A stand-in for `graphs.capture` without a GPU: a replay calls `part` again and writes where
    the capture wrote, if all that a graph would read is still there. The capture itself leaves the
    random numbers and gradients as they were; what else it writes is overwritten by the first
    replay.

    Args:
        model_of: the model whose gradients `part` writes.
    """

    def capture(part, pool):
        parameters = list(model_of(part).parameters())
        fresh = [p for p in parameters if p.grad is None]
        own = [(p.grad, p.grad.clone()) for p in parameters if p.grad is not None]
        before = torch.get_rng_state()
        with Reads() as reads, pytest.MonkeyPatch.context() as patch:
            patch.setattr(linear, "_capturing", lambda _: True)
            result = part()
        torch.set_rng_state(before)
        for gradient, value in own:
            gradient.copy_(value)
        written = [(p, p.grad) for p in fresh if p.grad is not None]

        def replay():
            assert not reads.lost()
            own = [p.grad for p, _ in written]
            for parameter, _ in written:
                parameter.grad = None
            result.copy_(part())
            for (parameter, gradient), attached in zip(written, own, strict=True):
                gradient.copy_(parameter.grad)
                parameter.grad = attached  # a graph knows memory, not attributes

        return replay, result

    return capture


@pytest.mark.parametrize(
    ("kind", "options", "nan", "launched_steps"),
    [
        # The optimizer in one pass beside that in several.
        (fst.Method, ("method.refresh_every=3", "method.dense_fraction=0.5"), (2,), 6),
        # Step 3 is replayed; at its end the history begins, from which scales follow from then on.
        (s_ste.Method, ("method.fp8=hopper_delayed", "train.fp8_samples=2"), (0, 1, 2), 6),
    ],
    ids=["fst", "delayed scaling"],
)
def test_replayed_steps_are_the_same_and_go_on(
    build, tmp_path, monkeypatch, kind, options, nan, launched_steps
):
    """Over choices of masks, skipped steps, the switch to another phase and an interruption, with
    two micro-batches a step: the first writes the gradients, the second adds to them."""
    capture = capture_by_calling(lambda part: part.func.__self__.model)
    monkeypatch.setattr(graphs, "capture", capture)
    monkeypatch.setattr(graphs, "_obstacle", lambda *_: None)
    overrides = (*options, "train.dtype=fp16", "impl.micro_batch=2", "train.batch_size=4")
    launched = build(*overrides, f"runs={tmp_path / 'launched'}", kind=kind, nan=nan)
    launched.fit()
    fused = ("impl.optimizer=fused",) if kind is fst.Method else ()
    overrides = (*overrides, "impl.cuda_graphs=true", *fused)
    whole, resumed = whole_and_interrupted(build, tmp_path, *overrides, dies=8, kind=kind, nan=nan)
    assert whole.optimization.replays.steps == whole.step - launched_steps
    assert whole.graphed and not launched.graphed
    assert (type(whole.optimization.optimizer) is FusedAdamW) == bool(fused)
    assert launched.optimization.skipped == len(nan)
    assert records(launched) == records(whole) == records(resumed)
    trainers = (launched, whole, resumed)
    for a, *others in zip(*(t.model.parameters() for t in trainers), strict=True):
        assert all(torch.equal(a, b) for b in others)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", methods.available())
def test_graphs_replay_what_is_launched(tiny, tmp_path, interrupted, name):
    """Bit for bit on a GPU, with dropout, over a refresh, a switch of phase and an interruption."""
    overrides = [
        f"method={name}", "impl.device=cuda", "impl.micro_batch=2", "train.batch_size=4",
        "train.dtype=fp16", "model.dropout=0.1", f"runs={tmp_path / 'launched'}",
    ]  # fmt: skip
    if name == "fst":
        overrides += ["method.refresh_every=3", "method.dense_fraction=0.5"]
    if name == "act24":
        overrides += ["model.gelu=relu2"]
    if name == "imp":  # four rounds of three steps are too short for a graph
        overrides += ["method.rounds=1"]
    launched = tiny(*overrides)
    pretraining.run(launched)
    graphed = tiny(*overrides, "impl.cuda_graphs=true", f"runs={tmp_path / 'graphed'}")
    with interrupted(8):
        pretraining.run(graphed)
    assert pretraining.run(graphed).result["cuda_graphs"]
    found = []
    for config in (launched, graphed):
        found.append((untimed(config), load_file(config.directory() / "model.safetensors")))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[0][1][key], found[1][1][key]) for key in found[0][1])


def test_time_and_skipped_steps_add_up(build):
    first = build()
    first.seconds, first.optimization.skipped, first.optimization.skipped_in_a_row = 1e6, 3, 2
    first.save()
    first.saver.wait()
    second = build()
    second.resume()
    found = second.optimization
    assert (second.seconds, found.skipped, found.skipped_in_a_row) == (1e6, 3, 2)
    second.fit()
    assert 1e6 < second.seconds < 2e6


def test_averaged_weights_follow_the_recursion_and_leave_training_alone(build, tmp_path):
    class Watched(s_ste.Method):
        def on_step_end(self, step):
            super().on_step_end(step)
            weights = next(iter(self.layers.values())).weight
            self.seen = [*getattr(self, "seen", []), weights.detach().clone()]

    trainer = build("train.ema=0.75", kind=Watched)
    name = next(iter(trainer.method.layers)) + ".weight"
    expected = trainer.model.get_parameter(name).detach().clone()
    trainer.fit()
    for weights in trainer.method.seen:
        expected.lerp_(weights, 0.25)
    torch.testing.assert_close(trainer.averages[name], expected)
    plain = build(f"runs={tmp_path / 'plain'}", kind=Watched)
    plain.fit()
    pairs = zip(plain.model.parameters(), trainer.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert any("ema_val_loss" in r for r in records(trainer))
    # Inside, the layers compute with the average's own projection; afterwards with what was there.
    layer = trainer.model.get_submodule(name.removesuffix(".weight"))
    before = layer.sparse_weight.clone()
    with averages.applied(trainer.model, trainer.averages):
        assert torch.equal(layer.weight, trainer.averages[name])
        assert torch.equal(layer.sparse_weight, layer.effective_weight())
    assert torch.equal(layer.sparse_weight, before)


@pytest.mark.parametrize("name", ["lamb", "lion"])
def test_other_optimizers(build, name):
    overrides = f"train.optimizer={name}", "train.learning_rate=1e-2", "train.betas=[0.8,0.7]"
    trainer = build(*overrides)
    optimizer = trainer.optimization.optimizer
    assert type(optimizer).__name__ == name.title()
    assert optimizer.defaults.get("max_grad_norm") is None  # the step clips
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.0]
    assert [tuple(g["betas"]) for g in optimizer.param_groups] == [(0.8, 0.7)] * 2
    trainer.fit()
    assert records(trainer)[-1]["loss"] < records(trainer)[1]["loss"]


def test_the_batch_grows(build):
    """Twelve micro-steps of two sequences, the last ones in pairs."""
    trainer = build(
        "train.steps=9", "train.ramp_batch=2", "train.ramp_micro_steps=12", "impl.micro_batch=2"
    )
    asked = []
    original = trainer.source.batches

    def batches(requests):
        return original(asked.append(request) or request for request in requests)

    object.__setattr__(trainer.source, "batches", batches)
    trainer.fit()
    assert asked == [
        *((step, range(2)) for step in range(6)),
        *((step, range(first, first + 2)) for step in (6, 7, 8) for first in (0, 2)),
    ]
