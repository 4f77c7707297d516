"""The published recipes: what the files of conf/ say, and that each fits its model."""

from pathlib import Path

import pytest

import experiments
from experiments.config.run import load
from experiments.support.errors import UserError

FOLDER = Path(experiments.__file__).parent / "conf" / "experiment"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))

# Steps, batch, peak of the learning rate, optimizer, schedule, dtype: FST's and S-STE's scripts for
# GPT-2 (524,288 tokens a step), FST's released configs, NVIDIA's BERT, which SLoPe took, SLoPe's
# released configuration, FST's DeiT (5e-5 x 2048 / 512), the authors' command of AST.
RECIPES = {
    **{
        f"{method}_gpt2_{size}": (300_000, 512, 1.5e-4, "adamw", "cosine", "fp16")
        for method in ("dense", "sr_ste", "fst", "s_ste")
        for size in ("124m", "350m", "774m", "1558m")
    },
    "fst_cramming": (38_049, 4096, 1e-3, "adamw", "triangle", "fp16"),
    "slope_bert_large_phase1": (7038, 65_536, 6e-3, "lamb", "sqrt", "fp16"),
    "slope_bert_large_phase2": (1563, 32_768, 4e-3, "lamb", "sqrt", "fp16"),
    "dense_gpt2_small": (400_000, 512, 6e-4, "adamw", "linear", "fp16"),
    "slope_gpt2_large": (400_000, 512, 1.5e-4, "adamw", "linear", "fp16"),
    "fst_deit_base": (187_500, 2048, 2e-4, "lion", "cosine", "fp16"),
    "ast_boosted_gpt2_124m": (40_000, 128, 2e-4, "adamw", "cosine", "bf16"),
}
# The factors of decay are by the authors' page of December 2024; their code of May 2024 has the
# last two swapped.
DECAY = {"124m": 6e-5, "350m": 2e-4, "774m": 6e-5, "1558m": 2e-4}
DENSE_FROM = {"fst_gpt2_774m": 250_000, "fst_cramming": 36_367, "fst_deit_base": 156_250}


def test_every_recipe_is_the_published_one_and_fits_its_model(tmp_path, hf_model):
    """The method of each finds its linears in the model, which is built without its numbers."""
    hf_model("gpt2").save_pretrained(tmp_path)
    shapes = {}
    for name in NAMES:
        kind = name.partition("_")[0]
        own = ["init=null"] * name.endswith("phase2")
        if kind == "ast" or "_opt_" in name:  # in place of the checkpoint on the hub
            own += [f"model.path={tmp_path}", "model.block_size=32"]
        driver = {"dino": "dino", "ast": "distill"}.get(kind, "pretrain")
        config = load([f"experiment={name}", *own], driver)
        method, train = config.build_method(), config.train
        if config.model not in shapes:
            shapes[config.model] = config.build_shape()
        assert method.matching_linears(shapes[config.model]) or config.method == "dense"
        if name in RECIPES:
            found = train.steps, train.batch_size, train.learning_rate
            found += train.optimizer, train.schedule, train.dtype
            assert found == RECIPES[name], name
        if name in DENSE_FROM:
            assert method.dense_steps[0] == DENSE_FROM[name]
        if name.startswith("fst_gpt2"):
            assert config.method_options.alpha == DECAY[name.rpartition("_")[2]]
    # Bi-Mask searches every 100 of the 300,000 micro-steps, 3,000 times; here in optimizer steps.
    masks = load(["experiment=bi_mask_cramming"])
    searches = masks.train.steps / masks.method_options.permute_every
    assert searches == pytest.approx(300_000 / 100, rel=0.05)
    with pytest.raises(UserError, match="RUN_OF_PHASE_1 holds no finished run"):
        load(["experiment=slope_bert_large_phase2"]).directory()
