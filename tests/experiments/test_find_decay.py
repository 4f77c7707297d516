"""The search for a decay factor: what is compared, with what, and what comes out."""

import json
from dataclasses import replace

import pytest

from experiments import find_decay
from experiments.find_decay import DecaySearch, compared, markdown
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


def test_runs_are_the_warm_up_of_the_configured_training(search):
    wanted = search(0.0, 0.5, "train.steps=10000", "method.mvue=sequential")
    assert wanted.window == range(9, 12)
    for alpha, fraction in ((None, 1.0), (0.5, 0.0)):
        run = wanted.training(alpha)
        assert (run.train.steps, run.train.warmup_steps) == (12, 12)
        assert replace(run.train, steps=10_000) == wanted.config.train
        options = run.method_options
        assert (options.refresh_every, options.measure_every, options.total_steps) == (1, 1, 12)
        assert (options.mvue, options.alpha) == ("sequential", alpha or 0.0)
        assert options.dense_fraction == fraction
    # The decay factor that happens to be configured changes neither runs nor result.
    other = search(0.0, 0.5, "train.steps=10000", "method.mvue=sequential", "method.alpha=3")
    assert other.directory() == wanted.directory()
    for method in ("sr_ste", "bi_mask"):  # row-wise: compared with plain dense training
        run = search(0.1, f"method={method}", "method.include=[*c_fc*]").training(None)
        assert (run.method, type(run.method_options)) == ("dense", dense.Config)
        assert run.method_options.include == ("*c_fc*",)


def test_the_search_of_fst(search, monkeypatch):
    """Files and figures; a repeated call trains nothing and finds the same."""
    wanted, heard = search(0.0, 1.0), []
    assert find_decay.finished(wanted) is None
    result = find_decay.run(wanted, heard.append)
    record = json.loads((wanted.directory() / "result.json").read_text())
    zero, one = record["candidates"]
    assert (zero["alpha"], one["alpha"]) == (0.0, 1.0)
    # A decay of 1 outweighs every gradient: what is pruned stays pruned.
    assert one["mu"] < zero["mu"]
    for entry in record["candidates"]:
        assert entry["mu"] == entry["flip_rate"] / record["dense"]["flip_rate"]
    assert any("| alpha |" in text for text in heard)
    assert result["metrics"] == find_decay.finished(wanted)["metrics"]

    # The dense run with virtual transposable masks is the plain dense run.
    options = dense.Config(total_steps=12)
    plain = replace(wanted.training(None), method="dense", method_options=options)
    metrics = pretraining.run(plain, quiet).result["metrics"]
    assert metrics["val_loss"] == record["dense"]["val_loss"]
    monkeypatch.setattr(Trainer, "fit", None)
    assert find_decay.run(wanted, quiet)["metrics"] == result["metrics"]
    find_decay.run(search(1.0), quiet)  # runs are shared with other searches


def test_mu_is_a_ratio_and_the_feasible_candidates_are_told(search):
    rates = [0.02, 0.022, 0.0188, 0.016, 0.0122, 0.006]
    wanted = search(0.0, 1e-4, 1e-3, 1e-2, 1e-1)

    def figures(rates):
        return [{"flip_rate": rate, "directory": "x", "val_loss": 4.0} for rate in rates]

    record = compared(wanted, figures(rates))
    mus = [entry["mu"] for entry in record["candidates"]]
    assert mus == pytest.approx([1.1, 0.94, 0.8, 0.61, 0.3])
    assert [e["feasible"] for e in record["candidates"]] == [False, True, True, True, False]
    assert "Recommended: alpha=0.001 (mu=0.80)" in markdown(record)
    none = compared(search(0.5), figures((2e-2, 1e-3)))
    assert none["metrics"]["alpha"] is None and "try larger ones where mu" in markdown(none)
    with pytest.raises(UserError, match=r"no mask flipped at the end of the warm-up.*\(x\)"):
        compared(wanted, figures([0.0] * 6))


def test_the_warm_up_has_no_cooldown():
    wanted = find_decay.load(["train.warmup_steps=100", "train.cooldown_steps=100"])
    train = wanted.training(1e-4).train
    assert (train.steps, train.warmup_steps, train.cooldown_steps) == (100, 100, 0)
    assert find_decay.load(["method=sr_ste", "candidates=[1e-3,0,0]"]).candidates == (0.0, 1e-3)
