"""A finished run as a folder for plain transformers: `python -m experiments.export run=DIR`.

The folder (`to=FOLDER`; by default `export` in the run directory, `export-dense` for the dense
master weights) holds

    config.json, model.safetensors   the model; pruned weights are real zeros
    tokenizer.json, ...              the tokenizer of the run, where it has one
    masks.safetensors                for each converted linear, by its name in model.safetensors, a
                                     bool tensor of the same shape: True where the weight is not 0
    README.md                        method, options, hash of the config, density, legality

The groups of a pattern run along a linear's inputs. `nn.Linear` stores [out, in]; GPT-2 of
transformers keeps its linears as `Conv1D`, stored [in, out], so there they run along dim 0. The
metadata of masks.safetensors say for each tensor which n, m and dim.

What transformers has no place for becomes dense: low-rank terms are merged into the weights.
`to_semi_structured` gives a model for inference with torch's 2:4 products instead.
"""

from __future__ import annotations

import copy
import importlib
import itertools
import json
import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import common_kernels
from common_kernels import check24, pack24
from common_kernels.matmul import unavailable
from experiments import checkpoint, legality
from experiments.config import driver, typed
from experiments.errors import UserError
from experiments.finished import WEIGHTS_OF, FinishedRun
from experiments.initial import WEIGHTS, HFConfig
from experiments.tokenizer import HFTokenizer, byte_characters
from methods import slorb
from methods.compressed import SparsePlusLowRank
from models.hf import CausalLM
from models.vit import ViT

if TYPE_CHECKING:
    import tiktoken
    from transformers import PreTrainedTokenizerBase

FOLDER = "export"  # in the run directory
MASKS = "masks.safetensors"


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """run: directory of a finished run. weights: `sparse` as the method ended, or the `dense`
    master weights. to: the folder to write; null = in the run directory."""

    run: str
    weights: str = "sparse"
    to: str | None = None

    def __post_init__(self) -> None:
        if self.weights not in WEIGHTS_OF:
            raise ValueError(f"weights={self.weights}; choose one of {', '.join(WEIGHTS_OF)}")


def export(
    run: FinishedRun,
    weights: str = "sparse",
    to: Path | None = None,
    report: Callable[[str], None] = print,
) -> Path:
    """Write the folder, unless it is there and newer than the run; returns its path.

    Raises:
        UserError: transformers has no such architecture, the method keeps no dense weights, or
            `to` holds something else.
    """
    if find_spec("transformers") is None:
        raise UserError("the export needs the transformers library: pip install 'sparse24[hf]'")
    own = run.directory / (FOLDER if weights == "sparse" else f"{FOLDER}-{weights}")
    folder = own if to is None else to
    marks = {"config_hash": run.config_hash, "weights": weights}
    with checkpoint.exclusive(run.directory):
        ours = (folder / MASKS).is_file() and marks.items() <= _metadata(folder).items()
        if ours and folder.stat().st_mtime >= (run.directory / WEIGHTS).stat().st_mtime:
            report(f"exported already: {folder}")
            return folder
        if folder.exists() and not ours and folder != own:
            raise UserError(f"to={folder} exists and is no export of this run; give another folder")
        model = run.model(weights)
        patterns = {name: run.pattern(name) for name in run.converted}
        rows = legality.measure(model, patterns)  # of the N:M weights, before anything is merged
        merged = merge_low_rank(model)
        folder.parent.mkdir(parents=True, exist_ok=True)
        building = folder.with_name(f".export-{os.getpid()}")
        try:
            write(model, building)
            tokenizer = tokenizer_of(run, model)
            if tokenizer is not None:
                tokenizer.save_pretrained(building)
            _write_masks(model, building, patterns, marks)
            card = _card(run, weights, to, rows, merged)
            (building / "README.md").write_text(card, encoding="utf-8")
            if folder.exists():
                shutil.rmtree(folder)
            building.rename(folder)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    report(f"exported: {folder}")
    return folder


def to_transformers(model: nn.Module) -> Any:
    """A plain model of ours as that of transformers; a `CausalLM` is one already.

    Raises:
        UserError: transformers has no such architecture.
    """
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


def write(model: nn.Module, folder: Path) -> None:
    """Config and weights of a plain model, as `save_pretrained` of transformers lays them out."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    whole: Any = model if isinstance(model, CausalLM) else to_transformers(model)
    whole.save_pretrained(folder)


@torch.no_grad()
def merge_low_rank(model: nn.Module) -> bool:
    """Add the low-rank terms of SLoRB and SLoPe to the weights, in place; whether there were any.

    The function stays, the N:M pattern does not.
    """
    boosted = any(isinstance(m, slorb.BoostedLinear) for m in model.modules())
    slorb.merge(model)
    adapted = [m for m in model.modules() if isinstance(m, SparsePlusLowRank)]
    for layer in adapted:
        layer.weight += layer.right.t() @ layer.left / len(layer.left)
        del layer.left, layer.right
        layer.__class__ = nn.Linear  # type: ignore[assignment]
    return boosted or bool(adapted)


# ---------------------------------------------------------------- masks


@dataclass(frozen=True)
class Stored:
    """Where a linear's weight went: `name` in the folder's files, inputs along `dim`."""

    linear: str
    name: str
    dim: int


def where_stored(model: nn.Module, linears: list[str], scratch: Path) -> list[Stored]:
    """In which tensors the weights of `linears` lie once `model` is written.

    Nothing here knows the names, transpositions and splits (of a fused QKV, say) of transformers:
    a copy of the model is written whose weights carry the number of their linear, and are found
    again. The first input is told from the others by one half more.
    """
    probe = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in probe.parameters():
            parameter.zero_()
        for number, linear in enumerate(linears, 2):  # 0 and 1 may stand for anything
            weight = probe.get_parameter(f"{linear}.weight")
            weight.fill_(number)
            weight[:, 0] += 0.5
    write(probe, scratch)
    found = []
    for name, tensor in _tensors(scratch):
        numbers = tensor.floor()
        if tensor.ndim != 2 or numbers[0, 0] < 2 or (numbers != numbers[0, 0]).any():
            continue
        dim = 1 if bool((tensor[:, 0] > numbers[:, 0]).all()) else 0
        found.append(Stored(linears[int(numbers[0, 0]) - 2], name, dim))
    return found


def _write_masks(
    model: nn.Module,
    folder: Path,
    patterns: Mapping[str, tuple[int, int]],
    marks: Mapping[str, str],
) -> None:
    scratch = folder / ".probe"
    stored = {s.name: s for s in where_stored(model, list(patterns), scratch)}
    shutil.rmtree(scratch)
    masks = {name: tensor != 0 for name, tensor in _tensors(folder) if name in stored}
    layout = {
        name: dict(zip(("n", "m", "dim"), (*patterns[s.linear], s.dim), strict=True))
        for name, s in sorted(stored.items())
    }
    save_file(masks, folder / MASKS, {"format": "pt", **marks, "patterns": json.dumps(layout)})


def read_patterns(folder: Path) -> dict[str, dict[str, int]]:
    """Of an exported folder: tensor -> `n`, `m` and `dim` of its pattern; {} without masks."""
    if not (folder / MASKS).is_file():
        return {}
    return json.loads(_metadata(folder)["patterns"])


def _metadata(folder: Path) -> dict[str, str]:
    with safe_open(folder / MASKS, "pt") as file:
        return file.metadata()


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Name and content of each tensor of the model in a folder, one at a time."""
    for path in sorted(folder.glob("model*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no dict
                yield name, file.get_tensor(name)


# ---------------------------------------------------------------- tokenizer


def tokenizer_of(run: FinishedRun, model: nn.Module) -> PreTrainedTokenizerBase | None:
    """transformers' form of the tokenizer of a run; None for images, and for a checkpoint of
    transformers that came without one.
    """
    if isinstance(model, ViT):
        return None
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if isinstance(run.shape, HFConfig):
        if not run.shape.has_tokenizer:
            return None
        return AutoTokenizer.from_pretrained(run.shape.folder, trust_remote_code=False)
    encoding, shape = run.tokenizer(), getattr(model, "config", model)
    roles = {"bos_token": encoding.decode([encoding.eot_token])}
    roles["eos_token"] = roles["bos_token"]
    if not isinstance(encoding, HFTokenizer):
        fast = byte_level_tokenizer(encoding)
    else:
        fast = Tokenizer.from_str(encoding.text)
        if "[CLS]" in encoding.special_tokens:  # BERT's, which has no other
            roles = {f"{token[1:-1].lower()}_token": token for token in encoding.special_tokens}
    return PreTrainedTokenizerFast(
        tokenizer_object=fast, model_max_length=shape.block_size, **roles
    )


def byte_level_tokenizer(encoding: tiktoken.Encoding) -> Any:
    """The `tokenizers.Tokenizer` of a tiktoken `Encoding`: same ids, one special token at the end.

    tiktoken keeps the rank of every token, `tokenizers` the merges that lead to them: a token's
    last merge joins the two parts that remain when only lower ranks are applied to its bytes.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    ranks: dict[bytes, int] = encoding._mergeable_ranks
    characters = byte_characters()

    def spelled(token: bytes) -> str:
        return "".join(characters[byte] for byte in token)

    parts = (_last_parts(t, ranks) for t in sorted(ranks, key=ranks.__getitem__) if len(t) > 1)
    merges = [(spelled(left), spelled(right)) for left, right in parts]
    tokenizer = Tokenizer(
        models.BPE(vocab={spelled(t): r for t, r in ranks.items()}, merges=merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(encoding._pat_str), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = sorted(encoding._special_tokens, key=encoding._special_tokens.__getitem__)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    return tokenizer


def _last_parts(token: bytes, ranks: Mapping[bytes, int]) -> list[bytes]:
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pairs = [ranks.get(a + b, len(ranks)) for a, b in itertools.pairwise(parts)]
        first = pairs.index(min(pairs))
        parts[first : first + 2] = [parts[first] + parts[first + 1]]
    return parts


# ---------------------------------------------------------------- the card


def _card(
    run: FinishedRun, weights: str, to: Path | None, rows: list[legality.Row], merged: bool
) -> str:
    config, summed = run.config, legality.total(rows)
    command = ["python -m experiments.export", shlex.quote(f"run={run.directory}")]
    command += [f"weights={weights}", *([] if to is None else [shlex.quote(f"to={to}")])]
    options = {k: v for k, v in config["method"].items() if k != "name"}
    merging = (
        "\nLow-rank terms were merged into these weights here, which are dense therefore; the "
        "table shows them before.\n"
        if merged
        else ""
    )
    return f"""---
library_name: transformers
tags: [sparse24, "{run.method}", "2:4 sparsity"]
---
# {run.model_name}, trained with {run.method}

| | |
|---|---|
| method | {run.method} |
| weights | {weights} |
| density of the converted linears | {summed["density"]:.4f} |
| illegal groups | {summed["illegal_groups"]} of {summed["groups"]} |
| config hash | {run.config_hash} |
| seed | {run.result["seed"]} |
| tier | {run.result["tier"]} |

Made by

    {" ".join(command)}

Options of the method:

```json
{json.dumps(options, indent=2)}
```

## Converted linears
{merging}
{legality.table(rows)}

Pruned weights are zeros in the file. `{MASKS}` holds for each of these tensors, by its
name there, a bool tensor that is True where the weight is not zero; its metadata give n, m and the
dim along which the groups of m run (the inputs of the linear).
"""


# ---------------------------------------------------------------- torch's semi-structured tensors


def semi_structured_layout(device: torch.device, dtype: torch.dtype) -> str:
    """The packed layout of which `device` can run torch's 2:4 products.

    Raises:
        UserError: it can run none, and why.
    """
    backends = {"cusparselt": "cusparselt_sm90", "cutlass": "cutlass_sm80"}
    reasons = {name: unavailable(name, device, dtype) for name in backends}
    for name, layout in backends.items():
        if reasons[name] is None:
            return layout
    raise UserError(f"no 2:4 products here: {'; '.join(str(r) for r in reasons.values())}")


class SemiStructuredLinear(nn.Linear):
    """`nn.Linear` with a `SparseSemiStructuredTensor` as its weight, for inputs of any strides.

    torch's class has only products of two matrices; a batch of them that is not contiguous would
    have to be expanded, which it cannot.
    """

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        y = F.linear(x.reshape(-1, self.in_features), self.weight, self.bias)
        return y.reshape(*x.shape[:-1], self.out_features)


@torch.no_grad()
def to_semi_structured(model: nn.Module, layout: str | None = None) -> list[str]:
    """Give the 2:4 linears of a plain model weights of torch's `SparseSemiStructuredTensor`.

    In place, for inference. The tensors hold the very weights, half of them and their positions.

    Args:
        model: on its device, in bf16 or fp16. Linears that are not 2:4 stay dense.
        layout: of `Packed24`; None for what the device can multiply with.
    Returns:
        The names of the linears.
    Raises:
        UserError: the device cannot, no linear is 2:4, or one has a shape that torch does not take.
    """
    first = next(model.parameters())
    layout = layout or semi_structured_layout(first.device, first.dtype)
    linears = {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and module.in_features % 4 == 0
        and int(check24(module.weight)) == 0
    }
    if not linears:
        raise UserError("no linear of this model is 2:4, so there is nothing to pack")
    for name, module in linears.items():
        try:
            packed = pack24(module.weight, module.weight != 0, layout)
            tensor = common_kernels.to_semi_structured(packed)
        except ValueError as error:
            raise UserError(f"{name} cannot be packed: {error}") from error
        module.weight = nn.Parameter(tensor, requires_grad=False)
        module.__class__ = SemiStructuredLinear
    return list(linears)


def freeze(composed: Any) -> ExportConfig:
    """The typed form of a composed `DictConfig`."""
    from omegaconf import OmegaConf

    values: Any = OmegaConf.to_container(composed, resolve=True)
    if values.get("run") is None:
        raise UserError("run=DIR is missing: the directory of a finished run")
    return typed(ExportConfig, "the config", values)


@driver("export", freeze)
def main(config: ExportConfig) -> None:
    to = None if config.to is None else Path(config.to)
    export(FinishedRun.open(Path(config.run)), config.weights, to)


if __name__ == "__main__":
    main()
