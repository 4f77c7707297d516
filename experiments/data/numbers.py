"""German numbers and their English translations: a translation task that needs no files.

    zweihundertvierunddreißigtausendfünf    two hundred thirty-four thousand five

A German number is one word with the ones before the tens, so a model must learn to split it and to
change the order. The numbers are below a million and chosen by a hash; the three splits are
disjoint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import count, islice

LIMIT = 10**6
SIZES = {"test": 500, "val": 500, "train": 20_000}  # the splits are filled in this order

_GERMAN = (
    *("null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun", "zehn"),
    *("elf", "zwölf", "dreizehn", "vierzehn", "fünfzehn", "sechzehn", "siebzehn", "achtzehn"),
    "neunzehn",
)
_GERMAN_TENS = (
    *("", "", "zwanzig", "dreißig", "vierzig", "fünfzig", "sechzig", "siebzig", "achtzig"),
    "neunzig",
)
_ENGLISH = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen"),
    "nineteen",
)
_ENGLISH_TENS = (
    *("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty"),
    "ninety",
)


def german(number: int) -> str:
    """The German words of a number from 0 to 999,999, written as one."""
    thousands, rest = divmod(number, 1000)
    if thousands:
        return f"{_german_before(thousands)}tausend{german(rest) if rest else ''}"
    hundreds, rest = divmod(number, 100)
    if hundreds:
        return f"{_german_before(hundreds)}hundert{german(rest) if rest else ''}"
    if number < 20:
        return _GERMAN[number]
    tens, ones = divmod(number, 10)
    return f"{_german_before(ones)}und{_GERMAN_TENS[tens]}" if ones else _GERMAN_TENS[tens]


def _german_before(number: int) -> str:
    """The German words of a number in front of another word: `eins` loses its s."""
    words = german(number)
    return words.removesuffix("s") if words.endswith("eins") else words


def english(number: int) -> str:
    """The English words of a number from 0 to 999,999, without "and"."""
    thousands, rest = divmod(number, 1000)
    if thousands:
        return f"{english(thousands)} thousand{' ' + english(rest) if rest else ''}"
    hundreds, rest = divmod(number, 100)
    if hundreds:
        return f"{_ENGLISH[hundreds]} hundred{' ' + english(rest) if rest else ''}"
    if number < 20:
        return _ENGLISH[number]
    tens, ones = divmod(number, 10)
    return f"{_ENGLISH_TENS[tens]}-{_ENGLISH[ones]}" if ones else _ENGLISH_TENS[tens]


def numbers(split: str) -> list[int]:
    """The numbers of a split, all different and in none of the others."""
    every = _chosen()
    for name, size in SIZES.items():
        found = list(islice(every, size))
        if name == split:
            return found
    raise KeyError(split)


def _chosen() -> Iterator[int]:
    seen: set[int] = set()
    for i in count():
        number = int.from_bytes(hashlib.sha256(str(i).encode()).digest(), "big") % LIMIT
        if number not in seen:
            seen.add(number)
            yield number


def pairs(split: str) -> Iterator[tuple[str, str]]:
    """(German, English) of each number of a split."""
    return ((german(number), english(number)) for number in numbers(split))
