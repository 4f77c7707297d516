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


def pairs(split: str) -> Iterator[tuple[str, str]]:
    """(German, English) of each number of a split."""
    return ((german(number), english(number)) for number in numbers(split))
