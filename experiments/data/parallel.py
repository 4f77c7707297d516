"""Sentences in two languages, read from text files, Parquet files or the embedded numbers.

The source is a folder of text files with one sentence per line (`train.en` and `train.de`, `val.*`,
`test.*`); a folder of Parquet files as WMT14 has them on the hub (`train-*`, `validation-*`,
`test-*`), with a column `translation` of both languages; such a folder on the hub; or the numbers.

These are German numbers and their English translations, a task that needs no files:

    zweihundertvierunddreißigtausendfünf    two hundred thirty-four thousand five

A German number is one word with the ones before the tens, so a model must learn to split it and to
change the order. The numbers are below a million, chosen by a hash; the splits are disjoint.
"""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

from experiments.data.manifest import HUB, NUMBERS, DataConfig, Documents, not_utf8
from experiments.support import hub
from experiments.support.errors import UserError, check_installed, first_line
from experiments.support.names import check_bounds

Pair = tuple[str, str]

# The three splits, as the hub's files are named.
SPLITS = {"train": "train", "val": "validation", "test": "test"}
_BATCH = 128  # pairs


@dataclass(frozen=True)
class PairsConfig(DataConfig):
    """Settings of pairs of sentences (conf/data/_pairs.yaml); one BPE serves both languages."""

    objective: str = "translation"
    source_language: str = "en"
    target_language: str = "de"
    batch_tokens: int = 4096
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokenizer not in ("bpe", "gpt2"):  # these can decode every text exactly
            raise UserError(f"data.tokenizer={self.tokenizer}; pairs take bpe or gpt2")
        languages = {self.source_language, self.target_language}
        if self.source == NUMBERS and languages != {"de", "en"}:
            raise UserError(f"the embedded numbers are in de and en, not in {languages}")
        check_bounds(self, "data.", batch_tokens=(8, math.inf), max_tokens=(8, math.inf))

    @property
    def directory(self) -> Path:
        plain = super().directory
        return plain.with_name(f"{plain.name}-{self.source_language}-{self.target_language}")

    def files(self) -> tuple[str, list[str] | str]:
        if self.source.startswith(HUB):
            return "parquet", self.source
        folder = Path(self.source)
        if not folder.is_dir():
            raise UserError(f"data.source={self.source} is no folder of pairs of sentences")
        texts = [path for split in SPLITS for path in _texts(self, split)]
        if missing := [path.name for path in texts if not path.is_file()]:
            found = {split: sorted(folder.glob(f"{SPLITS[split]}-*.parquet")) for split in SPLITS}
            if all(found.values()):
                return "parquet", [str(path) for paths in found.values() for path in paths]
            raise UserError(
                f"data.source={self.source} lacks {', '.join(missing)}; it must hold text files of "
                "these names, a sentence a line, or train-*.parquet, validation-*.parquet and "
                "test-*.parquet"
            )
        return "text", [str(path) for path in texts]


def documents(config: PairsConfig) -> Documents:
    """The sentences of all splits as documents, alternating source and target, so that one
    tokenizer serves both."""
    sizes = {split: 2 * pairs for split, pairs in _count(config).items()}
    languages = [config.source_language, config.target_language]
    revisions = hub.commits([hub.pinned(config.source)])
    description = {"revisions": revisions, "languages": languages, "split": "its own"}
    return Documents(partial(_batches, config), sizes, description)


def _count(config: PairsConfig) -> dict[str, int]:
    """Number of pairs of each split."""
    if config.source == NUMBERS:
        return {split: SIZES[split] for split in SPLITS}
    if config.files()[0] == "parquet":
        table = _tables(config)
        return {split: len(table[split]) for split in SPLITS}
    counts = {}
    for split in SPLITS:
        first, second = paths = _texts(config, split)
        lines = [sum(1 for _ in path.open("rb")) for path in paths]
        if lines[0] != lines[1] or not lines[0]:
            raise UserError(
                f"{first} has {lines[0]} lines and {second} has {lines[1]}; they must be the same "
                "number, at least 1"
            )
        if found := not_utf8([*map(str, paths)]):
            raise UserError(f"{found}; save it as UTF-8")
        counts[split] = lines[0]
    return counts


def _batches(config: PairsConfig, split: str, first: int = 0) -> Iterator[list[str]]:
    """Yield a split's sentences in batches from number `first` on, source and target in turn."""
    pairs = islice(_pairs(config, split), first // 2, None)
    while some := list(islice(pairs, _BATCH)):
        yield [" ".join(sentence.split()) for pair in some for sentence in pair]


def _pairs(config: PairsConfig, split: str) -> Iterator[Pair]:
    source, target = config.source_language, config.target_language
    if config.source == NUMBERS:
        for number in numbers(split):
            words = {"de": german(number), "en": english(number)}
            yield words[source], words[target]
    elif config.files()[0] == "parquet":
        for row in _tables(config)[split]:
            yield row["translation"][source], row["translation"][target]
    else:
        first, second = _texts(config, split)
        with (
            first.open(encoding="utf-8", newline="\n") as sources,
            second.open(encoding="utf-8", newline="\n") as targets,
        ):
            yield from zip(sources, targets, strict=True)


def _texts(config: PairsConfig, split: str) -> list[Path]:
    languages = (config.source_language, config.target_language)
    return [Path(config.source) / f"{split}.{language}" for language in languages]


def _tables(config: PairsConfig) -> Any:
    """The Parquet files as a table for each split."""
    check_installed("datasets", "reading data files needs the datasets library", "hf")
    import datasets

    try:
        place = hub.pinned(config.source)
        files = {split: f"{place}/{name}-*.parquet" for split, name in SPLITS.items()}
        table = datasets.load_dataset("parquet", data_files=files)
    except Exception as error:  # of many libraries: network, file system, Parquet
        raise UserError(
            f"could not read data.source={config.source} ({first_line(error)}); pass "
            f"data.source=FOLDER with train.{config.source_language}, "
            f"train.{config.target_language} and so on"
        ) from error
    languages = {config.source_language, config.target_language}
    features = table["train"].features.get("translation")
    known = set(getattr(features, "languages", None) or features or ())
    if not languages <= known:
        raise UserError(
            f"{config.source} has no column translation with {' and '.join(sorted(languages))}"
        )
    return table


# ---- the embedded numbers


LIMIT = 10**6  # of the numbers
SIZES = {"test": 500, "val": 500, "train": 20_000}  # the splits are filled in this order

_GERMAN, _GERMAN_TENS, _ENGLISH, _ENGLISH_TENS = (
    words.split()
    for words in (
        "null eins zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn "
        "fünfzehn sechzehn siebzehn achtzehn neunzehn",
        "zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig",
        "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
        "fifteen sixteen seventeen eighteen nineteen",
        "twenty thirty forty fifty sixty seventy eighty ninety",
    )
)


def german(number: int) -> str:
    """The German words of a number from 0 to 999,999, written as one."""
    for unit, word in ((1000, "tausend"), (100, "hundert")):
        many, rest = divmod(number, unit)
        if many:
            return f"{_german_before(many)}{word}{german(rest) if rest else ''}"
    if number < 20:
        return _GERMAN[number]
    tens, ones = divmod(number, 10)
    return f"{_german_before(ones)}und" * (ones > 0) + _GERMAN_TENS[tens - 2]


def _german_before(number: int) -> str:
    """The German words of a number in front of another word: `eins` loses its s."""
    words = german(number)
    return words.removesuffix("s") if words.endswith("eins") else words


def english(number: int) -> str:
    """The English words of a number from 0 to 999,999, without "and"."""
    for unit, word in ((1000, "thousand"), (100, "hundred")):
        many, rest = divmod(number, unit)
        if many:
            return f"{english(many)} {word}{' ' + english(rest) if rest else ''}"
    if number < 20:
        return _ENGLISH[number]
    tens, ones = divmod(number, 10)
    return _ENGLISH_TENS[tens - 2] + f"-{_ENGLISH[ones]}" * (ones > 0)


def numbers(split: str) -> list[int]:
    """The numbers of a split, all different and in none of the others."""
    words = (hashlib.sha256(str(i).encode()).digest() for i in count())
    drawn = (int.from_bytes(word, "big") % LIMIT for word in words)
    total = [*dict.fromkeys(islice(drawn, 2 * sum(SIZES.values())))]  # each once; half are enough
    first = sum(SIZES[name] for name in list(SIZES)[: list(SIZES).index(split)])
    return total[first : first + SIZES[split]]
