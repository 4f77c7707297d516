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

import math

from experiments.config.driver import driver
from experiments.finetuning import tuning
from experiments.finetuning.config import FinetuneConfig, freeze_finetuning
from experiments.finetuning.config import load as load
from experiments.finetuning.tuning import finished as finished
from experiments.finetuning.tuning import run as run
from experiments.runs.finished import FinishedRun


def table(done: list[FinishedRun]) -> str:
    """The metrics of several fine-tunings, and the mean of their scores."""
    results = [run.result for run in done]
    scores = [result["metrics"]["score"] for result in results]
    lines = [
        f"{result['task']:<10} {score:>5.1f}  {tuning.metrics_text(result['metrics'])}"
        for result, score in zip(results, scores, strict=True)
    ]
    return "\n".join([*lines, f"{f'mean of {len(scores)}':<10} {sum(scores) / len(scores):>5.1f}"])


@driver(
    "finetune",
    freeze_finetuning,
    after_sweep=lambda runs: print(table(runs)),
    worst=-math.inf,
)
def main(config: FinetuneConfig) -> FinishedRun:
    return run(config)


if __name__ == "__main__":
    main()
