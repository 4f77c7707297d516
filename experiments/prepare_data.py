"""Convert text to token files: `python -m experiments.prepare_data data=openwebtext`.

Works for every corpus (experiments/data/prepare.py); `data.source=FOLDER` takes local files. The
folder gets its final name only when it is complete; an existing one is kept.
"""

from experiments.config.driver import driver
from experiments.config.run import RunConfig
from experiments.data.manifest import DataConfig, read_manifest
from experiments.data.prepare import prepare
from experiments.support.errors import UserError
from experiments.support.progress import say


@driver("pretrain", after_stop="begins it anew", groups=("data",))
def main(config: RunConfig) -> None:
    if not isinstance(config.data, DataConfig):
        raise UserError(f"data={config.data.name} are images, which need no preparation")
    directory = prepare(config.data)
    splits = read_manifest(config.data)["splits"].items()
    sizes = [f"{r['documents']:,} documents, {r['tokens']:,} {name} tokens" for name, r in splits]
    say(f"{directory}: {'; '.join(sizes)}")


if __name__ == "__main__":
    main()
