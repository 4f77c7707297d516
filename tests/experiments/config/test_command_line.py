"""`--help` of every driver, and what is told apart before hydra reads the command line."""

import importlib
import re
import subprocess
import sys

import pytest
from omegaconf import OmegaConf

from experiments import bench
from experiments.bench.__main__ import parser
from experiments.config import command_line
from experiments.config.command_line import comments, parse
from experiments.support.errors import UserError
from reproduce.__main__ import USAGE

DRIVERS = {
    "pretrain": {"model", "data", "method", "train", "impl", "experiment"},
    "dino": {"dino", "model", "data", "method", "train", "impl", "experiment"},
    "distill": {"model", "data", "method", "train", "impl", "experiment"},
    "find_decay": {"model", "data", "method", "train", "impl", "experiment"},
    "prepare_data": {"data"},
    "finetune": {"recipe", "impl"},
    "evaluate": {"impl"},
    "generate": {"impl"},
    "export": set(),
}


def shown(capsys, monkeypatch, driver, *arguments):
    module = importlib.import_module(f"experiments.{driver}")
    monkeypatch.setattr(sys, "argv", [f"{driver}.py", *arguments])
    module.main()
    out, err = capsys.readouterr()
    assert err == ""
    return module, out


def test_help_describes_the_driver(capsys, monkeypatch):
    for driver, groups in DRIVERS.items():
        module, out = shown(capsys, monkeypatch, driver, "--help")
        assert max(map(len, out.splitlines())) < 80
        usage, example, _, does = out.splitlines()[:4]
        assert usage.startswith(f"usage:   python -m experiments.{driver} [KEY=VALUE ...]")
        assert example.startswith(f"example: python -m experiments.{driver}")
        assert module.__doc__.startswith(does.removesuffix("."))
        assert set(re.findall(r"^(\w+)=\w+, one of: ", out, re.M)) == groups
        if driver != "prepare_data":
            # Each option of its own file is there, and says what it is.
            own = OmegaConf.load(command_line.CONF / f"{driver}.yaml")
            for key in own.keys() - groups - {"defaults", "hydra"}:
                for name in own[key] if OmegaConf.is_dict(own[key]) else [""]:
                    option = re.escape(f"{key}.{name}".removesuffix("."))
                    assert re.search(rf"^  {option}=\S*\s+\w", out, re.M), option


def test_help_shows_the_choice_that_is_named(capsys, monkeypatch):
    _, out = shown(capsys, monkeypatch, "pretrain", "method=sr_ste", "train.steps=7", "-h")
    assert re.search(r"^method=sr_ste, one of: ast bi_mask dense ", out, re.M)
    assert "\n  method.decay_on=gradients   the decay acts on: gradients | weights\n" in out
    assert "\n  train.steps=7               number of optimizer steps\n" in out
    # A file in a folder, made from one that is not in one.
    _, out = shown(capsys, monkeypatch, "pretrain", "method=released/slope", "-h")
    assert re.search(r"^method=released/slope, one of: ast bi_mask dense ", out, re.M)
    assert "\n  method.mask=random          random | magnitude; the mask is chosen once\n" in out


def test_a_reader_that_has_enough_of_the_help_is_told_nothing():
    command = f"{sys.executable} -m experiments.evaluate --help"
    done = subprocess.run(
        f"({command}; echo $? >&2) | true", shell=True, capture_output=True, text=True, check=False
    )
    assert done.stderr == "141\n"


def test_help_of_a_choice_that_does_not_exist_is_one_line(capsys, monkeypatch):
    with pytest.raises(SystemExit, match=r"there is no method=nothing; there is ast, "):
        shown(capsys, monkeypatch, "pretrain", "method=nothing", "--help")


def test_commands_without_hydra_fit_as_well(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert bench.__name__ in parser().format_help()
    assert max(map(len, [*parser().format_help().splitlines(), *USAGE.splitlines()])) <= 80


def test_comments_of_nested_and_inherited_options(tmp_path):
    (tmp_path / "base.yaml").write_text("a: 1  # one\nb: 2  # two\n")
    (tmp_path / "file.yaml").write_text(
        "# of the file\ndefaults: [base, /other@x: y, _self_]\n"
        "b: 3  # three, and\n      # more\nc:\n  d: '#'  # four\n  e: 5\n# alone\n"
    )
    found = comments(tmp_path / "file.yaml")
    assert found == {"a": "one", "b": "three, and more", "c.d": "four"}


def test_texts_are_taken_out_as_they_are():
    typed = ["a=1", "--x", "- y=2", "y=--3=[4", "-m", "~b", "--cfg", "job", "--resolve"]
    given = parse(typed, ["x", "y", "z"])
    assert (given.x, given.y, given.z) == ("- y=2", "--3=[4", None)
    assert given.hydra == ["--multirun", "--resolve", "--cfg", "job"]
    assert given.overrides == ["a=1", "~b"]
    for wrong in (["--x"], ["x=1", "--x=2"], ["x=\udcff"]):
        with pytest.raises(UserError, match="x"):
            parse(wrong, ["x"])


def test_a_flag_that_is_not_ours_is_one_line_without_hydra_s_usage(capsys, monkeypatch):
    for flag in ["--info", "--inf", "--cfg=none", "--multirun=x"]:
        with pytest.raises(SystemExit, match=r"^error: [^\n]*--[^\n]*; see --help$"):
            shown(capsys, monkeypatch, "pretrain", flag)
        assert capsys.readouterr() == ("", "")
