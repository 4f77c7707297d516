"""Vision transformers (Dosovitskiy et al., 2021; DeiT, Touvron et al., 2021) on timm.

Shapes: B images, C = width channels, K = n_classes, S = image_size pixels a side.

`ViT` has timm's `VisionTransformer` as its module `vit`, so that its linears are called
`vit.blocks.0.attn.qkv`, `vit.blocks.0.mlp.fc1` and so on, and `vit.head`. timm and transformers are
imported where they are used.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from models import base

if TYPE_CHECKING:
    from transformers import ViTForImageClassification, ViTModel

SIZES: dict[str, dict[str, int]] = {
    "nano": {"width": 128, "depth": 4, "heads": 4, "patch_size": 8, "image_size": 32},
    "tiny": {"width": 192, "depth": 12, "heads": 3},
    "small": {"width": 384, "depth": 12, "heads": 6},
    "base": {"width": 768, "depth": 12, "heads": 12},
    "large": {"width": 1024, "depth": 24, "heads": 16},
}


@dataclass(frozen=True)
class ViTConfig(base.Sized):
    """Shape of a vision transformer.

    image_size, patch_size: side in pixels.
    n_classes: 0 = no classifier; the output is the features.
    drop_path: rate of stochastic depth at the last block; it rises linearly from 0 at the first.
    drop_path_uniform: True for the same rate at every block.
    init_values: initial values of layer scale; None = no layer scale.
    pool: the features are the last hidden state of the class token (`token`), or the mean over the
        patches (`avg`).
    norm_eps: epsilon of the layer norms.
    dynamic_image_size: True to take images of other sizes, too, if their sides are multiples of the
        patch size; position embeddings are interpolated.
    init: initialisation of linears, `timm` (normal, 0.02) or `jax` (Xavier-uniform, as in the
        original code of ViT; small widths need it).
    squared_relu: squared ReLU in the place of GELU.
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
    squared_relu: bool = False

    sizes = SIZES

    def __post_init__(self) -> None:
        base.check_choice(self, "init", "timm", "jax")
        base.check_multiple(self, "width", "heads")
        base.check_multiple(self, "image_size", "patch_size")
        base.check_choice(self, "pool", "token", "avg")

    @property
    def tokens(self) -> int:
        """Number of tokens of an image of `image_size`: its patches and the class token."""
        return (self.image_size // self.patch_size) ** 2 + 1


class ViT(base.Model):
    """Vision transformer for classification or, without classes, for features."""

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
            act_layer=base.SquaredReLU if config.squared_relu else None,
        )
        if config.drop_path_uniform:
            for block in self.vit.blocks:
                block.drop_path1, block.drop_path2 = (DropPath(config.drop_path) for _ in range(2))

    def features(self, images: Tensor) -> Tensor:
        """Images [B, 3, S, S] -> the features [B, C] that the head takes."""
        return self.vit.forward_head(self.vit.forward_features(images), pre_logits=True)

    def forward(self, input: Tensor, target: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Images [B, 3, S, S] -> (logits [B, K], loss or None); features [B, C] if K is 0.

        `target` has the class of each image, int64 [B], or a distribution over the classes, [B, K]
        (for mixup or label smoothing). The loss is the mean cross entropy in nats.
        """
        output = self.vit.head(self.features(input))
        if target is None:
            return output, None
        if not self.config.n_classes:
            raise ValueError("a ViT with n_classes=0 has no loss; call it without target")
        return output, F.cross_entropy(output, target)

    def param_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Optimizer groups as in timm and DeiT: weight decay for matrices and the patch projection;
        none for biases, norms, layer scales, the class token and position embeddings."""
        no_decay = {f"vit.{name}" for name in self.vit.no_weight_decay()}
        return base.param_groups(self.named_parameters(), weight_decay, no_decay)


# Patterns of names in transformers, and timm's names. Of two alternatives the first is that of
# transformers 5, the second that of transformers 4. timm has query, key and value in one linear.
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

# Our fields by the names of transformers' settings.
_FIELDS = {
    "hidden_size": "width",
    "num_hidden_layers": "depth",
    "num_attention_heads": "heads",
    "image_size": "image_size",
    "patch_size": "patch_size",
    "layer_norm_eps": "norm_eps",
}


def _timm_name(name: str) -> str:
    """timm's name of a tensor of transformers."""
    for pattern, replacement in _FROM_HF:
        name = re.sub(pattern, replacement, name)
    return name


@torch.no_grad()
def from_hf(hf_model: ViTForImageClassification | ViTModel) -> ViT:
    """Our ViT with a copy of the weights of transformers' model, in its dtype.

    A `ViTModel` becomes a ViT without classes; its pooler is left out, because the features do not
    depend on it. Raises a `ValueError` if the model has settings that ours does not have; all of
    them are named.
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
    values = base.converted("ViT", hf, _FIELDS, required)
    values["n_classes"] = getattr(getattr(hf_model, "classifier", None), "out_features", 0)
    ratio = hf.intermediate_size / hf.hidden_size
    theirs = hf_model.state_dict().items()
    state = {f"vit.{_timm_name(k)}": v for k, v in theirs if "pooler." not in k}
    for name in [k for k in state if ".attn.q." in k]:
        parts = [state.pop(name.replace(".attn.q.", f".attn.{part}.")) for part in "qkv"]
        state[name.replace(".attn.q.", ".attn.qkv.")] = torch.cat(parts)
    return base.copied(ViT(ViTConfig(**values, mlp_ratio=ratio)), state, hf_model)


@torch.no_grad()
def to_hf(model: ViT) -> ViTForImageClassification | ViTModel:
    """transformers' `ViTForImageClassification` with a copy of our weights, in their dtype. A model
    without classes becomes a `ViTModel`, whose first hidden state is the features. Stochastic depth
    is lost, because transformers does not have it. Raises a `ValueError` if the model has layer
    scale or average pooling, which transformers does not have, or a sparse method is attached."""
    from transformers import ViTConfig as HFViTConfig
    from transformers import ViTForImageClassification, ViTModel

    config = model.config
    base.check_as_built("ViT", model)
    if config.init_values is not None or config.pool != "token" or config.squared_relu:
        raise ValueError(
            f"our copy to transformers' ViT knows GELU, no layer scale and no average pooling; "
            f"this model has init_values={config.init_values}, pool={config.pool!r}, squared_relu="
            f"{config.squared_relu}; its module `vit` is timm's"
        )
    settings = {theirs: getattr(config, ours) for theirs, ours in _FIELDS.items()}
    settings["intermediate_size"] = model.get_parameter("vit.blocks.0.mlp.fc1.bias").numel()
    hf_model: Any
    if config.n_classes:
        settings["num_labels"] = config.n_classes
        hf_model = ViTForImageClassification(HFViTConfig(**settings))
    else:
        hf_model = ViTModel(HFViTConfig(**settings), add_pooling_layer=False)
    state = model.vit.state_dict()
    for name in [k for k in state if ".attn.qkv." in k]:
        for part, value in zip("qkv", state.pop(name).chunk(3), strict=True):
            state[name.replace(".qkv.", f".{part}.")] = value
    theirs = {k: state[_timm_name(k)] for k in hf_model.state_dict()}
    return base.copied(hf_model, theirs, model)
