"""SAM's image encoder and its step: torchao's Table 2."""

import pytest
import timm
import torch

from experiments.bench.variants import Bench, convert
from experiments.support.errors import UserError
from reproduce.measure import sam

TINY = {"img_size": 32, "embed_dim": 16, "num_heads": 2, "depth": 2, "global_attn_indexes": [1]}


def encoder():
    torch.manual_seed(0)
    model = sam.encoder("samvit_large_patch16", **TINY)
    for block in model.blocks:
        torch.nn.init.normal_(block.attn.rel_pos_h)
        torch.nn.init.normal_(block.attn.rel_pos_w)
    return model


def made(method):
    converted = convert(method, encoder(), ("*mlp.*",), torch.float32, 4, "dense")
    return Bench(converted, [torch.randn(1, 3, 32, 32)], [torch.randn(1, 256, 2, 2)])


def test_the_encoder_is_that_of_sam_vit_l():
    """Its size as published: 308,278,272 parameters with the neck, 256 channels on a 16th."""
    with torch.device("meta"):
        model = sam.encoder("samvit_large_patch16", img_size=1024)
        out = model(torch.empty(1, 3, 1024, 1024))
    assert sum(p.numel() for p in model.parameters()) == 308_278_272
    assert out.shape == (1, 256, 64, 64)
    linears = [name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    assert sum("mlp." in name for name in linears) == 48


def test_attention_is_that_of_timm():
    ours = encoder()
    torch.manual_seed(0)
    theirs = timm.create_model("samvit_large_patch16", num_classes=0, global_pool="", **TINY)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 3, 32, 32)
    found = []
    for model in (ours, theirs):
        y = model(x)
        y.square().sum().backward()
        found.append([y, *(p.grad for p in model.parameters())])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_blocks_compile_whole_and_are_checked(monkeypatch):
    torch.compiler.reset()
    built, how = made("semi_sparse"), {"backend": "aot_eager"}
    sam.compile_blocks("x", built, how)
    assert built.found() == [None] * len(built.found())
    built.whole(0)
    assert built.inputs[0].grad is not None
    monkeypatch.setattr(built, "found", iter([[torch.ones(2)], [torch.zeros(2)]]).__next__)
    with pytest.raises(UserError, match="compiled model are off by 1"):
        sam.compile_blocks("x", built, how)
