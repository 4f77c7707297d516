"""Heads for fine-tuning: one classifies a text or predicts a number for it, one finds a span in it.

Shapes: B sequences, T tokens, C channels. Sequences are padded on the right; `attention_mask`
[B, T] is 1 at tokens and 0 at padding, and None means no padding.

The pretrained model without its own head, the trunk, is used itself, not a copy, and under the
same name, so that its linears have the same names as in pre-training and match the same globs of a
method. The heads are called `classifier` and `qa_outputs`, as in transformers; methods leave
linears with these names dense.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.base import Model, draw_weights
from models.bert import Bert, BertLM, Pooler
from models.gpt2 import GPT, Transformer
from models.hf import CausalLM


class Head(Model):
    """Base class of models with a head: the trunk of a pretrained model and its last hidden states.

    block_size: longest sequence. width: channels of the hidden states. The pretrained model's own
    head, if it has other weights than the embeddings, requires no gradient from now on.
    """

    def __init__(self, pretrained: GPT | BertLM | CausalLM) -> None:
        super().__init__()
        self.trunk_name = pretrained.TRUNK
        self.add_module(self.trunk_name, getattr(pretrained, self.trunk_name))
        if isinstance(pretrained, CausalLM):
            self.block_size = pretrained.block_size
            # It may differ from the width of the blocks: OPT-350M projects its last hidden states.
            embeddings: Any = pretrained.model.get_input_embeddings()
            self.width: int = embeddings.weight.shape[1]
            output: Any = pretrained.model.get_output_embeddings()
            if output is not None and output.weight is not embeddings.weight:
                output.requires_grad_(False)  # it is not used, and DDP would wait for its gradient
        else:
            self.block_size, self.width = pretrained.config.block_size, pretrained.config.n_embd

    @property
    def trunk(self) -> Any:
        """The pretrained model without its own head."""
        return getattr(self, self.trunk_name)

    def hidden(
        self, input: Tensor, attention_mask: Tensor | None, token_types: Tensor | None
    ) -> Tensor:
        """Token ids [B, T] -> last hidden states [B, T, C]."""
        if isinstance(self.trunk, Bert):
            return self.trunk(input, token_types=token_types, attention_mask=attention_mask)
        if isinstance(self.trunk, Transformer):
            return self.trunk(input)  # causal: no token sees the padding to its right
        base = self.trunk.base_model
        return base(
            input_ids=input, attention_mask=attention_mask, use_cache=False
        ).last_hidden_state

    def forward(
        self,
        input: Tensor,
        target: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_types: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Token ids [B, T] -> (logits, loss or None), as the class of the head says."""
        logits = self.logits(self.hidden(input, attention_mask, token_types), attention_mask)
        return logits, None if target is None else self.loss(logits, target)

    def logits(self, hidden: Tensor, attention_mask: Tensor | None) -> Tensor:
        """The logits of hidden states [B, T, C]."""
        raise NotImplementedError

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """The mean loss, in nats if it is a cross entropy."""
        return F.cross_entropy(logits.float(), target)


class Classifier(Head):
    """A classifier of sequences into `n_labels` classes, or, with `n_labels` 1, a regression: token
    ids [B, T] -> logits [B, n_labels]. Targets [B] are classes (int64); with one label they are
    numbers, and the loss is the mean squared error.

    With BERT it reads the first token, [CLS], through a tanh pooler, which is new if BERT was
    pre-trained without one. With causal models it reads the last token, the only one that attends
    to all others. As in transformers, the classifier of causal models has no bias.

    dropout: the rate before the classifier.
    """

    def __init__(
        self, pretrained: GPT | BertLM | CausalLM, n_labels: int, dropout: float = 0.0
    ) -> None:
        super().__init__(pretrained)
        self.n_labels = n_labels
        self.pooler: nn.Module | None = None
        if isinstance(self.trunk, Bert) and self.trunk.pooler is None:
            self.pooler = Pooler(self.trunk.config)
            draw_weights(self.pooler)
        self.dropout = nn.Dropout(dropout)
        biased = isinstance(self.trunk, Bert)
        self.classifier = nn.Linear(self.width, n_labels, bias=biased)
        draw_weights(self.classifier)

    def logits(self, hidden: Tensor, attention_mask: Tensor | None) -> Tensor:
        if isinstance(self.trunk, Bert):
            pooler: Any = self.trunk.pooler if self.pooler is None else self.pooler
            pooled = pooler(hidden)
        elif attention_mask is None:
            pooled = hidden[:, -1]
        else:
            last = attention_mask.long().sum(dim=1) - 1
            pooled = hidden[torch.arange(len(hidden), device=hidden.device), last]
        return self.classifier(self.dropout(pooled))

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        if self.n_labels == 1:
            return F.mse_loss(logits.squeeze(-1).float(), target.float())
        return super().loss(logits, target)


class SpanPredictor(Head):
    """Predicts the first and last token of the answer in each sequence, as BERT does for SQuAD
    (Devlin et al., arXiv 1810.04805, section 4.2): token ids [B, T] -> logits [B, T, 2] of start
    and end, minus infinity for padding. Targets [B, 2] are their positions, both 0 if the answer is
    not in the sequence; the loss is the mean of the two cross entropies."""

    def __init__(self, pretrained: GPT | BertLM | CausalLM) -> None:
        super().__init__(pretrained)
        if isinstance(self.trunk, Bert) and self.trunk.pooler is not None:
            self.trunk.pooler.requires_grad_(False)  # not used, as above
        self.qa_outputs = nn.Linear(self.width, 2)
        draw_weights(self.qa_outputs)

    def logits(self, hidden: Tensor, attention_mask: Tensor | None) -> Tensor:
        logits = self.qa_outputs(hidden).float()
        if attention_mask is None:
            return logits
        return logits.masked_fill(~attention_mask.bool().unsqueeze(-1), float("-inf"))
