"""Adapts causal language models of transformers (GPT-2, OPT, LLaMA, Mistral) to this project's
trainer, and this project's models to `transformers.Trainer`.

Shapes: B sequences, T tokens, V = vocab_size.

transformers' GPT-2 has `Conv1D` modules with weights [in, out] for its linears. Here they become
`nn.Linear` with weights [out, in], the only kind that methods convert; `save_pretrained` converts
them back. No remote code is run and no pickle is loaded.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.base import Model, check_length, check_plain

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# The `model_type` of the supported configs. transformers also makes "causal models" of others, such
# as BERT, whose tokens attend to later ones.
FAMILIES = ("gpt2", "opt", "llama", "mistral")
# The names of the rates of dropout and layer drop in these configs.
DROPOUT = (
    *("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    *("dropout", "attention_dropout", "activation_dropout", "layerdrop"),
)


def cached(model: nn.Module) -> dict[str, Any]:
    """An empty KV cache as the keyword argument of `model`, a model of transformers, which releases
    name differently. It grows by the tokens of each call."""
    from transformers import DynamicCache

    known = inspect.signature(model.forward).parameters
    return {"cache" if "cache" in known else "past_key_values": DynamicCache()}


class CausalLM(Model):
    """A causal language model of transformers, as the module `model`; its linears are replaced.

    block_size: longest sequence.
    """

    TRUNK: ClassVar[str] = "model"

    def __init__(self, model: PreTrainedModel, block_size: int | None = None) -> None:
        super().__init__()
        self.dropout: dict[str, float] = {}  # the rates in the checkpoint, which exports get back
        self.conv1d = tuple(_linearize(model))
        self.model = model
        self.names = frozenset(model.state_dict())
        self.vocab_size: int = model.config.vocab_size
        self.block_size: int = block_size or model.config.max_position_embeddings

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, block_size: int | None = None, weights: bool = True
    ) -> CausalLM:
        """The model of a checkpoint in a local folder, in fp32 and without dropout; without its
        `weights`, which are then not read, on the meta device. Raises a `ValueError` if it is not a
        model of one of `FAMILIES` in safetensors, or `block_size` is more than the model's longest
        sequence."""
        from transformers import AutoConfig
        from transformers import AutoModelForCausalLM as Auto

        with one_line(folder):
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            if config.model_type not in FAMILIES:
                raise ValueError(f"it is a {config.model_type}, none of {', '.join(FAMILIES)}")
        dropout = {name: getattr(config, name) for name in DROPOUT if hasattr(config, name)}
        config.update(dict.fromkeys(dropout, 0.0))
        if weights:
            model = read_checkpoint(Auto, folder, config=config, trust_remote_code=False)
        else:
            with one_line(folder), torch.device("meta"):
                model = Auto.from_config(config, trust_remote_code=False).eval()
        longest = config.max_position_embeddings
        if block_size is not None and block_size > longest:
            raise ValueError(f"block_size={block_size}, but {folder} takes at most {longest}")
        self = cls(model.float(), block_size)
        self.dropout = dropout
        return self

    def forward(self, input: Tensor, target: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Token ids [B, T] -> (logits [B, T, V] of every position, loss or None).

        `target` [B, T] has the ids to predict, already shifted by one; -1 is ignored. The loss is
        the mean cross entropy in nats. Raises a `ValueError` if the sequence is longer than
        `block_size`.
        """
        check_length(input.shape[1], self.block_size)
        logits = self.model(input_ids=input, use_cache=False).logits
        if target is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-1)

    @torch.no_grad()
    def save_pretrained(self, folder: str | Path) -> None:
        """Write a checkpoint in safetensors for transformers. Raises a `ValueError` if the model
        has tensors that its architecture does not have, as while a sparse method is attached."""
        state = self.model.state_dict()
        check_plain(type(self.model).__name__, state, self.names)
        for name in self.conv1d:
            state[f"{name}.weight"] = state[f"{name}.weight"].t().contiguous()
        config = self.model.config
        zeros = {name: getattr(config, name) for name in self.dropout}
        config.update(self.dropout)
        self.model.save_pretrained(folder, state_dict=state)
        config.update(zeros)


class ForTrainer(nn.Module):
    """A causal language model of this project, as the module `model`, in the form that
    `transformers.Trainer` takes.

    After the training, `models.gpt2.to_hf(trained.model)` converts it to transformers.
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

        `labels` [B, T] are the ids themselves, which are shifted here; -100 is ignored. Padding
        must follow the text: there it does not change the result, and the mask is not needed.

        Raises a `ValueError` if the mask hides a token before a visible one.
        """
        from transformers.modeling_outputs import CausalLMOutput

        if attention_mask is not None and bool(attention_mask.diff(dim=1).gt(0).any()):
            raise ValueError(
                "attention_mask hides a token before a visible one; pad on the right, and mask "
                "nothing else"
            )
        target = None
        if labels is not None:
            target = F.pad(labels[:, 1:], (0, 1), value=-1)
            target = target.masked_fill(target == -100, -1)
        logits, loss = self.model(input_ids, target)
        return CausalLMOutput(loss=loss, logits=logits)


def _unshare(module: nn.Module, state: dict[str, Tensor], prefix: str, metadata: Any) -> None:
    """Copy tied tensors, because safetensors does not accept two names for one storage."""
    seen: set[int] = set()
    for name, tensor in state.items():
        if tensor.data_ptr() in seen:
            state[name] = tensor.clone()
        seen.add(tensor.data_ptr())


@contextmanager
def one_line(folder: str | Path, what: str = "causal language model") -> Iterator[None]:
    """A context in which transformers reads `folder`; its errors are raised as a `ValueError` with
    one line."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"no {what} in {folder}: {reason}") from error


def read_checkpoint(kind: Any, folder: str | Path, **options: Any) -> Any:
    """The model that `kind.from_pretrained` reads from the safetensors in a local folder. Raises a
    `ValueError` if the folder does not exist or has no model, or weights are missing, which
    transformers would initialise at random."""
    if not Path(folder).is_dir():
        raise ValueError(f"no causal language model in {folder}: there is no such folder")
    with one_line(folder):
        loaded, loading = kind.from_pretrained(
            folder, use_safetensors=True, output_loading_info=True, **options
        )
    if missing := sorted(loading["missing_keys"]):
        raise ValueError(
            f"no causal language model in {folder}: its files lack {missing[0]} and "
            f"{len(missing) - 1} more, which would be initialised at random"
        )
    return loaded


@torch.no_grad()
def _linearize(model: nn.Module) -> list[str]:
    """Replace every `Conv1D` by an `nn.Linear` with the same output; return their names."""
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
