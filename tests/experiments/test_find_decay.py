"""The search for a decay factor: what is compared, with what, and what comes out."""

import json
from dataclasses import replace

import pytest

from experiments import find_decay
from experiments.config.compose import one_line_errors
from experiments.config.run import load
from experiments.find_decay import DecaySearch, Outcome, find, freeze_search, recommend
from experiments.support.errors import UserError
from experiments.training import pretraining
from experiments.training.trainer import Trainer
from methods import dense
from tests.experiments.conftest import quiet


@pytest.fixture
def search(tiny):
    """`search(0.0, 1.0, "method=sr_ste")`: candidates and overrides, a warm-up of 12 steps."""

    def make(*arguments):
        candidates = tuple(a for a in arguments if isinstance(a, float))
        overrides = [a for a in arguments if isinstance(a, str)]
        method = [] if any("method=" in o for o in overrides) else ["method=fst"]
        return DecaySearch(tiny(*method, "train.warmup_steps=12", *overrides), candidates)

    return make


def outcome(rate, alpha=None):
    return Outcome(alpha, {0: 0.0, 1: rate}, rate, 5.0, directory="there")


# ---------------------------------------------------------------- mu


def test_mu_of_a_run_against_itself_is_1():
    assert all(outcome(rate).mu(outcome(rate)) == 1.0 for rate in (1e-5, 0.0123, 1 / 3))


def test_mu_is_a_ratio_of_means_over_the_last_quarter(search, monkeypatch):
    wanted = search(0.1)
    assert wanted.window == range(9, 12)
    flips = {True: [1.0, 2.0, 3.0], False: [1.0, 1.0, 1.0]}  # by dense or not, in the window

    def read(path):
        mine = flips[path.parent == wanted.dense_run().directory()]
        early = [{"step": s, "flip_rate": 99.0} for s in range(9)]
        return [*early, *({"step": 9 + i, "flip_rate": f} for i, f in enumerate(mine))]

    monkeypatch.setattr(find_decay, "read_metrics", read)
    monkeypatch.setattr(pretraining, "run", lambda config, report: {"metrics": {"val_loss": 5.0}})
    reference = find_decay.outcome(wanted, None, quiet)
    assert (reference.flip_rate, reference.alpha) == (2.0, None)
    assert find_decay.outcome(wanted, 0.1, quiet).mu(reference) == 0.5


def test_masks_that_never_flip_cannot_be_compared():
    with pytest.raises(UserError, match=r"no mask flipped at the end of the warm-up.*\(there\)"):
        outcome(0.1).mu(outcome(0.0))


@pytest.mark.parametrize(
    ("pairs", "recommended", "advice"),
    [
        ([(0.0, 1.05), (1e-4, 0.94), (1e-3, 0.8), (1e-2, 0.3)], 1e-3, "alpha=0.001 (mu=0.80)"),
        ([(1e-4, 0.95), (1e-3, 0.5)], 1e-4, "alpha=0.0001 (mu=0.95)"),
        ([(1e-4, 1.1), (1e-3, 1.0)], None, "no candidate is feasible: try some above 0.001"),
        ([(1e-4, 0.5), (1e-3, 0.4)], None, "no candidate is feasible: try some below 0.0001"),
        ([(1e-4, 0.5), (1e-3, 1.0)], None, "mu does not fall with alpha"),
        ([(1e-4, 1.0), (1e-3, 0.5)], None, "try some between 0.0001 and 0.001"),
    ],
)
def test_recommendation(pairs, recommended, advice):
    result = recommend(pairs)
    assert result["recommended"] == recommended
    assert advice in result["advice"]


# ---------------------------------------------------------------- the runs


def test_runs_are_the_warm_up_of_the_configured_training(search):
    wanted = search(0.5, 0.0, 0.5, "train.steps=10000", "method.mvue=sequential")
    assert wanted.candidates == (0.0, 0.5)
    for run in (wanted.dense_run(), wanted.sparse_run(0.5)):
        assert (run.train.steps, run.train.warmup_steps) == (12, 12)
        assert replace(run.train, steps=10_000) == wanted.config.train
        options = run.method_options
        assert (options.refresh_every, options.measure_every, options.total_steps) == (1, 1, 12)
        assert options.mvue == "sequential"
    assert wanted.sparse_run(0.5).method_options.dense_fraction == 0.0
    assert wanted.sparse_run(0.5).method_options.alpha == 0.5
    assert wanted.dense_run().method_options.dense_fraction == 1.0
    # The decay factor that happens to be configured changes neither runs nor result.
    other = search(0.0, 0.5, "train.steps=10000", "method.mvue=sequential", "method.alpha=3")
    assert other.directory() == wanted.directory()


@pytest.mark.parametrize("method", ["sr_ste", "bi_mask"])
def test_row_wise_methods_are_compared_with_plain_dense_training(search, method):
    run = search(0.1, f"method={method}", "method.include=[*c_fc*]").dense_run()
    assert run.method == "dense"
    assert isinstance(run.method_options, dense.Config)
    assert run.method_options.include == ("*c_fc*",)


def test_the_search_of_fst(search, monkeypatch):
    """Files and figures; a repeated call trains nothing and finds the same."""
    wanted, heard = search(0.0, 1.0), []
    record = find(wanted, heard.append)
    folder = wanted.directory()
    assert json.loads((folder / "decay.json").read_text()) == json.loads(json.dumps(record))
    assert (folder / "decay.png").read_bytes().startswith(b"\x89PNG")
    text = (folder / "decay.md").read_text()
    assert any(text in line for line in heard)
    zero, one = record["candidates"]
    assert (zero["alpha"], one["alpha"]) == (0.0, 1.0)
    # A decay of 1 outweighs every gradient: what is pruned stays pruned.
    assert one["mu"] < zero["mu"]
    for entry in record["candidates"]:
        assert entry["mu"] == entry["flip_rate"] / record["dense"]["flip_rate"]
        assert entry["feasible"] == (0.60 <= entry["mu"] <= 0.95)
        assert f"| {entry['alpha']:g} | {entry['flip_rate']:.2e} | {entry['mu']:.3f} |" in text

    # The dense run with virtual transposable masks is the plain dense run.
    plain = replace(wanted.dense_run(), method="dense", method_options=dense.Config(total_steps=12))
    assert pretraining.run(plain, quiet)["metrics"]["val_loss"] == record["dense"]["val_loss"]

    def train(self):
        raise AssertionError("trained again")

    monkeypatch.setattr(Trainer, "fit", train)
    assert find(wanted, quiet) == record
    assert find_decay.finished(wanted) is None  # no result.json yet
    result = find_decay.run(wanted, quiet)
    assert find_decay.finished(wanted)["metrics"] == result["metrics"]
    good = [e["alpha"] for e in record["candidates"] if e["feasible"]]
    assert result["metrics"]["alpha"] == record["recommended"]
    assert result["metrics"]["least"] == min(good, default=None)
    assert result["metrics"]["dense_flip_rate"] == record["dense"]["flip_rate"]
    # Runs are shared with other searches.
    assert find(search(1.0), quiet)["candidates"] == [one]


def test_the_result_has_the_recommended_factor_and_the_feasible_range(search, monkeypatch):
    mus = {0.0: 1.1, 1e-4: 0.94, 1e-3: 0.8, 1e-2: 0.61, 1e-1: 0.3}
    entries = [{"alpha": a, "mu": mu, "feasible": 0.6 <= mu <= 0.95} for a, mu in mus.items()]
    record = {"candidates": entries, "recommended": 1e-3, "dense": {"flip_rate": 0.02}}
    shared = {"corpus": {}, "backend": "cpu", "world_size": 1, "steps": 12}
    monkeypatch.setattr(find_decay, "find", lambda *_: record)
    monkeypatch.setattr(pretraining, "finished", lambda _: shared)
    assert find_decay.run(search(*mus), quiet)["metrics"] == {
        "alpha": 1e-3, "mu": 0.8, "least": 1e-4, "largest": 1e-2, "dense_flip_rate": 0.02
    }  # fmt: skip


# ---------------------------------------------------------------- the command


def compose(*overrides):
    from hydra import compose, initialize_config_module

    with one_line_errors(), initialize_config_module("experiments.conf", version_base="1.3"):
        return freeze_search(compose("find_decay", overrides=list(overrides)))


def test_defaults():
    wanted = compose()
    assert wanted.config.method == "fst"
    assert len(wanted.candidates) == 5
    steps = [b / a for a, b in zip(wanted.candidates, wanted.candidates[1:], strict=False)]
    assert steps == pytest.approx([10 / 3, 3, 10 / 3, 3])  # two to a decade
    assert wanted.config.train == replace(load([]).train, warmup_steps=60)
    assert compose("method=sr_ste", "candidates=[0,1e-3]").candidates == (0.0, 1e-3)


def test_the_warm_up_alone_has_no_cool_down():
    wanted = compose("train.warmup_steps=100", "train.cooldown_steps=100")
    for run in (wanted.dense_run(), wanted.sparse_run(1e-4)):
        assert (run.train.steps, run.train.warmup_steps, run.train.cooldown_steps) == (100, 100, 0)


def test_bad_input_is_one_line():
    for override, message in [
        ("candidates=[]", "candidates=[]; name at least one decay factor"),
        ("candidates=[-1e-5]", "candidates has -1e-05; a decay factor must be finite and >= 0"),
        ("candidates=[nan]", "candidates has nan"),
        ("candidates=[many]", "candidates=['many']; it must be a list of numbers"),
        ("candidates=1e-3", "candidates=0.001; it must be a list of numbers, like [6e-5,2e-4]"),
        ("method=ste", "method=ste has no masked decay; choose sr_ste, fst or bi_mask"),
        ("train.warmup_steps=2", "train.warmup_steps=2; the flip rates are compared"),
        (
            "train.ramp_batch=16 train.ramp_micro_steps=200",
            "train.ramp_batch=16: flip rates can only be compared at one batch size; set",
        ),
    ]:
        with pytest.raises(UserError) as caught:
            compose(*override.split(" "))
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)
