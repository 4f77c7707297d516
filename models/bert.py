"""BERT (Devlin et al., 2019, arXiv 1810.04805) and Cramming's variant of it (Geiping and Goldstein,
2023, arXiv 2212.14034) as masked language models, with weights from and to transformers.

Shapes: B sequences, T tokens, C = n_embd channels, H = n_head heads, V = vocab_size, N predicted
tokens.

The original has layer norm after each residual sum (post-norm), biases, learned positions, GELU
(erf), dropout, and a transform before the decoder. Cramming has layer norm before each sub-layer
and after the last one (pre-norm), linears without biases, GEGLU, scaled sinusoidal positions, no
dropout and no transform. Both normalise the embeddings and have two token types. The decoder is
tied to the word embeddings: one entry of `parameters()`, two in `state_dict()`.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import base

if TYPE_CHECKING:
    from transformers import BertForMaskedLM, BertForPreTraining

TOKEN_TYPES = 2
EPS = 1e-12  # epsilon of the layer norms

_CRAMMING: dict[str, Any] = {
    "block_size": 128,
    "pre_norm": True,
    "bias": False,
    "glu": True,
    "positions": "sinusoidal",
    "head_transform": False,
    "dropout": 0.0,
}
SIZES: dict[str, dict[str, Any]] = {
    "nano": {"n_layer": 4, "n_head": 4, "n_embd": 128, "vocab_size": 2048, **_CRAMMING},
    "base": {"n_layer": 12, "n_head": 12, "n_embd": 768},
    "large": {"n_layer": 24, "n_head": 16, "n_embd": 1024},
    "cramming": {"n_layer": 16, "n_head": 12, "n_embd": 768, "vocab_size": 32768, **_CRAMMING},
}


@dataclass(frozen=True)
class BertConfig(base.TextConfig):
    """Shape and variant of a BERT.

    n_inner: outputs of a feed-forward network's first linear; None = 4 * n_embd. With `glu` half of
        them are the gates, so that the second linear takes n_inner / 2.
    vocab_size: 30528 is BERT's 30522 rounded up to a multiple of 64.
    block_size: longest sequence.
    pre_norm: True for layer norm before each sub-layer, False for after each residual sum.
    bias: True for biases of linears; layer norms always have biases.
    glu: True for GEGLU, False for GELU.
    positions: `learned` or `sinusoidal`.
    head_transform: True for a linear, GELU and layer norm before the decoder.
    next_sentence: True for a pooler and a classifier of sentence pairs.
    """

    n_layer: int
    n_head: int
    n_embd: int
    n_inner: int | None = None
    vocab_size: int = 30528
    block_size: int = 512
    pre_norm: bool = False
    bias: bool = True
    glu: bool = False
    positions: str = "learned"
    head_transform: bool = True
    next_sentence: bool = False
    dropout: float = 0.1

    sizes = SIZES

    def __post_init__(self) -> None:
        base.check_multiple(self, "n_embd", "n_head")
        base.check_choice(self, "positions", "learned", "sinusoidal")


def layer_norm(config: BertConfig) -> nn.LayerNorm:
    """A layer norm over the channels."""
    return nn.LayerNorm(config.n_embd, eps=EPS)


class SinusoidalPositions(nn.Module):
    """Sinusoidal position embeddings of Vaswani et al. (2017) times a learned scale, initially
    1 / sqrt(C) (Hua et al., 2022, arXiv 2202.10447): positions [T] -> [T, C]."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.table: Tensor
        table = base.sinusoids(config.block_size, config.n_embd)
        self.register_buffer("table", table, persistent=False)
        self.scale = nn.Parameter(torch.full((1,), config.n_embd**-0.5))

    def forward(self, positions: Tensor) -> Tensor:
        return self.scale * self.table[positions]


class Embeddings(nn.Module):
    """Normalised sum of token, type and position embeddings: ids and types [B, T] -> [B, T, C]."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.n_embd)
        self.position_embeddings = (
            nn.Embedding(config.block_size, config.n_embd)
            if config.positions == "learned"
            else SinusoidalPositions(config)
        )
        self.token_type_embeddings = nn.Embedding(TOKEN_TYPES, config.n_embd)
        self.norm = layer_norm(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, input: Tensor, token_types: Tensor | None) -> Tensor:
        if token_types is None:
            token_types = torch.zeros_like(input)
        positions = torch.arange(input.shape[1], device=input.device)
        x = self.word_embeddings(input) + self.token_type_embeddings(token_types)
        return self.dropout(self.norm(x + self.position_embeddings(positions)))


class Attention(nn.Module):
    """Bidirectional self-attention, [B, T, C] -> [B, T, C]; mask [B, 1, 1, T] or None."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.n_head, self.rate = config.n_head, config.dropout
        qkv = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.self = nn.ModuleDict({"qkv": qkv})
        self.output = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        qkv = base.split_heads(self.self["qkv"](x), self.n_head)
        rate = self.rate * self.training
        y = F.scaled_dot_product_attention(*qkv, attn_mask=mask, dropout_p=rate)
        return self.dropout(self.output(y.transpose(1, 2).flatten(2)))


def geglu(u: Tensor) -> Tensor:
    """value * GELU(gate), with the tanh form of GELU: [..., 2 n] -> [..., n]. The values are the
    first half, the gates the second half."""
    value, gate = u.chunk(2, dim=-1)
    return value * F.gelu(gate, approximate="tanh")


class Layer(nn.Module):
    """Transformer layer, [B, T, C] -> [B, T, C]."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.pre_norm = config.pre_norm
        self.attention = Attention(config)
        self.norm_1 = layer_norm(config)
        self.mlp = base.MLP(config, geglu if config.glu else F.gelu, config.glu, config.bias)
        self.norm_2 = layer_norm(config)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = base.residual(x, self.norm_1, lambda y: self.attention(y, mask), self.pre_norm)
        return base.residual(x, self.norm_2, self.mlp, self.pre_norm)


class Pooler(nn.Module):
    """Hidden states [B, T, C] -> tanh of a linear map of the first token's, [B, C]."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.tanh(self.dense(hidden[:, 0]))


class Bert(nn.Module):
    """BERT without its heads. `pooler` is None unless the config has `next_sentence`."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.layer = nn.ModuleList(Layer(config) for _ in range(config.n_layer))
        self.norm = layer_norm(config) if config.pre_norm else nn.Identity()
        self.pooler = Pooler(config) if config.next_sentence else None

    def forward(
        self, input: Tensor, token_types: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> Tensor:
        """Token ids [B, T] -> hidden states [B, T, C]. Raises ValueError if the sequence is longer
        than `block_size`.

        Args:
            token_types: [B, T] of 0 and 1; None = all 0.
            attention_mask: [B, T], 0 at padding; None = no padding, which is faster.
        """
        base.check_length(input.shape[1], self.config.block_size)
        mask = None if attention_mask is None else attention_mask.bool()[:, None, None, :]
        x = self.embeddings(input, token_types)
        for layer in self.layer:
            x = layer(x, mask)
        return self.norm(x)


def predictions(config: BertConfig) -> Any:
    """The head that predicts masked tokens, [..., C] -> [..., V]: a decoder, in the original after
    a linear, an activation and a layer norm."""
    width, bias = config.n_embd, config.bias
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    if config.head_transform:
        parts |= {"dense": nn.Linear(width, width, bias=bias), "gelu": nn.GELU()}
        parts |= {"norm": layer_norm(config)}
    decoder = nn.Linear(width, config.vocab_size, bias=bias)
    return nn.Sequential(OrderedDict(transform=nn.Sequential(parts), decoder=decoder))


class BertLM(base.Model):
    """BERT as a masked language model, with the classifier of sentence pairs if the config has
    `next_sentence`."""

    TRUNK: ClassVar[str] = "bert"

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.bert = Bert(config)
        self.predictions = predictions(config)
        self.predictions.decoder.weight = self.bert.embeddings.word_embeddings.weight
        self.seq_relationship = nn.Linear(config.n_embd, 2) if config.next_sentence else None
        base.draw_weights(self)

    def forward(
        self,
        input: Tensor,
        target: Tensor | None = None,
        token_types: Tensor | None = None,
        attention_mask: Tensor | None = None,
        next_sentence: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Token ids [B, T] -> (logits, loss or None).

        Without `target` the logits are those of all positions, [B, T, V]. With `target` only those
        of the N predicted positions are computed, [N, V], in row-major order, which saves most of
        the head's work. The loss is their mean cross entropy in nats plus, with `next_sentence`,
        the mean cross entropy of the pairs. Raises ValueError if the sequence is too long, or
        `next_sentence` is given to a model without the classifier.

        Args:
            target: [B, T], the ids to predict, -1 elsewhere; at least one.
            token_types, attention_mask: see `Bert`.
            next_sentence: [B], 0 where the second sentence follows the first, 1 where it does not.
        """
        if next_sentence is not None and self.seq_relationship is None:
            raise ValueError(
                "the model has no classifier of sentence pairs: set model.next_sentence=true, or "
                "data.next_sentence=false"
            )
        hidden = self.bert(input, token_types, attention_mask)
        if target is None:
            return self.predictions(hidden), None
        predicted = target != -1
        logits = self.predictions(hidden[predicted])
        loss = F.cross_entropy(logits, target[predicted])
        if next_sentence is not None:
            loss = loss + F.cross_entropy(self.sentence_logits(hidden), next_sentence)
        return logits, loss

    def sentence_logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [B, T, C] -> logits [B, 2] of (follows, does not follow)."""
        assert self.bert.pooler is not None and self.seq_relationship is not None
        return self.seq_relationship(self.bert.pooler(hidden))


# ------------------------------------------------------------------------------ transformers

# Parts of our names and of the names in transformers.
_NAMES = (
    ("bert.layer.", "bert.encoder.layer."),
    (".attention.output.", ".attention.output.dense."),
    (".norm_1.", ".attention.output.LayerNorm."),
    (".mlp.fc1.", ".intermediate.dense."),
    (".mlp.fc2.", ".output.dense."),
    (".norm_2.", ".output.LayerNorm."),
    ("embeddings.norm.", "embeddings.LayerNorm."),
    ("transform.norm.", "transform.LayerNorm."),
    ("predictions.", "cls.predictions."),
    ("seq_relationship.", "cls.seq_relationship."),
)
_QKV = ("query", "key", "value")
# Our fields by the names of transformers' settings, and what BERT has always there.
_FIELDS = {
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "hidden_size": "n_embd",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "block_size",
    "hidden_dropout_prob": "dropout",
}
_FIXED: dict[str, Any] = {
    "hidden_act": "gelu",
    "layer_norm_eps": EPS,
    "type_vocab_size": TOKEN_TYPES,
}
_FORM = "pre_norm", "bias", "glu", "positions", "head_transform"  # by default the original's


def _their_names(name: str) -> list[str]:
    """The names in transformers of one of our tensors: three for the fused projection of queries,
    keys and values, else one.

    The bias of the decoder has a second name there, which is left out.
    """
    for ours, theirs in _NAMES:
        name = name.replace(ours, theirs)
    return [name.replace(".qkv.", f".{part}.") for part in _QKV] if ".qkv." in name else [name]


@torch.no_grad()
def from_hf(hf_model: BertForMaskedLM | BertForPreTraining) -> BertLM:
    """Our BERT with a copy of the weights of transformers' model, in its dtype. Raises a
    `ValueError` if the model has settings that ours does not have; all of them are named."""
    hf, theirs = hf_model.config, hf_model.state_dict()
    required = {
        "model_type": "bert",
        **_FIXED,
        "attention_probs_dropout_prob": hf.hidden_dropout_prob,  # one dropout rate for all places
        "is_decoder": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
    }
    problems = []
    if getattr(hf, "position_embedding_type", "absolute") != "absolute":  # in older releases
        problems.append(f"position_embedding_type={hf.position_embedding_type!r}")
    if "cls.predictions.transform.dense.weight" not in theirs:
        problems.append(f"{type(hf_model).__name__} has no head for masked language modelling")
    values = base.converted("BERT", hf, _FIELDS, required, *problems)
    pairs = "cls.seq_relationship.weight" in theirs
    config = BertConfig(**values, n_inner=hf.intermediate_size, next_sentence=pairs)
    model = BertLM(config)
    own = {k: torch.cat([theirs[n] for n in _their_names(k)]) for k in model.state_dict()}
    return base.copied(model, own, hf_model)


@torch.no_grad()
def to_hf(model: BertLM) -> BertForMaskedLM | BertForPreTraining:
    """The transformers model with a copy of our weights, in their dtype: `BertForPreTraining` if
    there is a classifier of sentence pairs, else `BertForMaskedLM`. Raises a `ValueError` if the
    model is not of the original form, or has tensors that BERT does not have, as while a sparse
    method is attached."""
    import transformers

    config, state = model.config, model.state_dict()
    form = {name: getattr(BertConfig, name) for name in _FORM}
    if other := [f"{k}={getattr(config, k)}" for k, v in form.items() if getattr(config, k) != v]:
        raise ValueError(
            f"transformers' BERT does not support {', '.join(other)}: only the original form "
            "can be exported"
        )
    base.check_as_built("BERT", model)
    kind = "BertForPreTraining" if config.next_sentence else "BertForMaskedLM"
    hf_model: Any = getattr(transformers, kind)(
        transformers.BertConfig(
            **{theirs: getattr(config, ours) for theirs, ours in _FIELDS.items()},
            **_FIXED,
            intermediate_size=config.ffn_width,
            attention_probs_dropout_prob=config.dropout,
        )
    )
    theirs: dict[str, Tensor] = {}
    for name, tensor in state.items():
        names = _their_names(name)
        theirs.update(zip(names, tensor.chunk(len(names)), strict=True))
    theirs["cls.predictions.bias"] = state["predictions.decoder.bias"]
    return base.copied(hf_model, theirs, model)
