"""Properties of all models: sizes, tied heads, dropout, parameter groups, and what they refuse."""

import copy
import dataclasses

import pytest
import torch

import methods
from models import bert, gpt2, transformer, vit
from models.dino import DINO, DinoConfig
from models.heads import Classifier
from models.hf import CausalLM

TEXT = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 40, "block_size": 12}
IMAGE = {"width": 16, "depth": 2, "heads": 2, "image_size": 16, "patch_size": 8, "n_classes": 5}
DINO_CONFIG = DinoConfig(total_steps=9, local_size=8, prototypes=12, hidden=16, bottleneck=8)


def gpt(**options):
    return gpt2.GPT(gpt2.GPTConfig(**{**TEXT, **options}))


def bert_lm(**options):
    return bert.BertLM(bert.BertConfig(**{**TEXT, "dropout": 0.0, **options}))


def translator(**options):
    return transformer.Transformer(transformer.TransformerConfig(**{**TEXT, **options}))


def image_model(**options):
    return vit.ViT(vit.ViTConfig(**{**IMAGE, **options}))


def dino(**options):
    backbone = image_model(n_classes=0, dynamic_image_size=options.pop("dynamic", True))
    return DINO(backbone, dataclasses.replace(DINO_CONFIG, **options))


def tokens(length=12, seed=1):
    return torch.randint(40, (3, length), generator=torch.Generator().manual_seed(seed))


def test_numbers_of_parameters_are_those_of_the_released_models():
    """GPT-2's with biases and 50257 tokens; DeiT's and ViT-L/16, as their papers count; BERT's with
    both heads of its pre-training; the Transformer's 63 million with 37000 tokens."""
    counts = {"124M": 124_439_808, "350M": 354_823_168, "774M": 774_030_080, "1558M": 1_557_611_200}
    images = {"tiny": 5_717_416, "small": 22_050_664, "base": 86_567_656, "large": 304_326_632}
    assert list(gpt2.SIZES) == ["nano", *counts]
    assert list(bert.SIZES) == ["nano", "base", "large", "cramming"]
    with torch.device("meta"):
        for size, count in counts.items():
            config = gpt2.GPTConfig.of_size(size, bias=True, vocab_size=50257)
            assert gpt2.GPT(config).num_params() == count
        for size, count in images.items():
            assert vit.ViT(vit.ViTConfig.of_size(size)).num_params() == count
        for size, count in {"base": 110_106_428, "large": 336_226_108}.items():
            config = bert.BertConfig.of_size(size, vocab_size=30522, next_sentence=True)
            assert bert.BertLM(config).num_params() == count
        assert bert.BertLM(bert.BertConfig.of_size("cramming")).num_params() == 119_591_425
        base = transformer.TransformerConfig.of_size("base", vocab_size=37000)
        assert round(transformer.Transformer(base).num_params() / 1e6) == 63


def test_heads_are_tied_and_stay_tied():
    for build, head, embedding in (
        (gpt, "lm_head", "transformer.wte"),
        (bert_lm, "predictions.decoder", "bert.embeddings.word_embeddings"),
        (translator, "head", "embedding"),
    ):
        model = build()
        assert len([p for p in model.parameters() if p.shape == (40, 16)]) == 1
        for same in (model, copy.deepcopy(model), model.to(torch.float64)):
            assert same.get_submodule(head).weight is same.get_submodule(embedding).weight


def test_dropout_acts_in_training_only():
    for model in (gpt(dropout=0.5), bert_lm(dropout=0.5), Classifier(gpt(), 3, dropout=0.5)):
        for training in (False, True):
            model.train(training)
            assert torch.equal(model(tokens())[0], model(tokens())[0]) is not training


def test_every_parameter_is_in_one_group_and_matrices_alone_decay(hf_model):
    """timm and DeiT spare class token and position embeddings; DINO's released code does not."""
    for model, spared in (
        (gpt(bias=True), ()),
        (bert_lm(next_sentence=True), ()),
        (translator(), ()),
        (CausalLM(hf_model("gpt2")), ()),
        (Classifier(CausalLM(hf_model("opt")), 3), ()),
        (Classifier(bert_lm(), 3), ()),
        (image_model(init_values=1e-5), ("vit.cls_token", "vit.pos_embed")),
        (dino().requires_grad_(True), ()),
    ):
        trained = getattr(model, "student", model)
        groups = model.param_groups(0.1)
        held = [id(p) for group in groups for p in group["params"]]
        assert sorted(held) == sorted(id(p) for p in trained.parameters())
        decayed = {id(p) for g in groups if g["weight_decay"] == 0.1 for p in g["params"]}
        assert {g["weight_decay"] for g in groups} == {0.1, 0.0}
        named = trained.named_parameters()
        assert decayed == {id(p) for n, p in named if p.dim() >= 2 and n not in spared}


REFUSED = [
    (lambda: gpt2.GPTConfig.of_size("125M"), "size '125M' of a GPTConfig; choose from nano, 124M"),
    (lambda: gpt(n_head=3), "n_embd=16, n_head=3"),
    (lambda: gpt()(tokens(13)), "13 tokens is longer .* block_size=12"),
    (lambda: dino(dynamic=False), r"set model\.dynamic_image_size=true"),
]


def test_what_cannot_be_is_refused_with_its_value():
    for make, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            make()
    dino(dynamic=False, local_crops=0)


def test_export_while_a_method_is_attached_is_refused():
    for build, export in ((gpt, gpt2.to_hf), (bert_lm, bert.to_hf), (image_model, vit.to_hf)):
        model = build()
        methods.build("slope", total_steps=10, include=["*mlp*"]).convert(model)
        with pytest.raises(ValueError, match=r"mlp\..* finalize"):
            export(model)
