"""Generate text with a finished run: `python -m experiments.generate run=DIR prompt="import os"`.

The prompt is used exactly as typed, including line breaks, quotation marks and
equals signs:

    prompt="Hello, my name is"   or --prompt "def f(x):"
    prompt=-                     standard input, which is also read if there is
                                 no prompt and input is piped in (< prompt.txt)

One final line break of standard input is removed. Generation ends after
`tokens` tokens or at the model's end-of-text token; a terminal shows the text
as it is generated. By default each token is the most likely one; with a
temperature it is random:

    temperature=0.8 top_k=50 seed=1

With `sparse=true` (the default), if the device supports it, the 2:4 linears
run packed wherever that is faster for the number of tokens (models/packed.py);
a line on standard error says how many. `experiments.bench serve` times both.
On a GPU each token after the prompt is a replay of a CUDA graph
(models/decoding.py).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from experiments.config.compose import plain, typed
from experiments.config.driver import driver
from experiments.config.settings import ImplConfig
from experiments.exporting import export, files
from experiments.runs.finished import FinishedRun
from experiments.support.errors import UserError, printable
from experiments.support.names import check_bounds, check_choices, check_seed
from experiments.support.progress import say
from experiments.training.distributed import world
from experiments.training.optimization import DTYPES
from experiments.training.routine import process_settings
from models.decoding import Decoder
from models.gpt2 import GPT
from models.hf import CausalLM
from models.packed import pack
from models.sparse import add_low_rank

if TYPE_CHECKING:
    from experiments.finetuning.inputs import Encoding


@dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    """Settings of a generation.

    run: directory of a finished run of a causal model.
    temperature: divisor of the logits; 0 = always the most likely token.
    top_k: sample among this many of the most likely tokens; null = all.
    dtype: the weights' dtype.
    """

    run: str
    prompt: str
    tokens: int = 64
    temperature: float = 0.0
    top_k: int | None = None
    seed: int = 0
    dtype: str = "bf16"
    sparse: bool = True

    def __post_init__(self) -> None:
        check_choices(self, "", {"dtype": DTYPES})
        count = (1, math.inf)
        check_bounds(self, "", tokens=count, top_k=count, temperature=(0, math.inf))
        check_seed(self.seed)
        if not self.temperature and self.top_k is not None:
            raise ValueError(
                "top_k needs sampling, but temperature=0 takes the most likely token; add "
                "temperature=1, for example"
            )


@dataclass(frozen=True)
class GenerateConfig:
    """A generation's whole config: `GenerationSettings`, the prompt and the group impl."""

    settings: GenerationSettings
    impl: ImplConfig


def generation_model(run: FinishedRun) -> CausalLM:
    """The run's model as a transformers model made of `nn.Linear`s, which has a KV cache.

    Raises:
        UserError: it is no causal language model.
    """
    model = run.model()
    if not isinstance(model, GPT | CausalLM):
        raise UserError(f"{run.directory} is a {type(model).__name__}, which continues no text")
    terms = export.split_low_rank(model)
    if isinstance(model, GPT):
        model, terms = (
            CausalLM(files.to_transformers(model)),
            {f"model.{n}": t for n, t in terms.items()},
        )
    for name, (left, right) in terms.items():
        add_low_rank(model.get_submodule(name), left, right)
    return model


def choose(logits: Tensor, settings: GenerationSettings, generator: torch.Generator) -> Tensor:
    """The next token of each row, int64 [B], from logits [B, V]."""
    if settings.temperature == 0:
        return logits.argmax(-1)
    # In fp64 and relative to the largest logit, so that temperatures near 0 do not overflow to NaN.
    relative = (logits - logits.amax(-1, keepdim=True)).double() / settings.temperature
    scores, tokens = relative.sort(descending=True, stable=True)
    if settings.top_k is not None:
        scores[:, settings.top_k :] = -math.inf
    drawn = torch.multinomial(scores.softmax(-1), 1, generator=generator)
    return tokens.gather(-1, drawn)[:, 0]


@torch.no_grad()
def continuation(
    decoder: Decoder, ids: Tensor, settings: GenerationSettings, vocabulary: int
) -> Iterator[Tensor]:
    """Yield the next `settings.tokens` tokens, each [B], after the rows ids [B, T]. Only the first
    `vocabulary` ids are chosen, since a model may have more ids than its tokenizer."""
    generator = torch.Generator(ids.device).manual_seed(settings.seed)
    logits = decoder.read(ids)
    for left in reversed(range(settings.tokens)):
        token = choose(logits[:, :vocabulary].float(), settings, generator)
        yield token
        if left:
            logits = decoder.step(token)


def text_of(encoding: Encoding, prompt: list[int], tokens: Iterable[int]) -> Iterator[str]:
    """Yield the text of the prompt, then the text of the tokens piece by piece until the
    end-of-text token.

    A character whose bytes are spread over several tokens is yielded once it is complete.
    """
    ids = list(prompt)
    shown = text = encoding.decode(ids)
    yield shown
    for token in tokens:
        if token == encoding.eot_token:
            break
        ids.append(token)
        text = encoding.decode(ids)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            yield text[len(shown) :]
            shown = text
    yield text[len(shown) :]


def show(pieces: Iterable[str]) -> None:
    """Print the pieces of a text: on a terminal as they come and without control characters,
    otherwise all at the end."""
    if sys.stdout.isatty():
        for piece in pieces:
            print(printable(piece), end="", flush=True)
        print()
    else:
        print("".join(pieces))


def run(config: GenerateConfig) -> None:
    """Generate a text and print it.

    Raises:
        UserError: no causal model, or the prompt is longer than it takes.
    """
    settings, impl = config.settings, config.impl
    with process_settings(impl), world(impl.device) as here:
        source = FinishedRun.open(Path(settings.run))
        model, encoding = generation_model(source), source.tokenizer()
        prompt = encoding.encode_ordinary_batch([settings.prompt])[0]
        start = prompt or [encoding.eot_token]
        if (available := model.block_size - len(start)) < 1:
            raise UserError(
                f"the prompt's {len(start)} tokens leave no room for more in the "
                f"{model.block_size} that the model takes; shorten it"
            )
        if settings.tokens > available:
            say(
                f"tokens={settings.tokens} does not fit the model: it is {available} here",
                sys.stderr,
            )
            settings = replace(settings, tokens=available)
        model = model.to(here.device, DTYPES[settings.dtype] or torch.float32).eval()
        ids = torch.tensor([start], device=here.device)
        if settings.sparse:
            pack_where_faster(model, ids.is_cuda)
        decoder = Decoder(model.model, 1, len(start) + settings.tokens)
        tokens = continuation(decoder, ids, settings, encoding.n_vocab)
        show(text_of(encoding, prompt, map(int, tokens)))


def pack_where_faster(model: CausalLM, graphs: bool) -> None:
    """Pack the 2:4 linears of the model wherever that is faster, and say on standard error how many
    were packed, or why none."""
    try:
        found = pack(model, graphs=graphs)
    except ValueError as reason:
        say(f"dense products: {reason}", sys.stderr)
        return
    packed = sum(limits is not None for limits in found.values())
    say(f"2:4 products in {packed} of {len(found)} linears", sys.stderr)


def read_prompt(prompt: str | None) -> str:
    """The prompt: `prompt` itself, or the content of standard input.

    Raises:
        UserError: there is none, or it is not UTF-8.
    """
    if prompt != "-" and (prompt is not None or sys.stdin.isatty()):
        if prompt is None:
            raise UserError('prompt="..." is missing; or prompt=- to type it here')
        return prompt
    content = sys.stdin.buffer.read()
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"standard input is not UTF-8: byte {error.start} is 0x{content[error.start]:02x}; "
            "save it as UTF-8"
        ) from error
    return text.removesuffix("\n").removesuffix("\r")


def freeze_generation(composed: Any, prompt: str | None = None) -> GenerateConfig:
    """The `GenerateConfig` of a composed `DictConfig`, with the prompt from the command line."""
    values = plain(composed, "run", "impl", "prompt")
    if values["run"] is None:
        raise UserError("run=DIR is missing: the directory of a finished run")
    impl = typed(ImplConfig, "impl", values.pop("impl"))
    # `prompt` is in the file only for --help; the other settings are checked before it is read.
    settings = typed(GenerationSettings, "the config", {**values, "prompt": ""})
    return GenerateConfig(replace(settings, prompt=read_prompt(prompt)), impl)


@driver("generate", freeze_generation, "begins it anew", texts=("prompt",))
def main(config: GenerateConfig) -> None:
    run(config)


if __name__ == "__main__":
    main()
