"""`python -m reproduce`: arguments, one table from the first command to the last file, and all."""

import csv
import json
import os
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial

import pytest

from experiments.support.errors import Terminated
from reproduce import quickstart
from reproduce.__main__ import main, parse
from reproduce.execute.queue import execute
from reproduce.make import Made, make_all
from reproduce.render.report import page
from reproduce.specs.reading import read_yaml
from reproduce.specs.table import TABLES, read_tables


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["table99"], "error: no table or command 'table99'; table9 may be meant; python -m repro"),
        (["pack", "x"], "error: cannot use 'x'; there are no options"),
        (["run"], "no block is named: python -m reproduce run BLOCK"),
        (["run", "t", "minutes=nan"], "minutes=nan: it must be a positive number"),
        (["claims", "8", "9"], "cannot use 'claims 8 9'; use claims, claims N or claims all"),
        (["table2", "paper=nobody"], "no table2 of paper 'nobody'; there is ast, fst, slope, sste"),
        (["figure6"], "error: figure 6 of paper=fst is not covered: a diagram\n"),
        (["quickstart", "tier=huge"], "error: no tier 'huge' of quickstart; choose of smoke"),
        (["quickstart", "train.steps=3"], "error: cannot use 'train.steps=3'"),
        (["quickstart", "launch=torchrun", "per_gpu=1"], "launch= gives every run all GPUs"),
        (["table2", "paper=sste", "tier=mini", "seeds=9"], "are those of a block"),
    ],
)
def test_arguments_that_mean_nothing(arguments, message, capsys, tmp_path):
    assert main(arguments, runs=tmp_path) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert captured.out == ""


def test_a_table_is_made_with_other_seeds():
    words = ["table1", "paper=slope", "tier=full", "seeds=10"]
    (table,), tier, _ = parse(words, read_tables(TABLES))
    assert {seed for _, _, seed in table.trainings(tier)} == {*range(10)}


def test_a_table_is_listed_alone(capsys):
    for arguments, papers in ((["table2"], 5), (["table2", "paper=sste"], 1), (["quickstart"], 0)):
        assert main([*arguments, "--list"]) == 0
        listed = capsys.readouterr().out
        assert set(re.findall(r"(\w+) tier=", listed)) == {arguments[0]}
        assert listed.count("(paper=") == papers


def test_a_reader_who_has_left_is_no_error():
    """`python -m reproduce --help | head -3` has such a reader."""
    read, write = os.pipe()
    os.close(read)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    words = [sys.executable, "-m", "reproduce", "--help"]
    done = subprocess.run(words, stdout=write, stderr=subprocess.PIPE, env=environment)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


SHORT = """model.n_layer=1 model.n_embd=32 model.n_head=2 model.block_size=16 train.steps=4
train.warmup_steps=1 train.batch_size=2 train.log_every=1 train.eval_every=2 train.eval_samples=2
data.vocab_size=300 impl.threads=1"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """The folder in which the first of these tests prepares the embedded corpus."""
    return tmp_path_factory.mktemp("data")


def test_a_table_from_nothing(corpus, tmp_path, capsys):
    """Real trainings on the embedded corpus, with every column that the quickstart shows."""
    folder, runs = tmp_path / "tables", tmp_path / "runs"
    folder.mkdir()
    spec = read_yaml(TABLES / "quickstart.yaml")
    smoke = {"setting": "Tiny.", "seeds": [5], "overrides": [*SHORT.split(), f"data.root={corpus}"]}
    rows = [{"label": name, "overrides": [f"method={name}"]} for name in ("dense", "s_ste")]
    spec |= {"tiers": {"smoke": smoke}, "rows": rows}
    (folder / "tiny.yaml").write_text(json.dumps(spec), encoding="utf-8")  # JSON is YAML

    assert main(["--list"], folder, runs) == 0
    assert "tiny tier=smoke: not made" in capsys.readouterr().out
    assert main(["tiny"], folder, runs) == 0
    assert "2 runs: 0 done already, 2 to do" in capsys.readouterr().out
    written, stem = {path.name for path in (runs / "tables").iterdir()}, "tiny-smoke"
    ends = ".md .csv -runs.csv .png -curves.csv .json"
    assert written == {f"{stem}{end}" for end in ends.split()}
    with (runs / "tables" / f"{stem}-runs.csv").open(encoding="utf-8") as file:
        dense, sparse = csv.DictReader(file)
    assert (dense["method"], dense["seed"], dense["sparsity.density"]) == ("dense", "5", "1.0")
    assert sparse["method"] == "s_ste"
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


NAMES = ["one", "two", "three", "four"]


@pytest.fixture
def make(small, monkeypatch, tmp_path):
    """make(**the end of each table by name, if it is not complete) -> (whether all are, the names
    of those that were asked for, the summary). The last of four tables has no such tier."""
    tables = [small(name=name, paper="fst", number=str(n)) for n, name in enumerate(NAMES, 1)]
    tables[3].tiers["smoke"].unavailable = "nobody has the data"
    monkeypatch.setattr(page, "main", lambda runs: print("the page"))

    def made(**ends):
        order = []

        def ended(table, *_):
            order.append(table.name)
            found = ends.get(table.name, Made(2, 2))
            if isinstance(found, BaseException):
                raise found
            return found

        monkeypatch.setattr("reproduce.make.make", ended)
        done = None
        with suppress(Terminated):
            done = make_all(tables, "smoke", tmp_path)
        return done, order, (tmp_path / "tables" / "all-smoke.md").read_text()

    return made


def test_all_tables_and_the_page(make, capsys):
    done, order, summary = make()
    told = capsys.readouterr().out
    assert done is True and order == ["one", "two", "three"]
    assert told.index("[3/3] three") < told.index("the page") < told.index("3 of 3 complete")
    assert summary in told and "| one   | complete | 2 of 2 |     0.0 |" in summary


def test_what_fails_holds_nothing_up_and_what_is_interrupted_is_kept(make):
    failed, bug = Made(reason="it does not fit"), RuntimeError("a\nbug")
    done, _, text = make(one=failed, two=bug, three=Made(5, 3))
    found = [line.split("|")[2].strip() for line in text.splitlines() if "|" in line][2:]
    assert not done and found == ["failed", "failed", "incomplete"]
    assert "- two: RuntimeError: a bug\n" in text and "0 of 3 complete" in text
    assert "| 3 of 5 |" in text
    done, _, text = make(two=Terminated())
    assert done is None and "1 of 3 complete" in text and "two" not in text


def test_it_asks_for_the_papers_tables():
    tables = read_tables()
    chosen, tier, launch = parse(["all"], tables)
    assert {t.name for t in chosen} == {t.name for t in tables if t.paper}
    assert (tier, launch) == ("smoke", None)
    assert {t.paper for t in parse(["all", "paper=ast"], tables)[0]} == {"ast"}
