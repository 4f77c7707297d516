"""Generation by causal models of transformers with a cache of fixed size: each token after the
prompt is one replay of a CUDA graph."""

import functools
import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from models.hf import cached


@functools.cache
def _caches() -> tuple[Any, Any]:
    """The classes of a cache of fixed size for one block, and of that block's part of it."""
    from transformers.cache_utils import Cache, StaticLayer

    class OwnCache(Cache):
        """The cache that a block has for itself, whatever its number is."""

        layers: Any

        def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Any:
            return self.layers[0].update(key_states, value_states)

    class FixedLayer(StaticLayer):
        """Keys and values [B, heads, length, C], written at positions that all layers share;
        transformers' own layers launch three kernels each to count them."""

        at: Tensor
        keys: Any
        values: Any

        def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Any:
            if not self.is_initialized:
                self.keys, self.values = (
                    x.new_zeros(*x.shape[:2], self.max_cache_len, x.shape[3])
                    for x in (key_states, value_states)
                )
                self.is_initialized = True
            self.keys.index_copy_(2, self.at, key_states)
            self.values.index_copy_(2, self.at, value_states)
            return self.keys, self.values

        def get_seq_length(self, *_: Any) -> Any:
            return self.at[0] if self.is_initialized else 0

    return OwnCache, FixedLayer


class Decoder:
    """A model that continues `rows` texts of at most `length` tokens each.

    A model with a sliding window shorter than `length` gets a cache that grows, and no graph.

    Args:
        model: a causal model of transformers, in evaluation mode and on its device. If its linears
            are packed or changed later, make a new decoder.
        compiled: compile the model's blocks for steps, which fuses norms, rotations and
            activations. As one graph serves all blocks, this takes some seconds.
    """

    def __init__(self, model: Any, rows: int, length: int, compiled: bool = False) -> None:
        from transformers.cache_utils import Cache

        window = getattr(model.config, "sliding_window", None)
        self.fixed = window is None or length <= window
        self.most, self.used = length, 0
        length += -length % 8  # as attention wants its mask
        self.model, self.compiled = model, compiled and self.fixed
        self.options = cached(model)
        if self.fixed:
            own: Any = [_caches()[1](length) for _ in range(model.config.num_hidden_layers)]
            self.layers, self.options = own, dict.fromkeys(self.options, Cache(layers=own))
        # Before transformers 5.6 models want these positions, too.
        self.told = "cache_position" in inspect.signature(model.forward).parameters
        with torch.device(model.device):
            self.positions, self.at = torch.arange(length), torch.zeros(1, dtype=torch.int64)
            self.tokens = torch.zeros(rows, 1, dtype=torch.int64)
        self.stream: torch.cuda.Stream | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.output = self.tokens

    def place(self, position: int) -> None:
        """Write the next tokens from this position on; those before it stay."""
        self.used = position
        self.at.fill_(position)

    def count(self, tokens: int) -> None:
        self.used += tokens
        if self.fixed and self.used > self.most:
            raise ValueError(f"{self.used} tokens do not fit into a decoder for {self.most}")

    @torch.no_grad()
    def read(self, ids: Tensor) -> Tensor:
        """Begin with the prompts ids [rows, T]; the logits [rows, V] of the tokens after them."""
        if self.fixed:
            self.place(0)
        else:
            self.options = cached(self.model)
        self.count(ids.shape[1])
        return self.logits(ids)

    @torch.no_grad()
    def logits(self, ids: Tensor) -> Tensor:
        """The logits [rows, V] of the tokens after ids [rows, T], which follow those so far."""
        options: dict[str, Any] = {**self.options, "use_cache": True, "logits_to_keep": 1}
        if self.fixed:
            at = self.positions[: ids.shape[1]] + self.at
            hidden = self.positions[None, None, None, :] > at[None, None, :, None]
            # In the form that attention adds to the scores; each layer would make one of a bool.
            mask = torch.zeros_like(hidden, dtype=self.model.dtype).masked_fill_(hidden, -math.inf)
            options |= {"attention_mask": mask, "position_ids": at[None]}
            if self.told:
                options["cache_position"] = at
            self.at += ids.shape[1]
            for layer in self.layers:
                layer.at = at
        return self.model(input_ids=ids, **options).logits[:, -1]

    def step(self, tokens: Tensor) -> Tensor:
        """Add one token to each text, tokens [rows]; the logits [rows, V] of the next ones, which
        the next call may overwrite. On a GPU the first call is launched, the second is captured,
        and later ones replay it. Raises ValueError if the texts have `length` tokens already."""
        self.count(1)
        self.tokens.copy_(tokens[:, None])
        if not self.fixed or not self.tokens.is_cuda:
            with self._blocks_compiled():
                return self.logits(self.tokens)
        with torch.cuda.device_of(self.tokens):
            return self._replayed()

    def _replayed(self) -> Tensor:
        if self.graph is None:
            current, first = torch.cuda.current_stream(), self.stream is None
            self.stream = self.stream or torch.cuda.Stream()
            self.stream.wait_stream(current)
            if first:  # compiles and plans, which cannot be captured
                with torch.cuda.stream(self.stream), self._blocks_compiled():
                    self.output = self.logits(self.tokens)
                current.wait_stream(self.stream)
                return self.output
            graph = torch.cuda.CUDAGraph()
            mode: Any = {"stream": self.stream, "capture_error_mode": "thread_local"}
            with self._blocks_compiled(), torch.cuda.graph(graph, **mode):
                self.output = self.logits(self.tokens)
            self.graph = graph
        self.graph.replay()
        return self.output

    @contextmanager
    def _blocks_compiled(self) -> Iterator[None]:
        """A context in which the model's blocks run compiled, if they are to. They share a graph
        because each gets a cache of its own, and its number is no constant to the compiler."""
        if not self.compiled:
            yield
            return
        import torch._dynamo

        count = len(self.layers)
        lists = (m for m in self.model.modules() if isinstance(m, nn.ModuleList))
        blocks: Any = next(m for m in lists if len(m) == count)
        [shared] = self.options.values()

        def with_own_cache(block: Any, layer: Any) -> Any:
            run, own = torch.compile(block.forward, dynamic=False), _caches()[0](layers=[layer])

            def forward(*args: Any, **options: Any) -> Any:
                args = tuple(own if value is shared else value for value in args)
                return run(*args, **{k: own if v is shared else v for k, v in options.items()})

            return forward

        settings = {"allow_unspec_int_on_nn_module": True, "recompile_limit": 64}
        try:
            for block, layer in zip(blocks, self.layers, strict=True):
                block.forward = with_own_cache(block, layer)
            with torch._dynamo.config.patch(settings):
                yield
        finally:
            for block in blocks:
                vars(block).pop("forward", None)
