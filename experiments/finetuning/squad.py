"""SQuAD v1.1 (Rajpurkar et al., arXiv 1606.05250): windows of contexts, answers as spans, scores.

A context that does not fit into a sequence with its question is cut into overlapping windows, each
of which is a training example. If the answer is not in the window, its span is token 0, BERT's
[CLS]. Windows overlap by `stride` tokens, as in transformers and FST's runs, or begin every
`stride` tokens, as in the original BERT's and SLoPe's runs, which mostly gives more windows.
Questions are cut after 64 tokens.
"""

import json
import re
import string
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.data.tokenizer import Encoding, Frame, HFTokenizer
from experiments.finetuning.glue import is_folder
from experiments.support.errors import UserError
from experiments.support.hub import load_dataset

HUB = "rajpurkar/squad"
REVISION = "7b6d24c440a36b6815f21b70d25016731768db1f"  # of HUB
FILES = {"train": "train-v1.1.json", "dev": "dev-v1.1.json"}
MAX_QUESTION = 64  # tokens
N_BEST = 20  # starts, and ends, that the search for an answer combines
MAX_ANSWER = 30  # tokens


@dataclass(frozen=True)
class Question:
    """A question about a context. answers: (text, index of its first character in the context)."""

    id: str
    question: str
    context: str
    answers: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Window:
    """A question (its index) and a part of its context, from `second` on, as one sequence.

    spans: the characters of the context that each token covers; None for other tokens.
    answer: first and last token of the answer; (0, 0) if this window does not hold all of it.
    """

    question: int
    ids: list[int]
    second: int
    spans: list[tuple[int, int] | None]
    answer: tuple[int, int]


# ------------------------------------------------------------------ reading


def load(data: str) -> dict[str, list[Question]]:
    """The splits `train` and `dev`, from a folder with SQuAD's own JSON files or the hub."""
    if is_folder(data):
        return {split: _read(Path(data) / name) for split, name in FILES.items()}
    dataset = load_dataset(data, None, REVISION if data == HUB else None)
    return {
        split: [
            Question(
                row["id"],
                row["question"],
                row["context"],
                tuple(zip(row["answers"]["text"], row["answers"]["answer_start"], strict=True)),
            )
            for row in dataset[name]
        ]
        for split, name in (("train", "train"), ("dev", "validation"))
    }


def files(data: str) -> list[Path]:
    """The existing files that `load` reads from a folder."""
    return [path for name in FILES.values() if (path := Path(data) / name).is_file()]


def _read(path: Path) -> list[Question]:
    """The questions of a file in SQuAD's JSON."""
    try:
        questions = [
            Question(
                asked["id"],
                asked["question"],
                paragraph["context"],
                tuple((answer["text"], answer["answer_start"]) for answer in asked["answers"]),
            )
            for article in json.loads(path.read_text(encoding="utf-8"))["data"]
            for paragraph in article["paragraphs"]
            for asked in paragraph["qas"]
        ]
        for asked in questions:
            found = [
                start >= 0 and asked.context.startswith(t, start) for t, start in asked.answers
            ]
            if not found or not all(found):
                raise ValueError(f"question {asked.id} has an answer outside its context, or none")
    except OSError as error:
        raise UserError(f"{path} is missing") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} is not in the format of SQuAD v1.1: {type(error).__name__}: {error}"
        ) from error
    return questions


# ------------------------------------------------------------------ windows


def tokenize(encoding: Encoding, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """The token ids of a text, and the characters [start, end) that each covers, if only partly."""
    if isinstance(encoding, HFTokenizer):
        encoded = encoding.tokenizer.encode(text, add_special_tokens=False)
        return encoded.ids, encoded.offsets
    ids = encoding.encode_ordinary(text)
    spans, seen = [], 0
    for piece in encoding.decode_tokens_bytes(ids):
        start = seen - _continues(piece[0])  # the character began in an earlier token
        seen += sum(not _continues(byte) for byte in piece)
        spans.append((start, seen))
    return ids, spans


def _continues(byte: int) -> bool:
    """True if a byte of UTF-8 lies inside a character."""
    return byte & 0xC0 == 0x80


def windows(
    encoding: Encoding,
    frame: Frame,
    questions: Sequence[Question],
    max_length: int,
    stride: int,
    stride_is: str = "overlap",
) -> list[Window]:
    """All windows of all questions, in order; the span is that of a question's first answer.
    stride: tokens that two windows share, or with stride_is="step" at most between their starts."""
    made: list[Window] = []
    contexts: dict[str, tuple[list[int], list[tuple[int, int]]]] = {}
    for index, asked in enumerate(questions):
        if asked.context not in contexts:
            contexts = {asked.context: tokenize(encoding, asked.context)}  # the next share it
        ids, spans = contexts[asked.context]
        question = tokenize(encoding, asked.question.lstrip())[0][:MAX_QUESTION]
        available = max_length - frame.special(2) - len(question)
        step = min(stride, available) if stride_is == "step" else available - stride
        if step <= 0:
            raise UserError(
                f"question {asked.id} has {len(question)} tokens: sequences of max_length="
                f"{max_length} leave {available} for its context, and windows have stride="
                f"{stride}; raise recipe.max_length or lower recipe.stride"
            )
        first = 0
        while True:
            last = min(first + available, len(ids))
            joined, second = frame.join([question, ids[first:last]])
            covered = [*[None] * second, *spans[first:last], *[None] * len(frame.end)]
            answer = _answer(asked.answers[0], covered)
            made.append(Window(index, joined, second, covered, answer))
            if last == len(ids):
                break
            first += step
    return made


def _answer(answer: tuple[str, int], spans: Sequence[tuple[int, int] | None]) -> tuple[int, int]:
    """The first and last token that overlap with the answer; (0, 0) if a part lies outside."""
    text, start = answer
    end = start + len(text)
    inside = [(i, span) for i, span in enumerate(spans) if span is not None]
    touching = [i for i, span in inside if span[0] < end and span[1] > start]
    if not touching or inside[0][1][0] > start or inside[-1][1][1] < end:
        return 0, 0
    return touching[0], touching[-1]


# ------------------------------------------------------------------ answers


def best_answers(
    questions: Sequence[Question], made: Sequence[Window], logits: Iterable[np.ndarray]
) -> dict[str, str]:
    """The predicted answer by question id: the span with the largest sum of start and end logit
    over all windows. A valid span has at most 30 tokens, lies in the context, and has start and end
    among the 20 best of the window; questions without one are missing. logits: [T, 2] of start and
    end for each window; further rows are padding."""
    best: dict[int, tuple[float, str]] = {}
    for window, scores in zip(made, logits, strict=True):
        scores = scores[: len(window.ids)]
        order = np.argsort(-scores, axis=0, kind="stable")[:N_BEST]
        starts, ends = order[:, 0][:, None], order[:, 1][None, :]
        inside = np.array([span is not None for span in window.spans])
        legal = inside[starts] & inside[ends] & (starts <= ends) & (ends - starts < MAX_ANSWER)
        if not legal.any():
            continue
        sums = np.where(legal, scores[starts, 0] + scores[ends, 1], -np.inf)
        row, column = np.unravel_index(int(sums.argmax()), sums.shape)
        score = float(sums[row, column])
        if window.question not in best or score > best[window.question][0]:
            first, last = window.spans[order[row, 0]], window.spans[order[column, 1]]
            assert first is not None and last is not None
            context = questions[window.question].context
            best[window.question] = score, context[first[0] : last[1]].strip()
    return {questions[index].id: text for index, (_, text) in best.items()}


# ------------------------------------------------------------------ metrics


def normalize(text: str) -> str:
    """An answer as SQuAD's evaluation compares it: lower case, no punctuation, articles, spaces."""
    kept = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def exact_match(prediction: str, reference: str) -> float:
    return float(normalize(prediction) == normalize(reference))


def f1(prediction: str, reference: str) -> float:
    """Harmonic mean of precision and recall over the words that both have."""
    words, expected = normalize(prediction).split(), normalize(reference).split()
    common = sum((Counter(words) & Counter(expected)).values())
    return 2.0 * common / (len(words) + len(expected)) if common else 0.0


def metrics(questions: Sequence[Question], predicted: dict[str, str]) -> dict[str, float]:
    """Exact match and F1 in percent, for each question the best over its answers; `score` is F1.
    One without a prediction counts as wrong, even if its answer is only an article."""
    result = {}
    for name, measure in (("f1", f1), ("exact_match", exact_match)):
        best = [
            max(measure(predicted[asked.id], text) for text, _ in asked.answers)
            for asked in questions
            if asked.id in predicted
        ]
        result[name] = 100.0 * sum(best) / len(questions)
    return {"score": result["f1"], **result}
