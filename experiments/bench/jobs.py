"""The models and batches whose training steps are measured.

SAM's image encoder is what torchao's benchmark of 2:4 training calls ViT-L.
"""

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from experiments.bench import variants
from experiments.bench.report import Report
from models.gpt2 import GPT, Block, GPTConfig
from models.transformer import Transformer, TransformerConfig

PATCH = 16  # side of a patch in pixels
# The only fused attention that gives the gradient of a bias; torch may prefer others on some GPUs.
ATTENTION = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def encoder(name: str, **changed: Any) -> nn.Module:
    """timm's model `name` up to its neck: images [B, 3, S, S] to features [B, 256, S/16, S/16]."""
    import timm

    model: Any = timm.create_model(name, num_classes=0, global_pool="", **changed)
    for block in model.blocks:
        block.attn = Attention(block.attn)
    return model


class Attention(nn.Module):
    """timm's attention with relative positions, in a form for which a GPU has fused kernels.

    timm passes batch and heads to torch as one dim, for which torch falls back to fp32 products,
    and creates indices on the CPU in every call, which CUDA graphs cannot capture.
    """

    index: Tensor

    def __init__(self, of: Any) -> None:
        super().__init__()
        self.heads: int = of.num_heads
        self.qkv, self.proj = of.qkv, of.proj
        self.rel_pos_h, self.rel_pos_w = of.rel_pos_h, of.rel_pos_w
        size = (len(self.rel_pos_h) + 1) // 2
        at = torch.arange(size, device=self.rel_pos_h.device)
        self.register_buffer("index", at[:, None] - at + size - 1, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, H, W, C] -> [B, H, W, C]; H = W, the side that the position embeddings are for."""
        batch, height, width, _ = x.shape
        tokens = height * width
        qkv = self.qkv(x).view(batch, tokens, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        grid = q.reshape(batch, self.heads, height, width, -1)
        rows = torch.einsum("bnhwc,hkc->bnhwk", grid, self.rel_pos_h[self.index])
        columns = torch.einsum("bnhwc,wkc->bnhwk", grid, self.rel_pos_w[self.index])
        bias = rows[..., :, None] + columns[..., None, :]
        bias = bias.reshape(batch, self.heads, tokens, tokens)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.proj(y.transpose(1, 2).reshape(x.shape))


SPARSE = ("ste", "semi_sparse", "fst", "s_ste", "slope")
NAMES = ("dense", *SPARSE, "dense fp8", variants.TORCHAO, *variants.ON_FP8_UNITS, variants.DELAYED)
MLP = ("*mlp.*",)
Built = tuple[nn.Module, Callable[[], Tensor], list[nn.Module]]


@dataclass(frozen=True)
class Workload:
    """A model, its batch, and the rows that are measured on it.

    build: makes, on the device, the model, a function that computes its loss (always on the same
        batch), and the modules to compile.
    tokens: that a linear sees. items, unit: number and kind of items per step.
    linears: [(in, out), ...] of the linears that `include` converts. names: the variants.
    around: a context in which everything is run.
    """

    build: Callable[[], Built]
    tokens: int
    items: int
    unit: str
    linears: tuple[tuple[int, int], ...]
    names: tuple[str, ...] = NAMES
    include: str | tuple[str, ...] = MLP
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


class Head(nn.Module):
    """The head with its loss, compiled as one: hidden states [B, T, C], targets [B, T] -> loss."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.linear = model.lm_head

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.linear(hidden).flatten(0, 1), target.flatten())


def square(y: Tensor) -> Tensor:
    """A loss for models that end in hidden states or features: the mean of their squares."""
    return y.float().square().mean()


def mlp(c: int, f: int) -> tuple[tuple[int, int], ...]:
    """(in, out) of the two linears of an MLP."""
    return (c, f), (f, c)


def of_tokens(build: Callable[[], Built], config: Any, tokens: int) -> Workload:
    return Workload(build, tokens, tokens, "tokens", mlp(config.n_embd, config.ffn_width))


def gpt2(size: str, batch: int, length: int) -> Workload:
    config = GPTConfig.of_size(size)

    def build() -> Built:
        model: Any = GPT(config)
        ids, head = torch.randint(config.vocab_size, (2, batch, length)), Head(model)
        return model, lambda: head(model.transformer(ids[0]), ids[1]), [*model.transformer.h, head]

    return of_tokens(build, config, batch * length)


def translation(size: str, batch: int, length: int) -> Workload:
    """The workload of an encoder-decoder on pairs of `length` tokens a side."""
    config = TransformerConfig.of_size(size)

    def build() -> Built:
        model: Any = Transformer(config)
        source, input_, target = torch.randint(config.vocab_size, (3, batch, length))
        blocks = [*model.encoder.layers, *model.decoder.layers]
        return model, lambda: model(source, input_, target)[1], blocks

    return of_tokens(build, config, batch * length)


def stack(layers: int, heads: int, widths: tuple[int, int], batch: int, length: int) -> Workload:
    """The workload of blocks of GPT-2 one after the other."""
    config = GPTConfig(layers, heads, widths[0], vocab_size=1, n_inner=widths[1])

    def build() -> Built:
        model = nn.Sequential(*(Block(config) for _ in range(layers)))
        x = torch.randn(batch, length, config.n_embd)
        return model, lambda: square(model(x)), list(model)

    return of_tokens(build, config, batch * length)


def all_linears(job: Workload) -> Workload:
    """The same workload of GPT-2's blocks with all their linears converted; a head stays dense."""
    names, width = (*job.names, variants.REPACKED), job.linears[0][0]  # here the most is packed
    linears = (*job.linears, (width, 3 * width), (width, width))
    return replace(job, linears=linears, include="all", names=names)


def vit(name: str, batch: int, width: int, patches: int) -> Workload:
    def build() -> Built:
        import timm

        model: Any = timm.create_model(name)
        size = model.default_cfg["input_size"]
        images, classes = torch.randn(batch, *size), torch.randint(1000, (batch,))
        return model, lambda: F.cross_entropy(model(images), classes), list(model.blocks)

    return Workload(build, batch * (patches + 1), batch, "images", mlp(width, 4 * width))


def sam_encoder(name: str, batch: int, size: int, width: int) -> Workload:
    """The workload of SAM's image encoder."""

    def build() -> Built:
        model: Any = encoder(name, img_size=size)
        images = torch.randn(batch, 3, size, size)
        return model, lambda: square(model(images)), list(model.blocks)

    tokens, attention = batch * (size // PATCH) ** 2, partial(sdpa_kernel, ATTENTION)
    return Workload(build, tokens, batch, "images", mlp(width, 4 * width), around=attention)


_774M, _124M = gpt2("774M", 16, 1024), gpt2("124M", 32, 1024)
_STACK = stack(6, 32, (4096, 14336), 8, 1024)
STACK = "6 blocks 4096 -> 14336, 8 x 1024"

QUICK_JOBS = {
    "GPT-2 nano, 2 x 32": gpt2("nano", 2, 32),
    "GPT-2 nano, 2 x 32, all linears": all_linears(gpt2("nano", 2, 32)),
    "2 blocks 64 -> 128, 2 x 32": stack(2, 2, (64, 128), 2, 32),
}
CPU_JOBS = {"GPT-2 nano, 4 x 128": gpt2("nano", 4, 128)}
GPU_JOBS = {
    "GPT-2 774M, 16 x 1024": _774M,
    "GPT-2 774M, 16 x 1024, all linears": all_linears(_774M),
    "GPT-2 124M, 32 x 1024": replace(_124M, names=(*NAMES, variants.SIMULATED)),
    "GPT-2 124M, 32 x 1024, all linears": all_linears(_124M),
    STACK: _STACK,
    f"{STACK}, all linears": all_linears(_STACK),
    "ViT-L/16, 64 images": vit("vit_large_patch16_224", 64, 1024, 196),
    "SAM ViT-L encoder, 4 images": sam_encoder("samvit_large_patch16", 4, 1024, 1024),
}


def jobs(options: argparse.Namespace, report: Report) -> dict[str, Workload]:
    """The requested workloads that are meant for this device."""
    if options.quick:
        found = QUICK_JOBS
    elif options.device.type == "cpu":
        report.leave_out(f"without a GPU: {'; '.join(GPU_JOBS)}; compiled, in bf16")
        found = CPU_JOBS
    else:
        found = GPU_JOBS
    return {name: found[name] for name in report.chosen(found, "--shapes", options.shapes)}
