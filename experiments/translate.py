"""Train a Transformer to translate: `python -m experiments.translate method=s_ste`.

The default task needs no network: German number words to English ones. For WMT14 English to German
use `model=transformer_base`, with `data.source=FOLDER` for local files. Training and files are
those of `experiments.pretrain`. Then the test split is translated by beam search, with averaged
weights if there are any (`train.average_last`):

    search.beam=4            number of hypotheses
    search.length_penalty=0.6
    search.longer=50         maximum number of tokens beyond the length of the source

The translations are written to `translations.txt` in the run directory, one per line. The metrics
in `result.json` include `bleu`, `bleu_tokenized` and `exact_match`, all in percent
(experiments/evaluation/translation.py), and `val_bleu` and `val_bleu_tokenized` for the
validation split.
"""

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from experiments.config import run as configuration
from experiments.config.compose import composed
from experiments.config.driver import driver
from experiments.config.run import RunConfig
from experiments.data.corpus import Corpus, load_tokens
from experiments.data.pairs import Sentences, padded
from experiments.data.parallel import PairsConfig
from experiments.evaluation.translation import Search, require_sacrebleu, score, translate
from experiments.runs.comparison import of_sweep
from experiments.runs.finished import FinishedRun
from experiments.support.checkpoint import write_text
from experiments.support.errors import UserError
from experiments.support.progress import say
from experiments.support.typed import typed
from experiments.training import pretraining, routine
from models.transformer import Transformer

FILE = "translations.txt"
BATCH = 64  # sentences translated at once


@dataclass(frozen=True)
class TranslateConfig(RunConfig):
    """A training's config, and the settings of the beam search."""

    search: Search = field(default_factory=Search)


def freeze_translation(composition: Any) -> TranslateConfig:
    """The `TranslateConfig` of a composed `DictConfig`."""
    run = configuration.freeze(composition)
    search = typed(Search, "search", composition["search"])
    if not isinstance(run.data, PairsConfig):
        raise UserError(
            f"model={run.model_name} does not translate; choose model=transformer_nano or "
            "transformer_base, or train it with `python -m experiments.pretrain`"
        )
    return TranslateConfig(**vars(run), search=search)


load = partial(composed, "translate", freeze_translation)


def finished(config: TranslateConfig) -> dict[str, Any] | None:
    """The result of this config, if it was trained and its translations scored."""
    result = pretraining.finished(config)
    return result if result is not None and _is_scored(config, result) else None


def _is_scored(config: TranslateConfig, result: dict[str, Any]) -> bool:
    there = (config.directory() / FILE).is_file()
    return there and result.get("search") == dataclasses.asdict(config.search)


def run(config: TranslateConfig, report: Callable[[str], None] = say) -> FinishedRun:
    """Train as `pretraining.run` does, then translate."""
    require_sacrebleu()
    done = pretraining.run(config, report)
    if int(os.environ.get("RANK", "0")) or _is_scored(config, done.result):
        return done
    model = done.averaged() or done.model()
    assert isinstance(model, Transformer) and isinstance(config.data, PairsConfig)
    gpu = config.impl.device != "cpu" and torch.cuda.is_available()
    corpus = load_tokens(config.data, config.seed)
    model.eval().to("cuda" if gpu else "cpu")
    with routine.process_settings(config.impl):
        validation, _ = score(*translations(model, corpus, "val", config.search))
        found, references = translations(model, corpus, "test", config.search)
    scores, signature = score(found, references)
    write_text(done.directory / FILE, "".join(f"{line}\n" for line in found))
    of_val = {f"val_{name}": validation[name] for name in ("bleu", "bleu_tokenized")}
    search = dataclasses.asdict(config.search)
    done.extend({**scores, **of_val}, search=search, bleu_signature=signature)
    report(
        f"BLEU {scores['bleu']:.2f}, tokenised {scores['bleu_tokenized']:.2f}, exact match "
        f"{scores['exact_match']:.1f} % of {len(found)} sentences -> {done.directory / FILE}"
    )
    return done


def translations(
    model: Transformer, corpus: Corpus, split: str, how: Search
) -> tuple[list[str], list[str]]:
    """The translations and references of a split's pairs, in order; too long sources are cut."""
    text = Sentences(corpus.tokens[split], corpus.encoding.eot_token)
    device, longest = model.embedding.weight.device, model.config.block_size
    order = text.lengths[:, 0].argsort(kind="stable")
    found: list[str] = [""] * len(text)
    for first in range(0, len(text), BATCH):
        chosen = order[first : first + BATCH]
        rows = [row[:longest] for row in text.rows(chosen, 0)]
        source = padded(rows, text.end).to(device)
        lengths = torch.tensor([len(row) for row in rows], device=device)
        mask = (torch.arange(source.shape[1], device=device) < lengths[:, None]).long()
        best = translate(model, source, mask, text.end, corpus.vocab_size, how)
        for place, tokens in zip(chosen, best, strict=True):
            found[place] = " ".join(corpus.encoding.decode(tokens).split())
    references = [row[:-1].tolist() for row in text.rows(range(len(text)), 1)]
    return found, [corpus.encoding.decode(row) for row in references]


main = driver(
    "translate", freeze_translation, after_sweep=lambda runs: print(of_sweep(runs, "metrics.bleu"))
)(run)


if __name__ == "__main__":
    main()
