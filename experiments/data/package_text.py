"""Text from a package registry: sources and documentation in pinned Python wheels.

`experiments/data/packages/train.txt` and `val.txt` are pip requirement files with the version and
SHA-256 of every wheel; the large corpus is also trained on those of `more.txt`. The held-out split
has its own packages, so that text repeated within a package cannot leak into it. The text can be
divided into prose (documentation, and the strings in triple quotes that begin a line, mostly
docstrings) and code (the rest).

The English corpus has the paragraphs of running English in these wheels, in more documentation
(`prose.txt`) and in collections of English texts (`english.txt`), each paragraph once.
"""

import csv
import hashlib
import io
import math
import re
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.support.checkpoint import sha256
from experiments.support.errors import UserError

WHEELS = ("packages", "packages_prose", "packages_code", "packages_large", "english")
PACKAGES, PROSE, CODE, LARGE, ENGLISH = WHEELS
REQUIREMENTS = Path(__file__).parent / "packages"
SUFFIXES = (".py", ".pyi", ".pyx", ".rst", ".md")
DOCUMENTATION = (".rst", ".md")
LONGEST = 200_000  # bytes; longer files are mostly tables of numbers
# A string in triple quotes, with the white space before it if it begins a line.
_STRING = re.compile(r"""(^[ \t]*)?[a-zA-Z]{0,2}(\"{3}|'{3})(.*?)\2[ \t]*""", re.M | re.S)

# A paragraph is running English if it has this many words and characters, letters and single spaces
# are this share of it, and words of the list are this share of its words.
_WORDS, _CHARACTERS, _LETTERS, _COMMON_WORDS = 20, 80, 0.85, 0.25
_WORD = re.compile(r"[A-Za-z][A-Za-z'\u2019-]*")
_COMMON = frozenset(
    _WORD.findall(
        "the of and to in a is that for it as was with be on by this are or an at from not i he "
        "his you have had but they which we if will can all"
    )
)
_HELD_OUT = 20  # one in this many documents of english.txt is held out

# Always the wheels of this platform, whatever the machine is, since only their text is read.
_GLIBC = ("2_28", "2_27", "2_24", "2_17")
_PLATFORMS = (*(f"manylinux_{v}_x86_64" for v in _GLIBC), "manylinux2014_x86_64", "any")
_PINNED = re.compile(r"([\w.-]+)==(\S+) --hash=sha256:([0-9a-f]{64})")


def requirements(split: str, part: str = PACKAGES) -> list[Path]:
    """The requirement files of a split."""
    more = {
        ("train", LARGE): ("more",),
        ("train", ENGLISH): ("more", "prose", "english"),
        ("val", ENGLISH): ("english",),
    }
    return [REQUIREMENTS / f"{name}.txt" for name in (split, *more.get((split, part), ()))]


def pinned(split: str, part: str = PACKAGES) -> list[tuple[str, str, str]]:
    """(name, version, sha256) of every wheel of a split, in the order of its files."""
    texts = [file.read_text(encoding="utf-8") for file in requirements(split, part)]
    lines = "\n".join(texts).splitlines()
    return [(m[1], m[2], m[3]) for line in lines if (m := _PINNED.fullmatch(line))]


def requirements_hash(part: str = PACKAGES) -> str:
    """A hash of the requirement files and of the rules by which wheels are read, 8 hex digits."""
    rules = f"{SUFFIXES} {LONGEST} {[pinned(split, part) for split in ('train', 'val')]}"
    if part in (PROSE, CODE):
        rules += f" {_STRING.pattern}"
    if part == ENGLISH:
        numbers = _WORDS, _CHARACTERS, _LETTERS, _COMMON_WORDS, _HELD_OUT
        rules += f" {_STRING.pattern} {numbers} {sorted(_COMMON)}"
    return hashlib.sha256(rules.encode()).hexdigest()[:8]


def download(folder: Path, split: str, part: str = PACKAGES) -> list[Path]:
    """The paths of a split's wheels in `folder`; pip downloads those that are missing."""
    wanted = {digest: f"{name}=={version}" for name, version, digest in pinned(split, part)}
    found = _by_hash(folder)
    if not wanted.keys() <= found.keys():
        folder.mkdir(parents=True, exist_ok=True)
        options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--require-hashes"]
        options += ["--only-binary=:all:", "--implementation=cp", "--python-version=3.12"]
        options += [f"--platform={platform}" for platform in _PLATFORMS]
        files = requirements(split, part)
        options += [word for file in files for word in ("-r", str(file))]
        command = [sys.executable, "-m", "pip", "download", *options, "-d", folder]
        ran = subprocess.run(command, stderr=subprocess.PIPE, text=True)  # type: ignore[arg-type]
        found = _by_hash(folder)
        if absent := [name for digest, name in wanted.items() if digest not in found]:
            said = [line for line in ran.stderr.splitlines() if line.strip()]
            reason = next((line for line in said if line.startswith("ERROR")), "".join(said[-1:]))
            raise UserError(
                f"pip could not download {absent[0]} and {len(absent) - 1} more of "
                f"{', '.join(map(str, files))} into {folder} ({reason}); start again, or put the "
                "wheels there"
            )
    return [found[digest] for digest in wanted]


def _by_hash(folder: Path) -> dict[str, Path]:
    """The wheels in `folder` by their SHA-256; a wheel counts by its content, not by its name."""
    return {sha256(path): path for path in sorted(folder.glob("*.whl"))}


def _texts(
    wheel: Path, suffixes: tuple[str, ...], longest: float = math.inf
) -> Iterator[tuple[str, str]]:
    """The names and texts of a wheel's UTF-8 files with these endings and up to `longest` bytes."""
    with zipfile.ZipFile(wheel) as archive:
        for info in archive.infolist():
            if info.filename.endswith(suffixes) and info.file_size <= longest:
                try:
                    text = archive.read(info).decode("utf-8")
                except UnicodeDecodeError:
                    continue
                yield info.filename, text


def _order(wheel: Path, name: str) -> bytes:
    """A hash to order documents by, so that the first ones are a sample of all packages."""
    return hashlib.sha256(f"{wheel.name.partition('-')[0]}/{name}".encode()).digest()


def read(wheels: list[Path], part: str = PACKAGES) -> list[str]:
    """The text files in the wheels, or what they have of a part, each once and in a fixed order."""
    texts: dict[bytes, tuple[bytes, str]] = {}
    for wheel in wheels:
        for name, text in _texts(wheel, SUFFIXES, LONGEST):
            if own := _part(text, name.endswith(DOCUMENTATION), part):
                known = hashlib.sha256(text.encode()).digest()
                texts.setdefault(known, (_order(wheel, name), own))
    return [text for _, text in sorted(texts.values())]


def english(folder: Path) -> dict[str, list[str]]:
    """The paragraphs of running English in the wheels of both splits, by file or row of a table,
    ordered as `read` orders them. A paragraph that is in both splits is only in the held-out one.
    """
    divided = {digest for *_, digest in pinned("english")}  # the others are in one split as a whole
    seen: set[bytes] = set()
    documents = {}
    for split in ("val", "train"):
        found = []
        wheels = download(folder, split, ENGLISH)
        for wheel, (*_, digest) in zip(wheels, pinned(split, ENGLISH), strict=True):
            for name, text in _documents(wheel):
                order = _order(wheel, name)
                held_out = int.from_bytes(order, "big") % _HELD_OUT == 0
                if digest in divided and held_out != (split == "val"):
                    continue
                kept = []
                parts = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
                for paragraph in filter(is_english, parts):
                    known = hashlib.sha256(paragraph.encode()).digest()
                    if known not in seen:
                        seen.add(known)
                        kept.append(paragraph)
                if kept:
                    found.append((order, "\n\n".join(kept)))
        documents[split] = [text for _, text in sorted(found)]
    return documents


def _documents(wheel: Path) -> Iterator[tuple[str, str]]:
    """The names and texts of what may hold English in a wheel: documentation, strings in triple
    quotes, plain text, and the longest cell of each row of a table."""
    for name, text in _texts(wheel, (*SUFFIXES, ".txt", ".tab")):
        if name.endswith(".tab"):
            for number, row in enumerate(csv.reader(io.StringIO(text), delimiter="\t")):
                yield f"{name}:{number}", max(row, key=len, default="")
        elif name.endswith((*DOCUMENTATION, ".txt")):
            yield name, text
        else:
            yield name, "\n\n".join(string[3] for string in _STRING.finditer(text))


def is_english(paragraph: str) -> bool:
    """Return True if a paragraph is running English, not code, a table, a list or another language,
    by the share of letters in it and of very common words."""
    words = _WORD.findall(paragraph)
    if len(words) < _WORDS or len(paragraph) < _CHARACTERS:
        return False
    common = sum(word.lower() in _COMMON for word in words)
    letters = sum(map(len, words)) + len(words)
    return letters > _LETTERS * len(paragraph) and common > _COMMON_WORDS * len(words)


def _part(text: str, documentation: bool, part: str) -> str:
    """The prose of a file, or its code, the file without it; for another part all of it."""
    if part not in (PROSE, CODE):
        return text
    if documentation:
        return text if part == PROSE else ""
    if part == CODE:
        return _STRING.sub(lambda string: "" if string[1] is not None else string[0], text)
    strings = (string for string in _STRING.finditer(text) if string[1] is not None)
    alone = (string[3].partition("\n") for string in strings)
    plain = (f"{first}\n{textwrap.dedent(rest)}".strip() for first, _, rest in alone)
    return "\n\n".join(filter(None, plain))


def description(split_texts: dict[str, list[str]], part: str = PACKAGES) -> dict[str, Any]:
    """The manifest's entry for the source, with every package and its hash."""
    said = {PROSE: ": documentation and docstrings", CODE: ", without their docstrings"}
    text = f"{', '.join(SUFFIXES)} files of up to {LONGEST:,} bytes in pinned wheels"
    text += said.get(part, "")
    split_rule = "by package: those of val.txt are held out"
    if part == ENGLISH:
        text = "paragraphs of running English in pinned wheels, each once"
        split_rule += f", and one in {_HELD_OUT} documents of english.txt"
    return {
        "description": text,
        "split": split_rule,
        "characters": {split: sum(map(len, texts)) for split, texts in split_texts.items()},
        "packages": {
            split: [f"{name}=={version} sha256:{sha}" for name, version, sha in pinned(split, part)]
            for split in split_texts
        },
    }
