"""Adapts causal language models of transformers (GPT-2, OPT, LLaMA, Mistral) to this project's
trainer.

Shapes: B sequences, T tokens, V = vocab_size.

GPT-2 of transformers keeps its linears as `Conv1D`, with the weight as [in, out]; here they become
`nn.Linear` with the weight as [out, in], so that methods see one kind of linear, and go back into
their own form in `save_pretrained`. No remote code is run and no pickle is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.base import Model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# `model_type` of their configs. transformers makes a "causal model" of others as well, such as
# BERT, whose tokens see those after them.
FAMILIES = ("gpt2", "opt", "llama", "mistral")
# The rates of dropout and layer drop in their configs.
DROPOUT = (
    *("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    *("dropout", "attention_dropout", "activation_dropout", "layerdrop"),
)


class CausalLM(Model):
    """A causal language model of transformers, held as `model`, which is changed in place.

    `block_size` is the longest sequence it takes.
    """

    TRUNK: ClassVar[str] = "model"

    def __init__(self, model: PreTrainedModel, block_size: int | None = None) -> None:
        super().__init__()
        self.dropout: dict[str, float] = {}  # what the config says, to be exported again
        self.conv1d = tuple(_linearize(model))
        self.model = model
        self.names = frozenset(model.state_dict())
        self.vocab_size: int = model.config.vocab_size
        self.block_size: int = block_size or model.config.max_position_embeddings

    @classmethod
    def from_pretrained(cls, folder: str | Path, block_size: int | None = None) -> CausalLM:
        """The checkpoint in a local folder, in fp32 and without dropout.

        Raises:
            ValueError: it is not a model of one of `FAMILIES` in safetensors, or is made for
                shorter sequences than `block_size`.
        """
        from transformers import AutoModelForCausalLM

        config, dropout = _config(folder)
        model = read_checkpoint(
            AutoModelForCausalLM, folder, config=config, trust_remote_code=False
        )
        longest = config.max_position_embeddings
        if block_size is not None and block_size > longest:
            raise ValueError(f"block_size={block_size}, but {folder} takes at most {longest}")
        self = cls(model.float(), block_size)
        self.dropout = dropout
        return self

    @classmethod
    def shape_of(cls, folder: str | Path, block_size: int | None = None) -> CausalLM:
        """The model that `from_pretrained` gives, on the meta device. Raises ValueError as it does,
        but for the weights, which are not read."""
        from transformers import AutoModelForCausalLM

        config, dropout = _config(folder)
        with one_line(folder), torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        self = cls(model.float().eval(), block_size)
        self.dropout = dropout
        return self

    def forward(self, input: Tensor, target: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Token ids [B, T] -> (logits [B, T, V] of every position, loss or None).

        `target` [B, T] holds the ids to predict, already shifted by one; -1 is ignored. The loss is
        the mean cross entropy in nats. A ValueError tells of a sequence longer than `block_size`.
        """
        if input.shape[1] > self.block_size:
            raise ValueError(
                f"sequence of {input.shape[1]} tokens is longer than the model's "
                f"block_size={self.block_size}"
            )
        logits = self.model(input_ids=input, use_cache=False).logits
        if target is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-1)

    @torch.no_grad()
    def save_pretrained(self, folder: str | Path) -> None:
        """Write a checkpoint in safetensors that plain transformers loads.

        Raises:
            ValueError: the model holds tensors that its architecture does not have, as it does
                while a sparse method is attached.
        """
        state = self.model.state_dict()
        if extra := sorted(state.keys() ^ self.names):
            raise ValueError(
                f"not a plain {type(self.model).__name__} ({extra[0]} and {len(extra) - 1} more "
                "names differ); call the method's finalize(model) first"
            )
        for name in self.conv1d:
            state[f"{name}.weight"] = state[f"{name}.weight"].t().contiguous()
        config = self.model.config
        zeros = {name: getattr(config, name) for name in self.dropout}
        config.update(self.dropout)
        try:
            self.model.save_pretrained(folder, state_dict=state)
        finally:
            config.update(zeros)


class ForTrainer(nn.Module):
    """A causal language model of this project in the form that `transformers.Trainer` takes.

    It is held as `model`; `models.gpt2.to_hf(trained.model)` makes one of transformers of it.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.register_state_dict_post_hook(_unshare)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> Any:
        """Token ids [B, T] -> transformers' `CausalLMOutput` with the logits [B, T, V] and, given
        labels, the loss.

        `labels` [B, T] are the ids themselves, which are shifted here; -100 is ignored. What is
        padded must follow the text, where it changes nothing: a ValueError tells of other masks.
        """
        from transformers.modeling_outputs import CausalLMOutput

        if attention_mask is not None and bool(attention_mask.diff(dim=1).gt(0).any()):
            raise ValueError("tokens follow a hidden one; pad on the right, and mask nothing else")
        target = None
        if labels is not None:
            target = F.pad(labels[:, 1:], (0, 1), value=-1)
            target = target.masked_fill(target == -100, -1)
        logits, loss = self.model(input_ids, target)
        return CausalLMOutput(loss=loss, logits=logits)


def _unshare(module: nn.Module, state: dict[str, Tensor], prefix: str, metadata: Any) -> None:
    """Give tied tensors copies of their own: safetensors takes no two names for one storage."""
    seen: set[int] = set()
    for name, tensor in state.items():
        if tensor.data_ptr() in seen:
            state[name] = tensor.clone()
        seen.add(tensor.data_ptr())


@contextmanager
def one_line(folder: str | Path, what: str = "causal language model") -> Iterator[None]:
    """Raise errors of transformers while it reads `folder` as a `ValueError` in one line."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"no {what} in {folder}: {reason}") from error


def _config(folder: str | Path) -> tuple[Any, dict[str, float]]:
    """(the config of a checkpoint, without dropout, the rates that it had)."""
    from transformers import AutoConfig

    with one_line(folder):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        if config.model_type not in FAMILIES:
            raise ValueError(f"it is a {config.model_type}, none of {', '.join(FAMILIES)}")
        dropout = {name: getattr(config, name) for name in DROPOUT if hasattr(config, name)}
        for name in dropout:
            setattr(config, name, 0.0)
    return config, dropout


def read_checkpoint(kind: Any, folder: str | Path, **options: Any) -> Any:
    """`kind.from_pretrained` of a local folder with safetensors, all of whose weights are there.

    Raises:
        ValueError: there is no such folder or model in it, or weights are missing, which
            transformers would fill with random numbers.
    """
    if not Path(folder).is_dir():
        raise ValueError(f"no causal language model in {folder}: there is no such folder")
    with one_line(folder):
        loaded, loading = kind.from_pretrained(
            folder, use_safetensors=True, output_loading_info=True, **options
        )
    if missing := sorted(loading["missing_keys"]):
        raise ValueError(
            f"no causal language model in {folder}: its files lack {missing[0]} and "
            f"{len(missing) - 1} more, which would be random"
        )
    return loaded


@torch.no_grad()
def _linearize(model: nn.Module) -> list[str]:
    """Replace every `Conv1D` by an `nn.Linear` of the same function; returns their names."""
    from transformers.pytorch_utils import Conv1D

    names = [name for name, module in model.named_modules() if isinstance(module, Conv1D)]
    for name in names:
        conv: Any = model.get_submodule(name)
        inputs, outputs = conv.weight.shape
        linear = nn.Linear(inputs, outputs, device="meta")
        linear.weight = nn.Parameter(conv.weight.t().contiguous())
        linear.bias = conv.bias
        model.set_submodule(name, linear.train(conv.training))
    return names
