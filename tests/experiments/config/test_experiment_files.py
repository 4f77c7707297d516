"""Every file of conf/experiment/ is composed as it stands, and run for two steps at nano size."""

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import experiments
from experiments import dino, distill, pretrain
from experiments.config.run import load
from experiments.data.manifest import DataConfig
from experiments.data.mlm import MLMConfig
from experiments.data.parallel import PairsConfig
from experiments.data.prepare import prepare
from experiments.support.errors import UserError

FOLDER = Path(experiments.__file__).parent / "conf" / "experiment"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))

SHORT = [
    "train.steps=2",
    "train.batch_size=4",
    "train.ramp_batch=null",
    "train.ramp_micro_steps=null",
    "train.warmup_steps=0",
    "train.cooldown_steps=0",
    "train.log_every=1",
    "train.eval_every=2",
    "train.eval_samples=4",
    "impl.device=cpu",
    "train.dtype=fp32",
    "impl.compile=false",
    "impl.micro_batch=null",
    "train.fp8_samples=null",
    "impl.workers=0",
    "impl.threads=1",
]
TINY = {
    "gpt2": ["model.n_layer=1", "model.n_head=2", "model.n_embd=16", "model.block_size=16"],
    "bert": ["model.n_layer=2", "model.n_head=2", "model.n_embd=16", "model.block_size=16"],
    "vit": [
        "model.width=16", "model.depth=1", "model.heads=2", "model.image_size=32",
        "model.patch_size=16", "data.image_size=32",
    ],
    "hf": ["model.block_size=16"],
    "transformer": ["model.n_layer=1", "model.n_head=2", "model.n_embd=16", "model.n_inner=32"],
}  # fmt: skip
DINO = [
    "dino.prototypes=32", "dino.hidden=32", "dino.bottleneck=16", "dino.local_size=16",
    "dino.local_crops=2",
]  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory, hf_model):
    """Overrides that put small data of each kind in the place of the real ones."""
    root = tmp_path_factory.mktemp("data")
    (root / "text").mkdir()
    for name in ("a", "b"):
        (root / "text" / f"{name}.txt").write_text("keep two of four weights and drop two\n" * 200)
    text = [f"data.source={root / 'text'}", f"data.root={root}"]
    settings = {"name": "words", "source": str(root / "text"), "root": str(root)}
    prepare(DataConfig(**settings, tokenizer="bpe", vocab_size=280))
    masked = MLMConfig(**settings | {"name": "masked"}, tokenizer="wordpiece", vocab_size=100)
    prepare(masked)
    for split in ("train", "val", "test"):
        for language in ("en", "de"):
            (root / "text" / f"{split}.{language}").write_text("keep two of four\n" * 40)
    pairs = settings | {"name": "pairs", "vocab_size": 280}
    prepare(PairsConfig(**pairs, tokenizer="bpe"))
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            folder = root / "images" / split / name
            folder.mkdir(parents=True)
            for number in range(3):
                pixels = np.random.default_rng(number).integers(0, 255, (40, 40, 3), np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    hf_model("gpt2", vocab_size=320).save_pretrained(root / "gpt2")
    words = [*text, "data.name=words", "data.tokenizer=bpe", "data.vocab_size=280"]
    return {
        "gpt2": [*words, "model.vocab_size=320"],
        "hf": [*words, f"model.path={root / 'gpt2'}"],
        "bert": [
            *text, "data.name=masked", "data.tokenizer=wordpiece", "data.vocab_size=100",
            "model.vocab_size=128", "model.n_inner=32", "data.sequence_length=null",
        ],
        "transformer": [
            *text, "data.name=pairs", "data.vocab_size=280", "model.vocab_size=320",
        ],
        "vit": ["data.name=two", f"data.source={root / 'images'}"],
    }  # fmt: skip


def small(name, data, tmp_path):
    """(the driver of an experiment file, its config at nano size)."""
    primary = {"dino": "dino", "ast": "distill"}.get(name.partition("_")[0], "pretrain")
    driver = {"dino": dino, "distill": distill}.get(primary, pretrain)
    on_hub = primary == "distill" or "_opt_" in name
    own = data["hf"][-1:] if on_hub else []  # the one that is not on the hub
    if name.endswith("phase2"):
        own = ["init=null"]  # from random weights, for the shapes alone
    family = load([f"experiment={name}", *own], primary).model_name
    overrides = [f"experiment={name}", *SHORT, *TINY[family], *data[family], f"runs={tmp_path}"]
    overrides += own if name.endswith("phase2") else []
    if primary == "dino":
        overrides += DINO
    elif family == "vit":
        overrides.append("model.n_classes=2")
    return driver, load(overrides, primary)


def test_every_experiment_file_is_composed(data, tmp_path):
    for name in NAMES:
        assert small(name, data, tmp_path)[1].train.steps == 2
    with pytest.raises(UserError, match="RUN_OF_PHASE_1 holds no finished run"):
        load(["experiment=slope_bert_large_phase2"]).directory()


# At nano size the sizes of a recipe are the same training.
RECIPES = {re.sub(r"_(\d+m|\d+b\d?|\d{3}|tiny|small|base|large)$", "", n): n for n in NAMES}


@pytest.mark.parametrize("name", RECIPES.values())
def test_a_recipe_runs_for_two_steps(name, data, tmp_path):
    driver, config = small(name, data, tmp_path)
    result = driver.run(config, lambda message: None)
    assert result["steps"] == 2 and np.isfinite(result["metrics"]["val_loss"])
    assert result["sparsity"]["illegal_groups"] == 0 or result["sparsity"]["density"] > 0.5
