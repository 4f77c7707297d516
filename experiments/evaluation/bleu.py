"""Scores translations against their references, in percent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments.support.errors import check_installed


def score(translations: Sequence[str], references: Sequence[str]) -> tuple[dict[str, float], str]:
    """(scores of all translations together, with one reference for each; SacreBLEU's signature).

    bleu: SacreBLEU (Post, 2018, arXiv 1804.08771); the signature says how it was computed.
    bleu_tokenized: BLEU as older papers report it, without smoothing and on more finely tokenised
        text, with compounds split at hyphens. It uses the international rules of mteval-v14, while
        the papers used Moses, so tenths of a point may differ.
    exact_match: share of the translations that equal their reference.
    """
    bleu = require()
    found, expected = list(translations), [list(references)]
    plain, tokenized = bleu.BLEU(), bleu.BLEU(tokenize="intl", smooth_method="none")
    matches = sum(a == b for a, b in zip(translations, references, strict=True))
    scores = {
        "bleu": plain.corpus_score(found, expected).score,
        "bleu_tokenized": tokenized.corpus_score(found, expected).score,
        "exact_match": 100.0 * matches / len(found),
    }
    return scores, str(plain.get_signature())


def require() -> Any:
    """The module of sacrebleu. Raises a `UserError` if it is not installed."""
    check_installed("sacrebleu", "BLEU needs sacrebleu", "translation")
    from sacrebleu.metrics import bleu

    return bleu
