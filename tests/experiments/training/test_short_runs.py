"""Runs that are shorter, or on less data, than their settings are meant for; what they print."""

from experiments.config.settings import fit_warmup
from experiments.training import pretraining


def test_a_warmup_fits_its_steps():
    for steps, warmup, cooldown, expected in [
        (200, 20, 0, 20),
        (20, 20, 0, 20),
        (19, 20, 0, 1),
        (5, 20, 0, 0),
        (100, 2000, 95, 5),
        (100, 2000, 100, 0),
        (100, 0, 100, 0),
        (100, 2000, 200, 2000),  # refused later: it is the cooldown that does not fit
        (0, 20, 0, 0),  # likewise the steps
        ("many", 20, 0, 20),
    ]:
        train = {"steps": steps, "warmup_steps": warmup, "cooldown_steps": cooldown, "ema": 0.5}
        fitted, notes = fit_warmup(train)
        assert fitted == {**train, "warmup_steps": expected}
        assert len(notes) == (expected != warmup)


def test_fewer_held_out_samples_than_asked_for_are_said(tiny, capsys):
    said = []
    config = tiny("method=ste", "train.steps=2", "train.warmup_steps=9", "train.eval_samples=9999")
    result = pretraining.run(config, said.append).result
    there = result["metrics"]["eval_samples"]
    warmup, samples = result["notes"]
    assert [line for line in said if line in (warmup, samples)] == [warmup, samples]
    assert warmup == "train.warmup_steps=9 does not fit train.steps=2: it is 0 here"
    assert samples == (
        f"train.eval_samples=9999, but only {there} samples are held out: all are used; "
        "compare losses only with those of runs on the same samples"
    )
    assert result["config"]["train"]["warmup_steps"] == 0
    assert " tokens/s" in capsys.readouterr().out
