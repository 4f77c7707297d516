"""Pre-train a model from scratch with a method: `python -m experiments.pretrain method=s_ste`.

`init=RUN` starts from the weights of a finished run, `init=FOLDER` from those of a GPT-2, BERT or
ViT of transformers, loaded into our model of the same shape. `model=hf model.path=FOLDER` trains a
causal model of transformers as it is.

Writes into the run directory (`runs/<model>-<data>/<method>-<tag>-<hash>/seed<n>`): `config.json`,
`metrics.jsonl`, `checkpoints/` during the run, and at the end `model.safetensors` (plain weights
with zeros for pruned entries) and `result.json`. A finished run is not repeated; an interrupted one
continues from its last checkpoint. Under torchrun the ranks share each batch.
"""

from experiments.config.driver import driver
from experiments.config.run import RunConfig
from experiments.config.run import load as load
from experiments.runs.comparison import of_sweep
from experiments.runs.finished import FinishedRun
from experiments.support.progress import say
from experiments.training.pretraining import finished as finished
from experiments.training.pretraining import run as run


@driver("pretrain", after_sweep=lambda runs: print(of_sweep(runs)))
def main(config: RunConfig) -> FinishedRun:
    done = run(config)
    if config.dino is not None:
        say("to measure its features, run `python -m experiments.dino` with the same overrides")
    return done


if __name__ == "__main__":
    main()
