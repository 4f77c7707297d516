"""The form of an export, and its files: the model for transformers, its tokenizer, a description of
the sparse tensors, or their compressed form (`models/sparse.py`).
"""

from __future__ import annotations

import importlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from common_kernels import Packed24, check24, check_nm, dequantize24, pack24, quantize24
from experiments.config.initial import HFConfig
from experiments.config.settings import DTYPES
from experiments.data.tokenizer import HFTokenizer, pretrained_tokenizer
from experiments.runs.finished import WEIGHTS_OF, FinishedRun
from experiments.support.errors import UserError
from experiments.support.names import check_choices
from models.columns import COLUMNS, divide
from models.gpt2 import GPT
from models.hf import CausalLM
from models.sparse import (
    CONFIG,
    DENSE_COLUMNS,
    DENSE_VALUES,
    FORMAT,
    POSITIONS,
    SCALES,
    VALUES,
    WEIGHTS,
    sha256_of,
)
from models.vit import ViT

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


FOLDER = "export"  # in the run directory
BITS = {"int8": 8, "int4": 4}
NONE = f"no weight of this model is 2:4, nor are {COLUMNS} columns of one"


@dataclass(frozen=True, kw_only=True)
class Form:
    """The form in which a run is written.

    weights: `sparse`, the final weights, or `dense`, the master weights.
    dtype: the dtype to which weights are rounded.
    quantize: null, or int8 or int4 to round 2:4 weights to such integers times scales.
    compressed: write 2:4 weights as values and positions.
    license: the hub's id of a license, for the model card.
    """

    weights: str = "sparse"
    dtype: str = "fp32"
    quantize: str | None = None
    compressed: bool = False
    license: str | None = None

    def __post_init__(self) -> None:
        check_choices(self, "", {"weights": WEIGHTS_OF, "dtype": DTYPES})
        if self.quantize is not None:
            check_choices(self, "", {"quantize": BITS})
        if self.compressed and self.weights != "sparse":
            raise ValueError("compressed=true holds sparse weights; leave weights=dense out")
        if self.license is not None and not re.fullmatch(r"[\w.-]+", self.license):
            raise ValueError(f"license={self.license}; give an id of the hub, apache-2.0 for one")

    @property
    def bits(self) -> int:
        """The bits of the integers; 0 without."""
        return BITS.get(self.quantize or "", 0)

    @property
    def folder(self) -> str:
        """The name of the export's folder in the run directory."""
        parts = [FOLDER, self.weights, self.dtype, self.quantize, "compressed" * self.compressed]
        return "-".join(part for part in parts if part and part not in ("sparse", "fp32"))


def tokenizer_of(run: FinishedRun, model: nn.Module) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a run in transformers' form; None for images and checkpoints without."""
    if isinstance(model, ViT):
        return None
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    if isinstance(run.shape, HFConfig):
        if not run.shape.has_tokenizer:
            return None
        return pretrained_tokenizer(str(run.shape.folder))
    encoding, shape = run.tokenizer(), getattr(model, "config", model)
    roles = {"bos_token": encoding.decode([encoding.eot_token])}
    roles["eos_token"] = roles["bos_token"]
    file = run.result["corpus"]["tokenizer"].get("file")
    if not isinstance(encoding, HFTokenizer):
        fast = Tokenizer.from_file(str(run.directory / file)) if file else _converted(encoding)
    else:
        fast = Tokenizer.from_str(encoding.text)
        if "[CLS]" in encoding.special_tokens:  # a BERT tokenizer
            roles = {f"{token[1:-1].lower()}_token": token for token in encoding.special_tokens}
    return PreTrainedTokenizerFast(
        tokenizer_object=fast, model_max_length=shape.block_size, **roles
    )


def _converted(encoding: Any) -> Any:
    """The `tokenizers.Tokenizer` of a tiktoken `Encoding`: same ids, special tokens at the end."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    special = sorted(encoding._special_tokens, key=encoding._special_tokens.__getitem__)
    converter: Any = TikTokenConverter(pattern=encoding._pat_str, extra_special_tokens=special)
    converter.load_tiktoken_bpe = lambda _: encoding._mergeable_ranks  # instead of a file
    return converter.converted()


def to_transformers(model: nn.Module) -> Any:
    """The transformers model with the weights of a plain model; of a `CausalLM`, its own."""
    if isinstance(model, CausalLM):
        return model.model
    convert = getattr(importlib.import_module(type(model).__module__), "to_hf", None)
    if convert is None:
        raise UserError(
            f"transformers has no form of a {type(model).__name__}; nothing is exported"
        )
    try:
        return convert(model)
    except ValueError as error:
        raise UserError(f"this model cannot be exported: {error}") from error


def write(
    model: nn.Module,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    dtype: torch.dtype = torch.float32,
) -> str:
    """Write config and weights of a plain model as transformers' `save_pretrained` does, and its
    tokenizer, at whose end-of-text token GPT-2 then stops; return the transformers class's name."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    inner = to_transformers(model)
    to_save: Any = model if isinstance(model, CausalLM) else inner
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
        if isinstance(model, GPT):
            for settings in (inner.config, inner.generation_config):
                settings.bos_token_id = settings.eos_token_id = tokenizer.eos_token_id
    to_save.to(dtype).save_pretrained(folder)
    return type(inner).__name__


@torch.no_grad()
def round_weights(model: nn.Module, linears: list[str], dtype: torch.dtype) -> None:
    """Round all weights to `dtype`, in place and without changing their own dtype, and make each
    zero of `linears` +0: multiplying by a mask leaves -0 behind."""
    for name, parameter in model.named_parameters():
        rounded = parameter.to(dtype).to(parameter.dtype)
        if not torch.equal(rounded.isfinite(), parameter.isfinite()):
            raise UserError(
                f"{name} holds {float(parameter.abs().max()):.3g}, which is too large for "
                f"{str(dtype)[6:]}; export it with dtype=bf16"
            )
        parameter.copy_(rounded)
    for linear in linears:
        weight = model.get_parameter(f"{linear}.weight")
        weight.masked_fill_(weight == 0, 0.0)


def where_stored(
    model: nn.Module, linears: list[str], folder: Path
) -> dict[str, tuple[str, int, slice]]:
    """(linear, axis of its inputs, its rows) of each tensor in a folder, by name, that holds the
    weights of one of `linears` of the written `model`, or some rows of them.

    They are found by content, whatever transformers' names, transpositions and splits are.
    """
    weights = {linear: model.get_parameter(f"{linear}.weight") for linear in linears}
    places = defaultdict(list)  # of each row, by its checksum
    for linear, weight in weights.items():
        for number, checksum in enumerate(_checksums(weight)):
            places[checksum].append((linear, number))
    found = {}
    for name, tensor in tensors(folder):
        for axis, rows in ((1, tensor), (0, tensor.t())) if tensor.ndim == 2 else ():
            for linear, first in places.get(_checksums(rows[:1])[0], ()):
                own, weight = slice(first, first + len(rows)), weights[linear]
                if torch.equal(weight[own], rows.to(weight.dtype)):
                    found[name] = linear, axis, own
    return found


def _checksums(rows: Tensor) -> list[int]:
    """A number for each row that depends only on its values, 0 and -0 being the same."""
    bits = (rows.float() + 0.0).contiguous().view(torch.int32)
    return (bits * torch.arange(1, 2 * rows.shape[1], 2)).sum(1).tolist()


def describe(
    folder: Path,
    places: Mapping[str, tuple[str, int, slice]],
    patterns: Mapping[str, tuple[int, int]],
) -> dict[str, dict[str, Any]]:
    """The entries of sparse24.json for the tensors in a folder, by name, in order. places: the
    result of `where_stored`. patterns: of the linears."""
    found = {}
    for name, tensor in tensors(folder, places):
        linear, axis, _ = places[name]
        n, m = patterns[linear]
        found[name] = {
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype)[6:],
            "pattern": f"{n}:{m}",
            "axis": axis,
            "density": int(tensor.count_nonzero()) / tensor.numel(),
            "illegal_groups": int(check_nm(tensor, n, m, dim=axis)),
            "groups": tensor.numel() // m,
            "sha256": sha256_of(tensor),
        }
    return dict(sorted(found.items()))


class Division(NamedTuple):
    """The columns of a weight as a matrix [out, in] that are 2:4, and those that are dense, which
    are none for a 2:4 weight. axis: along which its tensor has its inputs."""

    grouped: Tensor
    dense: Tensor
    axis: int

    def of(self, tensor: Tensor) -> tuple[Packed24, Tensor]:
        """The first columns of a tensor, packed, and the others."""
        matrix = tensor if self.axis == 1 else tensor.t()
        grouped = matrix[:, self.grouped].contiguous()
        return pack24(grouped, grouped != 0), matrix[:, self.dense].contiguous()


def divisions(folder: Path, places: Mapping[str, tuple[str, int, slice]]) -> dict[str, Division]:
    """The weights in a folder that are 2:4, or are so beside dense columns, by name, before they
    are quantised, which makes more zeros. places: the result of `where_stored`."""
    found = {}
    for name, tensor in tensors(folder, places):
        axis = places[name][1]
        matrix = tensor if axis == 1 else tensor.t().contiguous()
        every = torch.arange(matrix.shape[1])
        if len(every) % 4 == 0 and not check24(matrix):
            found[name] = Division(every, every[:0], axis)
        elif (columns := divide(matrix)) is not None:
            found[name] = Division(*columns, axis)
    return found


def quantize(folder: Path, divided: Mapping[str, Division], bits: int) -> None:
    """Round 2:4 columns of weights in a folder to integers times scales, by their `divisions`."""
    if not divided:
        raise UserError(f"{NONE}, so there is nothing to quantise")
    for path in sorted(folder.glob("model*.safetensors")):
        state = load_file(path)
        for name in state.keys() & divided.keys():
            tensor, own = state[name], divided[name]
            rounded = dequantize24(quantize24(own.of(tensor)[0], bits), tensor.dtype)
            rounded = rounded if own.axis == 1 else rounded.t()
            state[name] = tensor.index_copy(own.axis, own.grouped, rounded)
        save_file(state, path, {"format": "pt"})


def compress(
    folder: Path, divided: Mapping[str, Division], factors: Mapping[str, Tensor], bits: int = 0
) -> dict[str, int]:
    """Replace the weights in a folder by their compressed form (with `bits`, integers, as they were
    quantised), and add `factors`, those of their low-rank terms; tensors that are not `divided`
    stay dense. Return the bytes after (`compressed`), before (`dense`), of dense `integers`, and of
    dense columns after (`dense_columns`)."""
    if not divided:
        raise UserError(f"{NONE}, so there is nothing to compress")
    kept: dict[str, Tensor] = dict(factors)
    sizes = Counter(compressed=sum(factor.nbytes for factor in factors.values()), dense=0)
    for name, tensor in tensors(folder):
        if name not in divided:
            kept[name] = tensor
            continue
        packed, dense = divided[name].of(tensor)
        parts = {VALUES: packed.values, POSITIONS: packed.meta}
        if bits:
            found = quantize24(packed, bits)
            scales = found.scales.view(torch.int16)  # transformers would cast floats
            parts = {VALUES: found.values, POSITIONS: found.positions, SCALES: scales}
            whole = 2 * packed.values.numel() * bits // 8 + found.scales.nbytes
            sizes["integers"] += whole + dense.nbytes
        if dense.numel():
            columns = divided[name].dense.int()
            parts |= {DENSE_VALUES: dense, DENSE_COLUMNS: columns}
            sizes["dense_columns"] += dense.nbytes + columns.nbytes
        for part, stored in parts.items():
            kept[f"{name}.{part}"] = stored
            sizes["compressed"] += stored.nbytes
        sizes["dense"] += tensor.nbytes
    save_file(kept, folder / WEIGHTS, {"format": "pt"})
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": FORMAT}  # by which `models.auto` reads it
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for path in folder.glob("model*.safetensors*"):  # and the index of several
        path.unlink()
    return dict(sizes)


def tensors(folder: Path, names: Container[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield name and content of each tensor, or of these, of the model in a folder, one by one."""
    for path in sorted(folder.glob("model*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                if names is None or name in names:
                    yield name, file.get_tensor(name)
