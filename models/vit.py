"""Vision transformers (Dosovitskiy et al., 2021; DeiT, Touvron et al., 2021) on timm.

Shapes: B images, C = width channels, K = n_classes, S = image_size pixels a side.

`ViT` holds timm's `VisionTransformer` as `vit`, so that its linears are `vit.blocks.0.attn.qkv`,
`vit.blocks.0.mlp.fc1` and so on, and `vit.head`. timm and transformers are imported where used.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.base import Model
from models.groups import param_groups

if TYPE_CHECKING:
    from timm.models.vision_transformer import VisionTransformer
    from transformers import ViTForImageClassification, ViTModel

SIZES: dict[str, dict[str, int]] = {
    "nano": {"width": 128, "depth": 4, "heads": 4, "patch_size": 8, "image_size": 32},
    "tiny": {"width": 192, "depth": 12, "heads": 3},
    "small": {"width": 384, "depth": 12, "heads": 6},
    "base": {"width": 768, "depth": 12, "heads": 12},
    "large": {"width": 1024, "depth": 24, "heads": 16},
}


@dataclass(frozen=True)
class ViTConfig:
    """Shape of a vision transformer.

    image_size, patch_size: pixels a side. n_classes: 0 for a model that ends in its features.
    drop_path: rate of stochastic depth at the last block, rising linearly from 0 at the first; with
    `drop_path_uniform` that of every block.
    init_values: of layer scale; None for no layer scale. pool: what of the last hidden states is
    the feature, the class "token" or the "avg" of the patches. norm_eps: of the layer norms.
    dynamic_image_size: take images of other sizes too, whose sides are multiples of the patch
    (position embeddings are interpolated). init: of fresh linears, `timm` (normal, 0.02) or `jax`
    (Xavier-uniform, as in the original code of ViT, which small widths need).
    """

    width: int
    depth: int
    heads: int
    image_size: int = 224
    patch_size: int = 16
    n_classes: int = 1000
    drop_path: float = 0.0
    drop_path_uniform: bool = False
    mlp_ratio: float = 4.0
    init_values: float | None = None
    pool: str = "token"
    norm_eps: float = 1e-6
    dynamic_image_size: bool = False
    init: str = "timm"

    def __post_init__(self) -> None:
        for name in ("width", "depth", "heads", "image_size", "patch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.n_classes < 0:
            raise ValueError(f"n_classes must be 0 (features) or more, got {self.n_classes}")
        if self.init not in ("timm", "jax"):
            raise ValueError(f"init must be 'timm' or 'jax', got {self.init!r}")
        if self.width % self.heads:
            raise ValueError(
                f"width must be a multiple of heads, got width={self.width}, heads={self.heads}"
            )
        if self.image_size % self.patch_size:
            raise ValueError(
                f"image_size must be a multiple of patch_size, got image_size={self.image_size}, "
                f"patch_size={self.patch_size}"
            )
        if not 0 <= self.drop_path < 1:
            raise ValueError(f"drop_path must be in [0, 1), got {self.drop_path}")
        if self.mlp_ratio <= 0 or self.norm_eps <= 0:
            raise ValueError(
                f"mlp_ratio and norm_eps must be positive, got mlp_ratio={self.mlp_ratio}, "
                f"norm_eps={self.norm_eps}"
            )
        if self.pool not in ("token", "avg"):
            raise ValueError(f"pool must be 'token' or 'avg', got {self.pool!r}")

    @property
    def tokens(self) -> int:
        """Tokens of an image of `image_size`: patches and class token."""
        return (self.image_size // self.patch_size) ** 2 + 1

    @classmethod
    def of_size(cls, size: str, **overrides: Any) -> ViTConfig:
        """The config of a named size: tiny, small, base (DeiT's), large, or `nano` for the CPU;
        `overrides` are fields."""
        if size not in SIZES:
            raise ValueError(f"unknown ViT size {size!r}; choose from {', '.join(SIZES)}")
        return cls(**{**SIZES[size], **overrides})


class ViT(Model):
    """Vision transformer for classification, or for features when it has no classes."""

    TRUNK: ClassVar[str] = "vit"

    def __init__(self, config: ViTConfig) -> None:
        from timm.layers import DropPath, LayerNorm
        from timm.models.vision_transformer import VisionTransformer

        super().__init__()
        self.config = config
        self.vit = VisionTransformer(
            img_size=config.image_size,
            patch_size=config.patch_size,
            num_classes=config.n_classes,
            global_pool=cast(Any, config.pool),
            embed_dim=config.width,
            depth=config.depth,
            num_heads=config.heads,
            mlp_ratio=config.mlp_ratio,
            init_values=config.init_values,
            drop_path_rate=config.drop_path,
            norm_layer=partial(LayerNorm, eps=config.norm_eps),
            dynamic_img_size=config.dynamic_image_size,
            weight_init="jax" if config.init == "jax" else "",
        )
        if config.drop_path_uniform:
            for block in self.vit.blocks:
                block.drop_path1, block.drop_path2 = (DropPath(config.drop_path) for _ in range(2))

    def features(self, images: Tensor) -> Tensor:
        """The features [B, C] that go into the head, from images [B, 3, S, S]."""
        return self.vit.forward_head(self.vit.forward_features(images), pre_logits=True)

    def forward(self, input: Tensor, target: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Images [B, 3, S, S] -> (logits [B, K], loss or None); features [B, C] if K is 0.

        `target` is a class each, int64 [B], or a distribution each, [B, K] (mixup, label
        smoothing). The loss is the mean cross entropy in nats.
        """
        output = self.vit.head(self.features(input))
        if target is None:
            return output, None
        if not self.config.n_classes:
            raise ValueError("a ViT with n_classes=0 has no loss; give it a target-free forward")
        return output, F.cross_entropy(output, target)

    def num_params(self) -> int:
        """Number of parameters."""
        return sum(parameter.numel() for parameter in self.parameters())

    def param_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Optimizer groups, as timm and DeiT have them: matrices and the patch projection are
        decayed; biases, norms, layer scales, the class token and position embeddings are not."""
        spared = {f"vit.{name}" for name in self.vit.no_weight_decay()}
        return param_groups(self.named_parameters(), weight_decay, spared)


@torch.no_grad()
def from_timm(model: VisionTransformer) -> ViT:
    """Our ViT with a copy of the weights of timm's `VisionTransformer`, in their dtype.

    Raises a ValueError naming the first part of it that this model does not have (distillation or
    register tokens, other activations, dropout, ...).
    """
    block: Any = model.blocks[0]
    config = ViTConfig(
        width=model.embed_dim,
        depth=len(model.blocks),
        heads=block.attn.num_heads,
        image_size=model.patch_embed.img_size[0],
        patch_size=model.patch_embed.patch_size[0],
        n_classes=model.num_classes,
        drop_path=getattr(model.blocks[-1].drop_path1, "drop_prob", 0.0),
        mlp_ratio=block.mlp.fc1.out_features / model.embed_dim,
        init_values=getattr(block.ls1, "init_values", None),
        pool=model.global_pool,
        norm_eps=block.norm1.eps,
        dynamic_image_size=model.dynamic_img_size,
    )
    ours = ViT(config).to(block.norm1.weight.dtype)
    _check_same(model, ours.vit)
    if model.pool_include_prefix:
        raise ValueError("this timm model cannot be converted: it pools the prefix tokens too")
    ours.vit.load_state_dict(model.state_dict())
    return ours.train(model.training)


def _check_same(theirs: nn.Module, ours: nn.Module) -> None:
    """Raise a `ValueError` unless both have the same modules, settings and tensors."""
    # `repr` shows activations, epsilons and rates of dropout, which no tensor tells.
    for line, plain in zip(repr(theirs).splitlines(), repr(ours).splitlines(), strict=False):
        if line != plain:
            raise ValueError(
                f"this timm model cannot be converted: it has {line.strip()!r} where a plain ViT "
                f"has {plain.strip()!r}"
            )
    a, b = ({name: v.shape for name, v in m.state_dict().items()} for m in (theirs, ours))
    if wrong := sorted(name for name in {**a, **b} if a.get(name) != b.get(name)):
        raise ValueError(
            f"this timm model cannot be converted: {', '.join(wrong[:3])} are not those of a plain "
            "ViT"
        )


def to_timm(model: ViT) -> VisionTransformer:
    """timm's `VisionTransformer` with a copy of our weights, in their dtype.

    Raises a ValueError while a sparse method is attached.
    """
    _check_plain(model)
    return copy.deepcopy(model.vit)


def _check_plain(model: ViT) -> None:
    with torch.device("meta"):
        expected = ViT(model.config).state_dict()
    if extra := sorted(model.state_dict().keys() ^ expected.keys()):
        raise ValueError(
            f"not a plain ViT ({extra[0]} and {len(extra) - 1} more names differ); "
            "call the method's finalize(model) first"
        )


# From the names of transformers to timm's, which keeps query, key and value in one linear. The
# first of two alternatives is of transformers 5, the second of version 4.
_FROM_HF = (
    (r"^vit\.", ""),
    (r"^embeddings\.cls_token", "cls_token"),
    (r"^embeddings\.position_embeddings", "pos_embed"),
    (r"^embeddings\.patch_embeddings\.projection", "patch_embed.proj"),
    (r"^(layers|encoder\.layer)\.", "blocks."),
    (r"\.attention\.(o_proj|output\.dense)\.", ".attn.proj."),
    (r"\.attention\.(q_proj|attention\.query)\.", ".attn.q."),
    (r"\.attention\.(k_proj|attention\.key)\.", ".attn.k."),
    (r"\.attention\.(v_proj|attention\.value)\.", ".attn.v."),
    (r"\.(mlp\.fc1|intermediate\.dense)\.", ".mlp.fc1."),
    (r"\.(mlp\.fc2|output\.dense)\.", ".mlp.fc2."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"^layernorm\.", "norm."),
    (r"^classifier\.", "head."),
)


def _timm_name(name: str) -> str:
    for pattern, replacement in _FROM_HF:
        name = re.sub(pattern, replacement, name)
    return name


@torch.no_grad()
def from_hf(hf_model: ViTForImageClassification | ViTModel) -> ViT:
    """Our ViT with a copy of the weights of transformers' model, in its dtype.

    A `ViTModel` gives one without classes; its pooler, which is no part of the features, is left
    out. Raises a ValueError naming every setting of its config that this model does not have.
    """
    hf: Any = hf_model.config
    required = {
        "model_type": "vit",
        "hidden_act": "gelu",
        "qkv_bias": True,
        "num_channels": 3,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    problems = [
        f"{name}={getattr(hf, name)!r} (needs {value!r})"
        for name, value in required.items()
        if getattr(hf, name) != value
    ]
    if problems:
        raise ValueError(f"this ViT cannot be converted: {'; '.join(problems)}")
    classifier = getattr(hf_model, "classifier", None)
    config = ViTConfig(
        width=hf.hidden_size,
        depth=hf.num_hidden_layers,
        heads=hf.num_attention_heads,
        image_size=hf.image_size,
        patch_size=hf.patch_size,
        n_classes=getattr(classifier, "out_features", 0),
        mlp_ratio=hf.intermediate_size / hf.hidden_size,
        norm_eps=hf.layer_norm_eps,
    )
    model = ViT(config).to(hf_model.dtype)
    state = {_timm_name(k): v for k, v in hf_model.state_dict().items() if "pooler." not in k}
    for name in [k for k in state if ".attn.q." in k]:
        parts = [state.pop(name.replace(".attn.q.", f".attn.{part}.")) for part in "qkv"]
        state[name.replace(".attn.q.", ".attn.qkv.")] = torch.cat(parts)
    model.vit.load_state_dict(state)
    return model.train(hf_model.training)


@torch.no_grad()
def to_hf(model: ViT) -> ViTForImageClassification | ViTModel:
    """transformers' `ViTForImageClassification` with a copy of our weights, in their dtype.

    A model without classes becomes a `ViTModel`, whose first hidden state is the feature. Drop path
    is not kept: transformers has none. Raises a ValueError for what that model does not have
    (layer scale, average pooling), and while a sparse method is attached.
    """
    from transformers import ViTConfig as HFViTConfig
    from transformers import ViTForImageClassification, ViTModel

    _check_plain(model)
    config = model.config
    if config.init_values is not None or config.pool != "token":
        raise ValueError(
            f"transformers' ViT has no layer scale and no average pooling; this model has "
            f"init_values={config.init_values}, pool={config.pool!r}; use to_timm"
        )
    settings: dict[str, Any] = {
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "intermediate_size": model.get_parameter("vit.blocks.0.mlp.fc1.bias").numel(),
        "image_size": config.image_size,
        "patch_size": config.patch_size,
        "layer_norm_eps": config.norm_eps,
    }
    hf_model: Any
    if config.n_classes:
        settings["num_labels"] = config.n_classes
        hf_model = ViTForImageClassification(HFViTConfig(**settings))
    else:
        hf_model = ViTModel(HFViTConfig(**settings), add_pooling_layer=False)
    hf_model.to(next(model.parameters()).dtype)
    state = model.vit.state_dict()
    for name in [k for k in state if ".attn.qkv." in k]:
        for part, value in zip("qkv", state.pop(name).chunk(3), strict=True):
            state[name.replace(".qkv.", f".{part}.")] = value
    hf_model.load_state_dict({k: state[_timm_name(k)] for k in hf_model.state_dict()})
    return hf_model.train(model.training)
