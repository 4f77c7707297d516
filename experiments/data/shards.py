"""Token files of a split (shards): writing them, resuming after an interrupt, and reading them as
one array.

`train-00000.bin`, `train-00001.bin`, ... hold whole documents in order; every file except the last
has at least `data.shard_tokens` tokens. The boundaries of files change neither the samples nor the
hash of the split, which covers all its tokens.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.data.corpus_source import Documents
from experiments.data.manifest import SPLITS, file_record, token_type
from experiments.support.checkpoint import exclusive, write_atomic, write_text

if TYPE_CHECKING:
    import tiktoken
    from rich.progress import Progress

    from experiments.data.tokenizer import HFTokenizer

HELD_OUT = 100  # at least one in this many tokens of the user's own text is for validation
_BEGUN = "begun.json"


class TokenFiles:
    """Several arrays read as if concatenated: `files[first:last]` is a slice of the whole."""

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self.arrays = arrays
        self.ends = np.cumsum([len(part) for part in arrays])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, entries: slice) -> np.ndarray:
        first, last, _ = entries.indices(len(self))
        pieces = [self.arrays[0][:0]]
        for index in range(int(np.searchsorted(self.ends, first, side="right")), len(self.ends)):
            begin = int(self.ends[index]) - len(self.arrays[index])
            if begin >= last:
                break
            pieces.append(self.arrays[index][max(0, first - begin) : last - begin])
        return pieces[1] if len(pieces) == 2 else np.concatenate(pieces)


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A progress bar on standard error: documents done, their number, elapsed and
    remaining time."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        *Progress.get_default_columns()[:2],
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        yield progress


@contextmanager
def building_shards(directory: Path) -> Iterator[Path]:
    """A context with the folder beside `directory` in which its shards are written, locked against
    other processes. It stays if the preparation ends early, so that the next one continues there.

    Raises:
        UserError: another process is using it.
    """
    building = directory.with_name(f".{directory.name}.shards")
    with exclusive(building):
        yield building


def go_on(building: Path, made_of: dict[str, Any]) -> None:
    """Remove the shards in `building` unless they were made with the same settings `made_of`."""
    text = json.dumps(made_of, indent=2, sort_keys=True) + "\n"
    begun = building / _BEGUN
    if not begun.is_file() or begun.read_text(encoding="utf-8") != text:
        for path in building.iterdir():
            if path.suffix in (".bin", ".npy"):
                path.unlink()
        write_text(begun, text)


def write_shards(
    building: Path,
    name: str,
    source: Documents,
    encoding: tiktoken.Encoding | HFTokenizer,
    least: int,
) -> dict[str, dict[str, Any]]:
    """Encode every split into shards of at least `least` tokens, continuing after existing ones;
    return the manifest's entries for the splits."""
    with progress_bar() as progress:
        for split in SPLITS:
            sizes = [len(np.load(_sizes(path), mmap_mode="r")) for path in _whole(building, split)]
            done = sum(sizes)
            task = progress.add_task(
                f"{name} {split}", total=source.documents[split], completed=done
            )
            documents = _encoded(source, split, done, encoding)
            for number in itertools.count(len(sizes)):
                if (first := next(documents, None)) is None:
                    break
                path = building / f"{split}-{number:05d}.bin"
                rest = itertools.chain([first], documents)
                progress.advance(task, _write_shard(path, rest, least))
    files = {split: _whole(building, split) for split in SPLITS}
    if source.own:
        _hold_out(building, files, token_type(encoding.n_vocab))
    return {split: _record(paths) for split, paths in files.items()}


def remove_unnamed(directory: Path, manifest: dict[str, Any]) -> None:
    """Remove the files in `directory` that the manifest does not name, which only the preparation
    needed, unless that was done already."""
    if not (directory / _BEGUN).exists():
        return
    shards = [shard for split in SPLITS for shard in manifest["splits"][split]["shards"]]
    kept = {shard["file"] for shard in shards}
    for path in directory.iterdir():
        if path.suffix == ".npy" or (path.suffix == ".bin" and path.name not in kept):
            path.unlink()
    (directory / _BEGUN).unlink()


def _sizes(path: Path) -> Path:
    """The path of the file beside a shard with each document's number of tokens and bytes of text,
    int64 [documents, 2]. It is written after the shard, so its presence marks the shard as
    complete.
    """
    return path.with_suffix(".npy")


def _whole(building: Path, split: str) -> list[Path]:
    numbered = (building / f"{split}-{number:05d}.bin" for number in itertools.count())
    return list(itertools.takewhile(lambda p: p.is_file() and _sizes(p).is_file(), numbered))


def _encoded(
    source: Documents, split: str, first: int, encoding: tiktoken.Encoding | HFTokenizer
) -> Iterator[tuple[np.ndarray, int]]:
    """Yield (tokens with end-of-text, bytes of text) for each document from number `first` on."""
    dtype = token_type(encoding.n_vocab)
    for documents in source.batches(split, first):
        encoded = encoding.encode_ordinary_batch(documents, num_threads=os.cpu_count() or 1)
        for document, ids in zip(documents, encoded, strict=True):
            yield np.array([*ids, encoding.eot_token], dtype=dtype), len(document.encode("utf-8"))


def _write_shard(path: Path, documents: Iterator[tuple[np.ndarray, int]], least: int) -> int:
    """Write documents until the shard has `least` tokens; return the number of documents."""
    sizes = array("Q")
    count = 0

    def write(temporary: Path) -> None:
        nonlocal count
        with temporary.open("wb") as file:
            for tokens, size in documents:
                file.write(tokens.tobytes())
                sizes.extend((len(tokens), size))
                count += len(tokens)
                if count >= least:
                    return

    write_atomic(path, write)
    return _write_sizes(path, np.array(sizes, dtype=np.int64).reshape(-1, 2))


def _write_sizes(path: Path, sizes: np.ndarray) -> int:
    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:
            np.save(file, sizes)

    write_atomic(_sizes(path), write)
    return len(sizes)


def _hold_out(building: Path, files: dict[str, list[Path]], dtype: np.dtype) -> None:
    """Move the first training documents to validation until that has 1 % of all tokens; the last
    training document stays. It updates `files` and writes new shards, but keeps the old ones in
    case the process is killed."""
    tokens = {s: [int(np.load(_sizes(p))[:, 0].sum()) for p in files[s]] for s in SPLITS}
    held = sum(tokens["val"])
    missing = -(-(held + sum(tokens["train"])) // HELD_OUT) - held
    if missing <= 0:
        return
    moved = building / "val-held.bin"
    sizes: list[np.ndarray] = []
    with moved.open("wb") as to:
        while missing > 0:
            path = files["train"][0]
            own = np.load(_sizes(path))
            ends = np.cumsum(own[:, 0])
            count = min(int(np.searchsorted(ends, missing)) + 1, len(own))
            if len(files["train"]) == 1:
                count = min(count, len(own) - 1)
            if not count:
                break
            cut = int(ends[count - 1]) * dtype.itemsize
            with path.open("rb") as file:
                to.write(file.read(cut))
                files["train"].pop(0)
                if count < len(own):
                    rest = path.with_stem(f"{path.stem}-rest")
                    with rest.open("wb") as kept:
                        shutil.copyfileobj(file, kept)
                    _write_sizes(rest, own[count:])
                    files["train"].insert(0, rest)
                    missing = 0
            sizes.append(own[:count])
            missing -= int(ends[count - 1])
    if sizes:
        _write_sizes(moved, np.concatenate(sizes))
        files["val"].append(moved)


def _record(paths: Sequence[Path]) -> dict[str, Any]:
    """The manifest's entry for a split."""
    stream = hashlib.sha256()
    sizes = [np.load(_sizes(path)).sum(0) for path in paths]
    shards = [
        {**file_record(path, stream), "tokens": int(tokens)}
        for path, (tokens, _) in zip(paths, sizes, strict=True)
    ]
    return {
        "shards": shards,
        "bytes": sum(shard["bytes"] for shard in shards),
        "sha256": stream.hexdigest(),
        "tokens": sum(shard["tokens"] for shard in shards),
        "documents": sum(len(np.load(_sizes(path), mmap_mode="r")) for path in paths),
        "text_bytes": int(sum(size for _, size in sizes)),
    }
