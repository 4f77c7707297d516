"""`python -m reproduce`: arguments, and one table from the first command to the last file."""

import csv
import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

from experiments.support.errors import UserError
from reproduce import __main__ as command
from reproduce import make, quickstart
from reproduce.__main__ import main
from reproduce.execute.queue import execute
from reproduce.make import Made
from reproduce.specs.table import read_tables


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["table99"], "error: no table or command 'table99'; table9 may be meant; python -m repro"),
        (["pack", "x"], "error: cannot use 'x'; there are no options"),
        (["claims", "8", "9"], "cannot use 'claims 8 9'; use claims, claims N or claims all"),
        (["table2", "paper=nobody"], "no table2 of paper 'nobody'; there is ast, fst, slope, sste"),
        (["figure6"], "error: figure 6 of paper=fst is not covered: a diagram\n"),
        (["quickstart", "paper=sste"], "it is this project's own"),
        (["quickstart", "tier=huge"], "error: no tier 'huge' of quickstart; choose of smoke"),
        (["table2", "tier="], "error: cannot use 'tier='"),
        (["table2", "tier=smoke", "tier=mini"], "error: cannot use 'tier=mini'"),
        (["quickstart", "train.steps=3"], "error: cannot use 'train.steps=3'"),
        (["quickstart", "rows=3"], "error: cannot use 'rows=3'"),
        (["table2", "rows=all"], "error: cannot use 'rows=all'"),
        (["quickstart", "launch=torchrun", "per_gpu=1"], "launch= gives every run all GPUs"),
        (["quickstart", "per_gpu=0"], "per_gpu=0: it must be a positive number"),
        (["quickstart", "launch=torchrum -n 2"], "there is no command 'torchrum' here"),
    ],
)
def test_arguments_that_mean_nothing(arguments, message, capsys, tmp_path):
    assert main(arguments, runs=tmp_path) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert captured.out == ""


def test_a_table_is_listed_alone(capsys):
    for arguments, papers in ((["table2"], 5), (["table2", "paper=sste"], 1), (["quickstart"], 0)):
        assert main([*arguments, "--list"]) == 0
        listed = capsys.readouterr().out
        assert set(re.findall(r"(\w+) tier=", listed)) == {arguments[0]}
        assert listed.count("(paper=") == papers
    assert main(["table99", "--list"]) == 2
    assert main(["--list", "table99"]) == 2
    assert "error: no table or command 'table99'" in capsys.readouterr().err


def test_usage_errors_come_before_torch():
    """They are immediate: nothing heavy is imported for them."""
    code = (
        "import sys; from reproduce.__main__ import main; status = main(['table99']); "
        "sys.exit(status if not {'torch', 'matplotlib'} & set(sys.modules) else 99)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 2


def test_a_reader_who_has_left_is_no_error():
    """`python -m reproduce --help | head -3` has such a reader."""
    read, write = os.pipe()
    os.close(read)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    words = [sys.executable, "-m", "reproduce", "--help"]
    done = subprocess.run(words, stdout=write, stderr=subprocess.PIPE, env=environment)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


SPEC = """
title: Tiny
tiers:
  smoke:
    setting: Nothing to learn from.
    seeds: [5]
    overrides:
      - model.n_layer=1
      - model.n_embd=32
      - model.n_head=2
      - model.block_size=16
      - train.steps=4
      - train.warmup_steps=1
      - train.batch_size=2
      - train.log_every=1
      - train.eval_every=2
      - train.eval_samples=2
      - data.root={root}
      - data.vocab_size=300
      - impl.threads=1
rows:
  - {{label: dense, overrides: [method=dense]}}
  - {{label: S-STE, overrides: [method=s_ste]}}
columns:
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """The folder in which the first of these tests prepares the embedded corpus."""
    return tmp_path_factory.mktemp("data")


def test_a_table_from_nothing(corpus, tmp_path, capsys):
    """Real trainings on the embedded corpus, with every column that the quickstart shows."""
    folder, runs = tmp_path / "tables", tmp_path / "runs"
    folder.mkdir()
    shown = next(t for t in read_tables() if t.name == "quickstart")
    columns = [
        f"  - {{label: {c.label}, value: {c.value}, show: {c.show}, format: '{c.format}'}}\n"
        for c in shown.columns
    ]
    text = SPEC.format(root=corpus) + "".join(columns)
    (folder / "tiny.yaml").write_text(text, encoding="utf-8")

    assert main(["--list"], folder, runs) == 0
    assert "tiny tier=smoke: not made" in capsys.readouterr().out
    assert main(["tiny"], folder, runs) == 0
    assert "2 runs: 0 done already, 2 to do" in capsys.readouterr().out
    written = {path.name for path in (runs / "tables").iterdir()}
    stem = "tiny-smoke"
    assert written == {
        f"{stem}.md", f"{stem}.csv", f"{stem}-runs.csv", f"{stem}.png", f"{stem}-curves.csv",
        f"{stem}.json",
    }  # fmt: skip
    with (runs / "tables" / f"{stem}-runs.csv").open(encoding="utf-8") as file:
        dense, sparse = csv.DictReader(file)
    assert (dense["method"], dense["seed"], dense["sparsity.density"]) == ("dense", "5", "1.0")
    assert sparse["method"] == "S-STE"
    assert float(sparse["sparsity.density"]) <= 0.5
    assert sparse["sparsity.illegal_groups"] == "0"

    assert main(["--list"], folder, runs) == 0
    assert "tiny tier=smoke: 2 of 2 runs done at the last call" in capsys.readouterr().out
    before = (runs / "tables" / f"{stem}.md").read_bytes()
    assert main(["tiny"], folder, runs) == 0
    assert "2 runs: 2 done already, 0 to do" in capsys.readouterr().out
    assert (runs / "tables" / f"{stem}.md").read_bytes() == before


def test_the_quickstart_prints_a_line_for_each_row(corpus, tmp_path, capsys, monkeypatch):
    """Its runs are made here, not side by side, which tests/reproduce/test_engine.py has."""
    launches = []
    here = partial(execute, launch=None)
    monkeypatch.setattr(quickstart, "execute", lambda *a: launches.append(a[-1]) or here(*a[:-1]))
    table = next(t for t in read_tables() if t.name == "quickstart")
    smoke = table.tiers["smoke"]
    short = ["train.steps=2", "train.warmup_steps=1", f"data.root={corpus}"]
    smoke = replace(smoke, rows=["dense", "S-STE"], overrides=[*smoke.overrides, *short])
    assert quickstart.main(replace(table, tiers={"smoke": replace(smoke, seeds=[0, 1])}), tmp_path)
    assert [one.words for one in launches] == [()] and launches[0].per_gpu >= 1
    told = capsys.readouterr().out
    assert "4 runs: 0 done already, 4 to do" in told
    (dense,) = re.findall(r"^dense +(\d\.\d{4})$", told, re.M)
    ((loss, above, low, high),) = re.findall(
        r"^S-STE +(\d\.\d{4}) +([+-]\S+) \[(\S+), (\S+)\]$", told, re.M
    )
    assert float(above) == pytest.approx(float(loss) - float(dense), abs=1.5e-4)
    assert float(low) < float(above) < float(high)
    assert (tmp_path / "tables" / "quickstart-smoke.png").exists()


def test_a_table_that_cannot_be_planned_stops_no_other(tmp_path, capsys, monkeypatch):
    """`table2` of two papers: the first has a row that does not compose."""
    made = []
    monkeypatch.setattr(make, "make", lambda table, *_: made.append(table.name) or table.bad())
    tables = [SimpleNamespace(name=n, command="table2", paper=n, tiers=["smoke"], bad=b)
              for n, b in (("a", refuse), ("b", Made))]  # fmt: skip
    monkeypatch.setattr(command, "read_tables", lambda folder: tables)
    assert main(["table2"], tmp_path, tmp_path) == 1
    assert made == ["a", "b"]
    assert capsys.readouterr().err == "error: it does not fit\n"


def refuse():
    raise UserError("it does\nnot fit")


def test_a_tier_for_a_gpu_without_one_draws_what_was_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["table10", "paper=sste", "tier=full"], runs=tmp_path) == 1
    captured = capsys.readouterr()
    _, _, reason, drawn, where = captured.out.splitlines()
    assert reason.startswith("nothing is run: a GPU is needed") and captured.err == ""
    assert where == "measured: reproduce/measured/h200/sste_table10-full.md"
    stem = tmp_path / "tables" / "sste_table10-full"
    assert drawn == f"drawn: {stem}.png" and stem.with_suffix(".png").is_file()
    assert sorted(path.suffix for path in stem.parent.iterdir()) == [".csv", ".png"]
