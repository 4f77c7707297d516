"""Fine-tune a pre-trained GPT-2 or BERT: `python -m experiments.finetune run=DIR task=cola`.

`task` is one of GLUE's nine tasks or `squad`. `-m task=cola,rte,...` takes several, one after the
other, and prints a table. `model.path=FOLDER` uses a checkpoint of transformers (a causal model or
BERT) instead of a run. It is fine-tuned densely or, with mode=masked, under the zeros of its 2:4
linears.

Writes into `<run>/finetune/<task>-<mode>-<hash>/seed<n>`: `metrics.jsonl`, with the metrics on the
dev split after each epoch, and at the end `model.safetensors`, `predictions/` and `result.json`. As
in the papers, the result is that of the last epoch, not of the best. A finished run is not
repeated; an interrupted one continues from its last checkpoint. Under torchrun the ranks share each
batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from experiments.config.driver import driver
from experiments.finetuning import tuning
from experiments.finetuning.config import FinetuneConfig, freeze_finetuning
from experiments.finetuning.config import load as load
from experiments.support.progress import say


def finished(config: FinetuneConfig) -> dict[str, Any] | None:
    """The result of exactly this fine-tuning, if it was run to the end."""
    return tuning.finished(config)


def run(config: FinetuneConfig, report: Callable[[str], None] = say) -> dict[str, Any]:
    """Fine-tune, or do nothing if it is done; return the content of `result.json`.

    Raises:
        UserError: before anything is written, if run, data and recipe do not fit together.
    """
    return tuning.train(config, report)[1]


def table(results: list[dict[str, Any]]) -> str:
    """The metrics of several fine-tunings, and the mean of their scores."""
    scores = [result["metrics"]["score"] for result in results]
    lines = [
        f"{result['task']:<10} {score:>5.1f}  {tuning.metrics_text(result['metrics'])}"
        for result, score in zip(results, scores, strict=True)
    ]
    return "\n".join([*lines, f"{f'mean of {len(scores)}':<10} {sum(scores) / len(scores):>5.1f}"])


main = driver(
    "finetune",
    freeze_finetuning,
    after_sweep=lambda results: print(table(results)),
    worst=-math.inf,
)(run)


if __name__ == "__main__":
    main()
