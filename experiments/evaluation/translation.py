"""Translates with an encoder-decoder by beam search, and scores translations.

Shapes: B sentences, K beams, V tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from experiments.support.errors import check_installed
from models.transformer import Transformer


@dataclass(frozen=True)
class Search:
    """Settings of a beam search. The defaults are those of Vaswani et al. (2017, section 6.1).

    beam: number of hypotheses kept.
    length_penalty: the log probability of a translation of n tokens, including its end, is divided
        by ((5 + n) / 6) to this power (Wu et al., 2016, arXiv 1609.08144).
    longer: how many tokens longer than its source a translation may be.
    """

    beam: int = 4
    length_penalty: float = 0.6
    longer: int = 50

    def __post_init__(self) -> None:
        if self.beam < 1:
            raise ValueError(f"beam={self.beam}; it must be at least 1")
        if self.longer < 0:
            raise ValueError(f"longer={self.longer}; it must not be negative")

    def score(self, log_probability: float, tokens: int) -> float:
        """The score by which translations are compared: log probability over the length penalty."""
        return log_probability / ((5 + tokens) / 6) ** self.length_penalty


@torch.no_grad()
def translate(
    model: Transformer, source: Tensor, source_mask: Tensor, end: int, vocab_size: int, how: Search
) -> list[list[int]]:
    """The best translation of each of the sources [B, S], as tokens without end-of-text (`end`,
    with which translations also begin). vocab_size: the tokenizer's; the model may have more.

    In each step, those among the K best continuations that end become finished translations, and
    the K best that do not end are continued. A sentence is done with K finished translations, or at
    the greatest length, where all must end."""
    sentences, beam, device = len(source), how.beam, source.device
    limit = model.config.block_size - 1  # largest number of tokens without the end
    most = (source_mask.sum(1) + how.longer).clamp(max=limit)
    finished: list[list[tuple[float, list[int]]]] = [[] for _ in range(sentences)]
    here = torch.arange(sentences, device=device)  # indices of sentences that are not done
    state = model.start(model.encode(source, source_mask))
    rows = here.repeat_interleave(beam)
    for layer in state:
        layer.select(rows)
    mask = source_mask[rows]
    tokens = torch.full((sentences, beam, 1), end, device=device)
    scores = torch.full((sentences, beam), -torch.inf, device=device)
    scores[:, 0] = 0.0  # all beams are equal at first, so only one of them counts
    while True:
        written = tokens.shape[2] - 1
        logits = model.decode_next(tokens[:, :, -1].reshape(-1, 1), state, mask)
        every = logits.float().log_softmax(-1).unflatten(0, (-1, beam)) + scores[..., None]
        every[..., vocab_size:] = -torch.inf
        last = most[here] <= written
        stays = torch.arange(every.shape[-1], device=device) != end
        every = every.masked_fill(last[:, None, None] & stays, -torch.inf)
        best, index = every.flatten(1).topk(min(2 * beam, every[0].numel()))
        origin, token = index // every.shape[-1], index % every.shape[-1]
        ended = (token == end) & best.isfinite()
        for row, place in ended[:, :beam].nonzero().tolist():
            found = tokens[row, origin[row, place], 1:].tolist()
            score = how.score(float(best[row, place]), written + 1)
            finished[int(here[row])].append((score, found))
        going = [
            row
            for row, sentence in enumerate(here.tolist())
            if len(finished[sentence]) < beam and not last[row]
        ]
        if not going:
            return [max(found, key=lambda pair: pair[0])[1] if found else [] for found in finished]
        kept = torch.tensor(going, device=device)
        scores, chosen = best[kept].masked_fill(token[kept] == end, -torch.inf).topk(beam)
        parents = origin[kept].gather(1, chosen)
        rows = (kept[:, None] * beam + parents).flatten()
        token = token[kept].gather(1, chosen)
        tokens = torch.cat([tokens.flatten(0, 1)[rows], token.reshape(-1, 1)], 1)
        tokens = tokens.unflatten(0, (-1, beam))
        here, mask = here[kept], mask[rows]
        for layer in state:
            layer.select(rows)


def score(translations: Sequence[str], references: Sequence[str]) -> tuple[dict[str, float], str]:
    """(scores of all translations together, with one reference for each; SacreBLEU's signature).

    bleu: SacreBLEU (Post, 2018, arXiv 1804.08771); the signature says how it was computed.
    bleu_tokenized: BLEU as older papers report it, without smoothing and on more finely tokenised
        text, with compounds split at hyphens. It uses the international rules of mteval-v14, while
        the papers used Moses, so tenths of a point may differ.
    exact_match: share of the translations that equal their reference.
    """
    bleu = require_sacrebleu()
    found, expected = list(translations), [list(references)]
    plain, tokenized = bleu.BLEU(), bleu.BLEU(tokenize="intl", smooth_method="none")
    matches = sum(a == b for a, b in zip(translations, references, strict=True))
    scores = {
        "bleu": plain.corpus_score(found, expected).score,
        "bleu_tokenized": tokenized.corpus_score(found, expected).score,
        "exact_match": 100.0 * matches / len(found),
    }
    return scores, str(plain.get_signature())


def require_sacrebleu() -> Any:
    """The module of sacrebleu. Raises a `UserError` if it is not installed."""
    check_installed("sacrebleu", "BLEU needs sacrebleu", "translation")
    from sacrebleu.metrics import bleu

    return bleu
