"""Blocks are found, and computing them again changes no number."""

import torch

from experiments.training.blocks import blocks, recompute, trained_blocks
from methods import sr_ste
from models.dino import DINO, DinoConfig
from models.gpt2 import GPT, GPTConfig
from models.vit import ViT, ViTConfig

SHAPE = GPTConfig(n_layer=2, n_head=2, n_embd=16, vocab_size=32, block_size=8, dropout=0.5)


def test_blocks_are_found_before_and_after_conversion():
    model = GPT(SHAPE)
    names = ["transformer.h.0", "transformer.h.1"]
    assert list(blocks(model)) == names
    sr_ste.Method(sr_ste.Config()).convert(model)
    assert list(blocks(model)) == names
    # A teacher in the model has blocks that are not trained.
    shape = ViTConfig(image_size=16, patch_size=4, width=16, depth=2, heads=2, n_classes=0)
    model = DINO(ViT(shape), DinoConfig(total_steps=1, prototypes=8, hidden=8, local_crops=0))
    assert len(blocks(model)) == 4
    assert trained_blocks(model) == list(model.student.backbone.vit.blocks)


def test_blocks_that_are_computed_again_give_the_same_gradients_dropout_included():
    torch.manual_seed(0)
    model = GPT(SHAPE).train()
    ids = torch.randint(0, 32, (2, 9))
    runs, found = [], []

    def step():
        torch.manual_seed(1)
        model.zero_grad()
        _, loss = model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])

    step()
    recompute(model)
    model.transformer.h[0].mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    step()
    assert len(runs) == 2  # forward, and again in the backward pass
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    with torch.no_grad():
        model(ids[:, :-1], ids[:, 1:])
    assert len(runs) == 3
