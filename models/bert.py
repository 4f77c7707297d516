"""BERT as a masked language model, with weights from and to transformers.

Shapes: B sequences, T tokens, C = n_embd channels, V = vocab_size, N predicted tokens.

bert_encoder.py has the config, the encoder and the two variants of BERT. The original has a
transform before the decoder, Cramming's variant has none. The decoder is tied to the word
embeddings: one entry of `parameters()`, two in `state_dict()`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.base import Model, check_as_built, converted, draw_weights
from models.bert_encoder import EPS, TOKEN_TYPES, Bert, layer_norm
from models.bert_encoder import SIZES as SIZES
from models.bert_encoder import BertConfig as BertConfig

if TYPE_CHECKING:
    from transformers import BertForMaskedLM, BertForPreTraining


class Transform(nn.Module):
    """The linear, activation and layer norm before the decoder, [..., C] -> [..., C]."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.norm = layer_norm(config)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(F.gelu(self.dense(x)))


class Predictions(nn.Module):
    """The head that predicts masked tokens: hidden states [..., C] -> logits [..., V]."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.transform = Transform(config) if config.head_transform else nn.Identity()
        self.decoder = nn.Linear(config.n_embd, config.vocab_size, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.transform(x))


class BertLM(Model):
    """BERT as a masked language model, with the classifier of sentence pairs if the config has
    `next_sentence`."""

    TRUNK: ClassVar[str] = "bert"

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.bert = Bert(config)
        self.predictions = Predictions(config)
        self.predictions.decoder.weight = self.bert.embeddings.word_embeddings.weight
        self.seq_relationship = nn.Linear(config.n_embd, 2) if config.next_sentence else None
        draw_weights(self)

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
_DECODER = "predictions.decoder.weight"
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
    values = converted("BERT", hf, _FIELDS, required, *problems)
    pairs = "cls.seq_relationship.weight" in theirs
    config = BertConfig(**values, n_inner=hf.intermediate_size, next_sentence=pairs)
    model = BertLM(config).to(hf_model.dtype)
    model.load_state_dict(
        {name: torch.cat([theirs[n] for n in _their_names(name)]) for name in model.state_dict()}
    )
    return model.train(hf_model.training)


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
    check_as_built("BERT", model)
    kind = "BertForPreTraining" if config.next_sentence else "BertForMaskedLM"
    hf_model: Any = getattr(transformers, kind)(
        transformers.BertConfig(
            **{theirs: getattr(config, ours) for theirs, ours in _FIELDS.items()},
            **_FIXED,
            intermediate_size=config.ffn_width,
            attention_probs_dropout_prob=config.dropout,
        )
    )
    hf_model.to(state[_DECODER].dtype)
    theirs: dict[str, Tensor] = {}
    for name, tensor in state.items():
        names = _their_names(name)
        theirs.update(zip(names, tensor.chunk(len(names)), strict=True))
    theirs["cls.predictions.bias"] = state["predictions.decoder.bias"]
    hf_model.load_state_dict(theirs)
    return hf_model.train(model.training)
