"""Tables from given results, against tables written by hand."""

import csv
import dataclasses
import io
import re

import pytest
from matplotlib.figure import Figure as Canvas

from experiments.support.checkpoint import csv_text
from experiments.support.errors import UserError
from reproduce import by_block, published, scatter
from reproduce import figure as figures
from reproduce.cells import value
from reproduce.figure import (
    Value,
    axis,
    curves,
    draw,
    draw_values,
    limits,
    of_trained_models,
    values,
)
from reproduce.reading import read_tables
from reproduce.render import render
from reproduce.spec import Column, Figure, Measure, Table, TableRow, Tier, Variant

ROWS = [TableRow("dense", ["method=dense"]), TableRow("S-STE", ["method=s_ste"])]
COLUMNS = [
    Column("loss", "metrics.val_loss", "mean_std", ".2f"),
    Column("to dense", "metrics.val_loss", "paired", "+.2f"),
    Column("density", "sparsity.density", "mean", ".1f"),
    Column("illegal", "sparsity.illegal_groups", "sum", ",.0f"),
    Column("time", "step_seconds", "ratio", ".1f"),
]


def own_table(seeds, columns=COLUMNS, **changed):
    tier = Tier(setting="A small thing.", seeds=seeds)
    return Table(name="t", title="T", tiers={"smoke": tier, "full": tier}, rows=ROWS,
                 columns=columns, **changed)  # fmt: skip


def body(rendered):
    """The lines of the table, wide enough for one part, without the padding of their cells."""
    lines = rendered.grid.markdown(width=10_000).splitlines()
    return [re.sub(" +", " ", line) for line in lines if line.startswith("|")][2:]


def of_method(name, **options):
    """The config of a run, as far as tables read it."""
    impl = {"compile": False, "micro_batch": None}
    return {"train": {"dtype": "fp32"}, "impl": impl, "method": {"name": name, **options}}


@pytest.fixture
def runs(finished_run):
    full = {"density": 1.0, "illegal_groups": 1000}
    dense = [finished_run("dense", s, v, sparsity=full) for s, v in enumerate([1.0, 2.0, 3.0])]
    sparse = [
        finished_run("S-STE", seed, loss, step_seconds=seconds, config=of_method("s_ste"))
        for seed, loss, seconds in [(0, 1.5, 3.0), (1, 2.0, 4.0), (2, 4.0, 5.0)]
    ]
    return dense + sparse


def test_whole_table(runs):
    """Differences 0.5, 0, 1: 0.5 ± 4.3027 * 0.5 / sqrt(3) = 0.5 ± 1.242."""
    assert (
        render(own_table([0, 1, 2]), "smoke", runs).markdown()
        == """\
# T

- Tier smoke: A small thing.
- Runs: 6 of 6, seeds 0, 1, 2. ± is the standard deviation over seeds; square
  brackets give the 95 % interval of the difference at equal seeds, that is,
  with equal initial weights and data.
- Corpus: tiny, 1,000 training and 50 validation tokens (sha256 abababababab,
  abababababab).
- Device: abacus, 2 threads, fp32, backend cpu, torch 2.0.
- Code: revision c0ffeec0ffee.

| method |  loss (n=3) |             to dense | density |         illegal |
| ------ | ----------: | -------------------: | ------: | --------------: |
| dense  | 2.00 ± 1.00 |             baseline |     1.0 | dense by design |
| S-STE  | 2.50 ± 1.32 | +0.50 [-0.74, +1.74] |     0.5 |               0 |

| method | time |
| ------ | ---: |
| dense  |  1.0 |
| S-STE  |  2.0 |
"""
    )


def test_a_row_is_compared_with_the_one_that_it_names(runs, finished_run):
    """Differences of the third row to S-STE 1, 1, 1, to dense 1.5, 1, 2."""
    third = [finished_run("third", seed, v) for seed, v in enumerate([2.5, 3.0, 5.0])]
    table = own_table([0, 1, 2], COLUMNS[:2])
    rows = [*table.rows, TableRow("third", ["method=ste"], against="S-STE")]
    rendered = render(dataclasses.replace(table, rows=rows), "smoke", [*runs, *third])
    assert body(rendered)[1:] == [
        "| S-STE | 2.50 ± 1.32 | +0.50 [-0.74, +1.74] |",
        "| third | 3.50 ± 1.32 | +1.00 [+1.00, +1.00]† |",
    ]
    assert rendered.summary[2]["to dense: against"] == "S-STE"
    assert 'Marked †: "third" is compared with "S-STE", not with the first row.' in rendered.header


def test_an_interval_of_the_mean(runs):
    columns = [Column("loss", "metrics.val_loss", "interval", ".2f", unit="nats")]
    rendered = render(own_table([0, 1, 2], columns), "smoke", runs)
    assert body(rendered)[0] == "| dense | 2.00 [-0.48, 4.48] nats |"  # 4.303 / sqrt(3)
    assert rendered.summary[0]["loss: low"] == pytest.approx(2 - 4.3027 / 3**0.5, abs=1e-4)
    assert any("95 % interval of the mean" in line for line in rendered.header)
    assert body(render(own_table([0], columns), "smoke", runs[:1]))[0] == "| dense | 1.00 nats |"


def test_csv_has_all_digits(runs):
    rendered = render(own_table([0, 1, 2]), "smoke", runs)
    summary = list(csv.DictReader(io.StringIO(csv_text(rendered.summary))))
    assert summary[0]["to dense: mean"] == ""
    assert float(summary[1]["loss: std"]) == pytest.approx(1.75**0.5)
    assert float(summary[1]["to dense: low"]) == pytest.approx(0.5 - 1.2420, abs=1e-4)
    assert (summary[1]["loss: n"], summary[1]["method"]) == ("3", "S-STE")
    single = list(csv.DictReader(io.StringIO(csv_text(rendered.per_run))))
    assert [(r["method"], r["seed"], r["metrics.val_loss"]) for r in single[-2:]] == [
        ("S-STE", "1", "2.0"),
        ("S-STE", "2", "4.0"),
    ]


def test_what_is_missing_says_so(runs, finished_run):
    table = own_table([0, 1, 2])
    assert body(render(table, "smoke", [])) == [
        "| dense | not run | not run | not run | not run | not run |",
        "| S-STE | not run | not run | not run | not run | not run |",
    ]
    # Dense at seed 0, S-STE at 0 and 1: one pair only, and so no interval.
    assert body(render(table, "smoke", [runs[0], *runs[3:5]])) == [
        "| dense | 1.00 (n=1) | baseline | 1.0 (n=1) | dense by design | 1.0 (n=1) |",
        "| S-STE | 1.75 ± 0.35 (n=2) | +0.50 (n=1) | 0.5 (n=2) | 0 (n=2) | 1.5 (n=1) |",
    ]
    unmeasured = finished_run("dense", 0, None)
    assert "| not measured | baseline |" in body(render(own_table([0]), "smoke", [unmeasured]))[0]


def test_groups_beyond_2_4_are_counted_where_the_method_ends_sparse(finished_run):
    """FST ends dense, unless its last phase has no step; S-STE must not."""
    illegal = {"density": 1.0, "illegal_groups": 7}
    for said, config in [
        ("dense by design", of_method("fst", total_steps=60)),
        ("7", of_method("fst", total_steps=60, dense_fraction=0.0)),
        ("7", of_method("s_ste", total_steps=60)),
    ]:
        run = finished_run("dense", 0, 1.0, sparsity=illegal, config=config)
        lines = body(render(own_table([0], [COLUMNS[3]]), "smoke", [run]))
        assert lines[0] == f"| dense | {said} |"


def test_a_single_seed_has_no_interval(runs):
    assert body(render(own_table([0], COLUMNS[:2]), "smoke", [runs[0], runs[3]])) == [
        "| dense | 1.00 | baseline |",
        "| S-STE | 1.50 | +0.50 (n=1) |",
    ]


def test_runs_that_differ_in_code_or_corpus_are_marked(finished_run):
    run = finished_run("dense", 0, 1.0)
    changed = run.result["environment"] | {"git_dirty": True}
    other = finished_run("S-STE", 0, 1.0, environment=changed)
    table = own_table([0, 1])
    again = finished_run("dense", 1, 1.0)
    text = "- ".join(["", *render(table, "smoke", [run, other, again]).header])
    assert (
        "- Code: not the same for all runs: revision c0ffeec0ffee with uncommitted changes (1 of "
        "S-STE); revision c0ffeec0ffee (the other 2)." in text
    )
    assert "Corpus: tiny" in text


@pytest.mark.parametrize(
    ("key", "other", "shown"),
    [
        ("dtype", "bf16", "2 threads, bf16, backend cpu"),
        ("compile", True, "2 threads, fp32, compiled, backend cpu"),
        ("micro_batch", 4, "2 threads, fp32, micro-batch 4, backend cpu"),
    ],
)
def test_runs_that_differ_in_how_they_ran_are_marked(finished_run, key, other, shown):
    config = of_method("s_ste")
    run = finished_run("dense", 0, 1.0, config=config)
    same = finished_run("S-STE", 0, 1.0, config=config)
    group = "train" if key == "dtype" else "impl"
    other_config = config | {group: config[group] | {key: other}}
    changed = finished_run("S-STE", 0, 1.0, config=other_config)

    def device(*runs):
        (line,) = [x for x in render(own_table([0]), "smoke", [*runs]).header if "Device" in x]
        return line

    first = "abacus, 2 threads, fp32, backend cpu, torch 2.0"
    assert device(run, same) == f"Device: {first}."
    assert device(run, changed) == (
        f"Device: not the same for all runs: {first} (1 of dense); abacus, {shown}, torch 2.0 (the "
        "other 1)."
    )


PAPER = {"paper": "w", "number": "1", "published_table": "Table 1"}
PAPER["published_setting"] = "Big thing"
BESIDE = [
    Column("BLEU", published="bleu"),
    Column("loss", "metrics.val_loss", "mean_std", ".2f", published="val"),
]


@pytest.fixture
def beside(monkeypatch):
    """The paper says 2.0 for S-STE's loss, by somebody's notes, and nothing else."""
    cells = {("w", "Table 1", "ours", "val"): published.Published(2.0, "", "second-hand", "notes")}
    monkeypatch.setattr(published, "_cells", lambda path: cells)
    rows = [ROWS[0], TableRow("S-STE", ["method=s_ste"], published="ours")]

    def build():
        table = own_table([0, 1, 2], BESIDE, **PAPER)
        table.rows = rows
        return table

    return build()


def test_paper_and_ours(beside, runs):
    rendered = render(beside, "full", runs)
    assert body(rendered) == [
        "| dense | ours | 2.00 ± 1.00 (n=3) |",
        "| S-STE | paper | 2.00 (second-hand) |",
        "| | ours | 2.50 ± 1.32 (n=3) |",
    ]
    assert (
        "Not measured in this tier: BLEU. Left out, because the paper's values are not available "
        "either: all of them." in rendered.header
    )
    assert rendered.summary[1]["loss: difference"] == 0.5


def test_a_smaller_tier_is_not_set_against_the_paper(beside, runs):
    rendered = render(beside, "smoke", runs)
    assert body(rendered) == ["| dense | 2.00 ± 1.00 (n=3) |", "| S-STE | 2.50 ± 1.32 (n=3) |"]
    assert "Not measured in this tier: BLEU." in rendered.header
    told = "This tier is not the paper's setting, so no difference to the paper is computed."
    assert told in rendered.header
    assert "The paper: Big thing." in rendered.header
    assert [line for line in rendered.header if "rows cannot be ranked: after so few st" in line]


def test_what_a_tier_leaves_out_is_a_sentence(beside, runs):
    beside.tiers["smoke"].rows = ["dense"]
    assert "This tier leaves out the rows S-STE." in render(beside, "smoke", runs).header


def test_a_smoke_figure_shows_no_published_value(beside, runs, tmp_path):
    beside.figure = Figure("bars", ["loss"])
    for tier, sources in {"full": {"paper (second-hand)", "ours"}, "smoke": {"ours"}}.items():
        rendered = render(beside, tier, runs)
        assert {value.source for value in values(beside, rendered.summary)} == sources
        assert ("loss: paper" in csv_text(rendered.summary)) is (tier == "full")
        assert any("second-hand" in line for line in rendered.header) is (tier == "full")


def test_every_axis_of_a_bar_or_a_line_has_its_unit():
    assert axis("time", "ms") == "time (ms)" and axis("training", "x") == "training (x dense)"
    for table in read_tables():
        if table.figure.kind in ("bars", "lines"):
            units = render(table, "full", []).units
            without = "similarity" in table.title  # a cosine
            assert without or all(units[label] for label in table.figure.columns), table.name


def test_what_is_no_full_comparison_says_why(beside, runs):
    beside.tiers["full"] = dataclasses.replace(beside.tiers["full"], incomparable="other data")
    rendered = render(beside, "full", runs)
    assert body(rendered)[1:] == [
        "| S-STE | paper | 2.00 (second-hand) |", "| | ours | 2.50 ± 1.32 (n=3) |",
    ]  # fmt: skip
    assert "No difference to the paper is computed: other data." in rendered.header


def test_published_values_are_noted_with_their_source_unless_they_are_sure(beside, runs):
    told = "Published values of S-STE: second-hand, from notes."
    assert told in render(beside, "full", runs).header
    sure = published.Published(2.0, "", "primary", "the paper")
    assert sure.reservation == ""
    unsure = dataclasses.replace(sure, confidence="medium", note="a damaged copy")
    assert unsure.reservation == "of medium confidence, from the paper: a damaged copy"
    odd = dataclasses.replace(sure, doubt="nobody believes it")
    assert odd.reservation == "as printed in the paper, but nobody believes it"
    assert odd.text(".1f") == "2.0 (doubtful)"
    second = dataclasses.replace(odd, evidence="second-hand")
    assert second.text(".1f") == "2.0 (second-hand, doubtful)"


def test_a_row_that_is_not_run_shows_the_paper_alone(beside, runs):
    beside.rows = [*beside.rows, TableRow("other", not_run="too large", published="ours")]
    assert not [row for _, row, _ in beside.trainings("full") if row.label == "other"]
    rendered = render(beside, "full", runs)
    assert body(rendered)[-1] == "| other | paper | 2.00 (second-hand) |"
    assert "Not run: other: too large." in rendered.header


def test_a_speedup_is_the_baseline_s_time_over_the_row_s(runs):
    columns = [Column("speed-up", "step_seconds", "speedup", ".2f")]
    # 2/3, 2/4 and 2/5 in the mean.
    assert body(render(own_table([0, 1, 2], columns), "smoke", runs)) == [
        "| dense | 1.00 |", "| S-STE | 0.52 |",
    ]  # fmt: skip


def test_values_of_a_run(finished_run):
    log = [{"step": s, "loss": float(s)} for s in range(18)] + [{"step": 18, "val_loss": 0.5}]
    scores = {"cola": 50.0, "rte": 61.0}
    made = {f"glue.{task}": {"metrics": {"score": score}} for task, score in scores.items()}
    made["text"] = {"metrics": {"ppl": 7.5}}
    run = finished_run("dense", 0, 1.25, log, measures=made, steps=18)
    measures = {"glue": Measure("finetune", [], ["cola", "rte"]), "text": Measure("evaluate")}
    for path, expected in {
        "metrics.val_loss": 1.25,
        "tail.loss": 17.0,  # steps from 16.2 on
        "tail.unknown": None,
        "text.ppl": 7.5,
        "glue.rte.score": 61.0,
        "glue.mean": 55.5,
        "glue.cola.score, glue.rte.score, text.ppl": 39.5,
    }.items():
        assert value(run, path, measures) == expected
    for missing, named in {"metrics.bleu": "metrics.bleu", "glue.rte.f1": "f1"}.items():
        with pytest.raises(UserError, match=f"the results of .*seed0 have no {named}$"):
            value(run, missing, measures)
    del made["glue.rte"]
    assert value(run, "glue.mean", measures) is None  # no mean of some of the tasks
    assert value(run, "glue.rte.score", measures) is None


def test_measurements_that_a_tier_does_not_make_or_that_are_missing(finished_run):
    columns = [
        Column("loss", "metrics.val_loss", show="mean", format=".1f"),
        Column("RTE", "glue.rte.score", show="mean", format=".1f"),
        Column("CoLA", "glue.cola.score", show="mean", format=".1f"),
        Column("share", "sparsity.density", "mean", ".0f", scale=100.0),
    ]
    table = own_table([0], columns)
    table.tiers = {
        "smoke": Tier(seeds=[0], measure={"glue": Measure("finetune", [], ["rte"])}),
        "full": Tier(seeds=[0], measure={"glue": Measure("finetune", [], ["rte", "cola"])}),
    }
    made = {"glue.rte": {"metrics": {"score": 61.0}}}
    runs = [finished_run("dense", 0, 1.0, measures=made), finished_run("S-STE", 0, 2.0)]
    assert body(render(table, "smoke", runs)) == [
        "| dense | 1.0 | 61.0 | 50 |",
        "| S-STE | 2.0 | not run | 50 |",
    ]
    assert "Not measured in this tier: CoLA." in render(table, "smoke", runs).header
    assert body(render(table, "full", runs))[0] == "| dense | 1.0 | 61.0 | not run | 50 |"


def test_variants_have_lines_and_baselines_of_their_own(finished_run, monkeypatch):
    found = {
        ("w", "T", "small", "ours"): published.Published(4.0, "%", "primary", "", ""),
        ("w", "T", "large ours", "odd"): published.Published(None, "", "primary", "", "no memory"),
    }
    monkeypatch.setattr(published, "_cells", lambda path: found)
    columns = [
        Column("loss", "metrics.val_loss", format=".1f", published="l"),
        Column("to dense", "metrics.val_loss", show="paired", format="+.1f"),
    ]
    rows = [
        TableRow("dense", ["method=dense"], published="dense"),
        TableRow("S", ["method=s_ste"], published="ours", cells={"loss": ["{variant}", "ours"]}),
    ]
    variants = [Variant("A", published="small"), Variant("B", rows=["dense"], published="large")]
    table = own_table([0], columns, paper="w", number="1", published_table="T", variants=variants,
                      published_row="{variant} {row}")  # fmt: skip
    table.rows = rows
    runs = [
        finished_run("dense", 0, 1.0, variant="A"),
        finished_run("S", 0, 3.0, variant="A"),
        finished_run("dense", 0, 2.0, variant="B"),
    ]
    assert body(render(table, "full", runs)) == [
        "| A | dense | paper | not available | - |",
        "| | | ours | 1.0 % | baseline |",
        "| A | S | paper | 4.0 % | - |",
        "| | | ours | 3.0 % | +2.0 (n=1) |",
        "| B | dense | paper | not available | - |",
        "| | | ours | 2.0 % | baseline |",
        "| B | S | paper | not available | - |",
    ]
    rows[1].cells = {"loss": ["{variant} ours", "odd"]}
    rendered = render(table, "full", runs)
    assert "| B | S | paper | none | - |" in body(rendered)
    assert "Published values of S: some are none: no memory." in rendered.header


def test_speed_is_never_set_against_the_papers_device(finished_run, monkeypatch, tmp_path):
    found = {("w", "T", "a", "x"): published.Published(1.5, "x", "primary", "", "")}
    monkeypatch.setattr(published, "_cells", lambda path: found)
    table = own_table([0], [Column("speed", "metrics.speed", show="mean", published="x")],
                      paper="w", number="1", published_table="T", driver="bench",
                      figure=Figure("bars"))  # fmt: skip
    table.rows = [TableRow("a", ["what=linear"], published="a")]
    load = {"sm_mhz": 1410.0, "watts": None}
    run = finished_run("a", 0, 1.0, metrics={"speed": 1.25, **load})
    del run.result["corpus"], run.result["config"]["impl"]
    run.result["config"]["sustained_s"] = 2.0
    rendered = render(table, "full", [run])
    assert body(rendered) == ["| a | paper | 1.500x |", "| | ours | 1.250x |"]
    told = "\n".join(rendered.header)
    assert "The device named below is not the paper's" in told
    assert "Device: abacus, 2 threads, torch 2.0." in told
    assert "Runs: 1 of 1, one seed (0)." in rendered.header  # nothing of deviations
    assert "Products: cpu." in rendered.header
    assert (
        "Clocks: sustained load, 2 s of the same calls before each comparison; SM clock 1,410 MHz, "
        "power not read."
    ) in rendered.header
    other = finished_run("a", 1, 1.0, metrics={"speed": 1.25, **load})
    del other.result["corpus"]
    other.result["backend"] = "cutlass; cuda, in a CUDA graph"
    other.result["config"]["sustained_s"] = 2.0
    both = render(table, "full", [run, other])
    assert [line["backend"] for line in both.per_run] == ["cpu", "cutlass; cuda, in a CUDA graph"]
    assert (
        "Products: not the same for all runs; the column backend of -runs.csv names them."
        in both.header
    )
    run.result["config"]["sustained_s"] = None  # a CPU
    assert "sustained" not in "".join(render(table, "full", [run]).header)
    bars = [(v.source, v.value) for v in values(table, rendered.summary)]
    assert bars == [("paper", 1.5), ("ours", 1.25)]
    assert draw(table, "full", [run], rendered, tmp_path / "b.png")
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")
    table.figure = Figure("none")
    assert not draw(table, "full", [run], rendered, tmp_path / "none.png")


def test_the_terminal_shows_every_cell(runs, capsys):
    render(own_table([0, 1, 2]), "smoke", runs).print()
    shown = capsys.readouterr().out
    assert "+0.50 [-0.74, +1.74]" in shown
    assert "revision c0ffeec0ffee" in shown


def test_curves_and_figure(finished_run, tmp_path):
    def log(first):
        return [
            {"step": 0, "val_loss": 9.0},
            {"step": 4, "loss": 3.0, "flip_rate": first},
            {"step": 5, "val_loss": first + 1},
        ]

    runs = [finished_run("dense", seed, 1.0, log(v)) for seed, v in enumerate([1.0, 3.0])]
    panels = ["val_loss", "flip_rate"]
    found = [(p.quantity, p.step, p.mean, p.std, p.n) for p in curves(runs, panels)]
    root2 = pytest.approx(2**0.5)
    assert found == [
        ("val_loss", 5, 3.0, root2, 2),
        ("val_loss", 10, 1.0, 0.0, 2),
        ("flip_rate", 4, 2.0, root2, 2),
    ]
    assert {p.quantity for p in curves(runs, ["flip_rate"])} == {"flip_rate"}
    path, table = tmp_path / "t.png", own_table([0, 1])
    rendered = render(table, "smoke", runs)
    assert draw(table, "smoke", runs, rendered, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    data = (tmp_path / "t-curves.csv").read_text(encoding="utf-8").splitlines()
    assert data[0] == "quantity,method,step,mean,std,n"
    assert len(data) == 1 + 3
    # The same runs again: nothing is drawn. Other runs: it is.
    path.write_bytes(b"kept")
    assert draw(table, "smoke", runs, rendered, path)
    assert path.read_bytes() == b"kept"
    assert draw(table, "smoke", runs[:1], rendered, path)
    assert path.read_bytes() != b"kept"
    assert not draw(table, "smoke", [], rendered, tmp_path / "nothing.png")


def test_curves_of_trained_models_have_panels_of_their_own(finished_run, tmp_path, monkeypatch):
    """Their steps and losses cannot be compared with those of the model they start from."""
    panels = {}
    monkeypatch.setattr(figures, "draw_figure", lambda drawn, *_: panels.update(drawn))
    log = [{"step": 5, "val_loss": 2.0}]
    dense = finished_run("dense", 0, 1.0, log)
    ast = finished_run("ste", 0, 1.0, log, init={"model.safetensors": "ab"})
    for runs in ([dense], [ast]):
        assert of_trained_models(runs) == set()
    table = own_table([0])
    draw(table, "smoke", [dense, ast], render(table, "smoke", [dense, ast]), tmp_path / "t.png")
    lines = {}
    for label, fill in panels.items():
        axes = Canvas().subplots()
        fill(axes)
        lines[label] = [line.get_label() for line in axes.get_lines()]
    assert lines == {
        "validation loss, nats, from random weights": ["dense"],
        "validation loss, nats, from a trained model": ["ste"],
    }
    data = (tmp_path / "t-curves.csv").read_text(encoding="utf-8").splitlines()
    assert [line.rpartition(",")[2] for line in data] == [
        *("starts_from", "random weights", "random weights"),
        *("a trained model", "a trained model"),
    ]


def test_the_figure_of_flip_rates_by_block(finished_run, tmp_path):
    """A block's rate is the mean over its layers, then over seeds; step 0 is left out."""
    rates = {"h.0.mlp.a": 0.2, "h.0.mlp.b": 0.4, "h.1.mlp.a": 0.1, "head": 0.5}
    runs = []
    for seed, factor in ((0, 1.0), (1, 3.0)):
        own = {f"flip_rate.{name}": factor * rate for name, rate in rates.items()}
        log = [{"step": 0, **own}, {"step": 5, "flip_rate": 0.3, **own}, {"step": 6}]
        runs.append(finished_run("dense", seed, 1.0, log=log))
    points = by_block.points(runs)
    assert [(p.quantity, p.method, p.step, p.n) for p in points] == [
        ("flip rate, dense", block, 5, 2) for block in ("h.0", "h.1", "head")
    ]
    assert [p.mean for p in points] == pytest.approx([0.6, 0.2, 1.0])
    table = dataclasses.replace(own_table([0, 1]), figure=Figure("blocks"))
    rendered = render(table, "smoke", runs)
    assert draw(table, "smoke", runs, rendered, tmp_path / "blocks.png")
    assert (tmp_path / "blocks-curves.csv").read_text().count("h.0,5,") == 1


def test_the_figure_of_two_quantities_of_a_step(finished_run, tmp_path):
    """A panel for each method that has both; the pairs beside the picture; step 0 is left out."""
    log = [
        {"step": n, "predicted_change": -0.1 * n, "actual_change": 0.1 - 0.1 * n} for n in range(4)
    ]
    runs = [
        finished_run("dense", 0, 1.0, log=[{"step": 1, "actual_change": 0.1}]),
        finished_run("S-STE", 0, 1.0, log=[*log, {"step": 4, "loss": 1.0}]),
    ]
    figure = Figure("scatter", quantities=["predicted_change", "actual_change"], distribution=True)
    table = dataclasses.replace(own_table([0]), figure=figure)
    found = scatter.pairs(runs, figure.quantities)
    assert [(p.method, p.step) for p in found] == [("S-STE", n) for n in (1, 2, 3)]
    assert (found[1].x, found[1].y) == (-0.2, -0.1)
    assert draw(table, "smoke", runs, render(table, "smoke", runs), tmp_path / "pairs.png")
    assert (
        (tmp_path / "pairs-pairs.csv").read_text().splitlines()[1].endswith(",S-STE,0,1,-0.1,0.0")
    )
    low, high = scatter.inner([-1.0, -2.0, -3.0])
    assert (low, high) == pytest.approx((-3.15, 0.15))  # 0 is always shown
    with pytest.raises(ValueError, match="a scatter has x and y"):
        dataclasses.replace(
            table, figure=Figure("scatter"), columns=COLUMNS, rows=ROWS[:0] or ROWS
        ).figure and dataclasses.replace(table, figure=Figure("scatter", quantities=["x"]))


def test_a_tier_of_smaller_widths_says_whose_sizes_the_labels_give():
    table = own_table([0], paper="slope", published_setting="large")
    told = "Sizes in labels and in the notes below are those of the tier full."
    assert told not in render(table, "smoke", []).header
    small = dataclasses.replace(table.tiers["smoke"], overrides=["batch=2", "shrink=16"])
    table = dataclasses.replace(table, tiers={"smoke": small})
    assert told in render(table, "smoke", []).header


def test_panels_of_a_unit_have_one_axis_unless_all_would_lie_at_its_foot():
    data = [
        Value("dense", "a", "paper", 9.0, 8.0, 10.0),
        Value("dense", "a", "ours", 99.0, 98.0, 100.0),
        *(Value("2:4", "a", source, n) for source, n in (("paper", 20.0), ("ours", 40.0))),
        *(Value("packing", "a", source, n) for source, n in (("paper", 1.0), ("ours", 4.9))),
        Value("speed", "a", "ours", 1.5),
    ]
    units = {"dense": "ms", "2:4": "ms", "packing": "ms", "speed": "x"}
    found = limits(data, units, from_zero=True)
    assert found["dense"] == found["2:4"] == (0.0, pytest.approx(105.0))
    assert found["packing"] == (0.0, pytest.approx(1.05 * 4.9))
    assert found["speed"] == (0.0, pytest.approx(1.05 * 1.5))
    low, high = limits(data, units, from_zero=False)["2:4"]
    assert (low, high) == (pytest.approx(8 - 4.6), pytest.approx(100 + 4.6))


@pytest.mark.parametrize("lines", [False, True])
def test_a_second_hand_value_looks_other_than_a_confirmed_one(lines):
    axes = Canvas().subplots()
    data = [
        Value("x", "a", "paper", 1.0),
        Value("x", "b", "paper (second-hand)", 2.0),
        Value("x", "a", "ours", 3.0, 2.5, 3.5),
        Value("x", "b", "ours", 4.0),
    ]
    draw_values(axes, data, lines)
    handles, labels = axes.get_legend_handles_labels()
    assert labels == ["paper", "paper (second-hand)", "ours"]
    if lines:
        assert [h.get_markerfacecolor() == "white" for h in handles] == [False, True, False]
    else:
        assert [bool(h.patches[0].get_hatch()) for h in handles] == [False, True, False]
    [whisker] = [line for line in axes.lines if line not in handles]
    assert list(whisker.get_ydata()) == [2.5, 3.5]
