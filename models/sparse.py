"""Reads a folder that `experiments.export` wrote, with compressed or dense 2:4 weights.

    sparse24.json               FORMAT, version, and a description of each sparse tensor by its name
                                in the model: shape, dtype, pattern, the axis along which its groups
                                run, density, illegal groups, and the SHA-256 of its bytes as a
                                dense tensor
    sparse24.safetensors        only if compressed: all tensors of the model. A 2:4 tensor X is
                                stored as X.values [rows, columns / 2] and X.positions, uint8
                                [rows, columns / 8] with two bits per value
                                (`common_kernels.Packed24`, layout `neutral`), with groups along the
                                columns. If `axis` is 0, it is the transpose of X that is stored.
                                Quantised, there are also X.scales, the bits of bf16 as int16, so
                                that no reader casts them, and the values are int8,
                                or uint8 [rows, columns / 4] (`common_kernels.Quantized24`).
                                If X is 2:4 beside dense columns, these are the parts of the others,
                                and there are X.dense_values [rows, dense], not rounded to integers,
                                and X.dense_columns, int32 [dense], which inputs they are.
                                With a `low_rank` r the linear also adds (x left^T) right, a term of
                                SLoPe or SLoRB: `right` [r, out] and `left` [r, in] are stored
                                beside the weight; without `left` the r inputs of `right` are sums
                                of in / r neighbours

No pickle is loaded, and no remote code is run.
"""

from __future__ import annotations

import copyreg
import functools
import hashlib
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from common_kernels import Packed24, Quantized24, dequantize24, lowrank_addmm, unpack24
from models.linears import is_conv1d
from models.packed import pack, reduced

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FORMAT, VERSIONS = "sparse24", (1, 2)  # 2 has dense columns
RECORD, WEIGHTS = "sparse24.json", "sparse24.safetensors"
MASKS = "sparse24/masks.safetensors"  # exports of earlier versions also had the masks
VALUES, POSITIONS, SCALES = "values", "positions", "scales"
DENSE_VALUES, DENSE_COLUMNS = "dense_values", "dense_columns"
PARTS = VALUES, POSITIONS, SCALES, DENSE_VALUES, DENSE_COLUMNS  # of a stored weight, or some
CONFIG, GENERATION = "config.json", "generation_config.json"


def read_record(folder: str | Path) -> dict[str, Any]:
    """The content of sparse24.json in a folder. Raises ValueError if the file does not exist, is
    damaged, or has another version."""
    path = Path(folder) / RECORD
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = f"{path}: {error.strerror}"
        raise ValueError(
            f"no export of sparse24 in {folder} ({reason}); a model that save_pretrained wrote is "
            "loaded by from_pretrained and runs packed after models.packed.pack(model)"
        ) from error
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); export the run again") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ValueError(f"{path} was not written by an export of sparse24")
    if record.get("version") not in VERSIONS:
        raise ValueError(
            f"{path} has version {record.get('version')}, and this library reads {VERSIONS}; "
            "export the run again, or use the library that wrote it"
        )
    return record


def sha256_of(tensor: Tensor) -> str:
    """SHA-256 of a tensor's bytes in row-major order, 64 hex digits."""
    content = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(content.numpy().data).hexdigest()


def check_file(folder: Path, name: str, record: Mapping[str, Any]) -> None:
    """Raise a `ValueError` unless a file has the SHA-256 that the record says."""
    path = folder / name
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; export the run again") from error
    if found != record["files"].get(name):
        raise ValueError(
            f"{path} is damaged or of another export: its SHA-256 is not the one in {RECORD}; "
            "copy the folder or export the run again"
        )


def expanded(parts: Mapping[str, Tensor], told: Mapping[str, Any]) -> Tensor:
    """The dense tensor of its stored `PARTS`. told: its entry in sparse24.json."""
    values, positions = parts[VALUES], parts[POSITIONS]
    if SCALES in parts:
        quantized = Quantized24(values, positions, parts[SCALES].view(torch.bfloat16))
        weight = dequantize24(quantized, getattr(torch, told["dtype"]))
    else:
        weight = unpack24(Packed24.of(values, positions, "neutral"))
    if DENSE_COLUMNS in parts:
        given, columns = weight, parts[DENSE_COLUMNS].long()
        weight = given.new_empty(len(given), given.shape[1] + len(columns))
        grouped = torch.ones_like(weight[0], dtype=torch.bool)
        grouped[columns] = False
        weight[:, grouped], weight[:, columns] = given, parts[DENSE_VALUES].to(given.dtype)
    return weight if told["axis"] == 1 else weight.t().contiguous()


class LowRankTerm(nn.Module):
    """A linear, the base class that follows, plus (x left^T) right: left [r, in], or None for sums
    of in / r neighbours, and right [r, out]."""

    left: nn.Parameter | None
    right: nn.Parameter
    plain: ClassVar[Any]  # the base class

    def __reduce__(self) -> tuple[Any, ...]:
        if type(self) is _with_low_rank(self.plain):  # which pickle cannot find by its name
            return _empty, (self.plain,), self.__getstate__()
        return copyreg.__newobj__, (type(self),), self.__getstate__()  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        y = super().forward(x)
        return lowrank_addmm(y, reduced(x, self.left, len(self.right)), self.right)

    def low_rank(self) -> tuple[Tensor | None, Tensor, float]:
        """left, right, and the scale of their term."""
        return self.left, self.right, 1.0

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        """A state without the term, as `save_pretrained` writes it, has it in the weight."""
        if f"{prefix}weight" in state and f"{prefix}right" not in state:
            own = {name: getattr(self, name) for name in ("left", "right")}
            state |= {prefix + k: torch.zeros_like(x) for k, x in own.items() if x is not None}
        super()._load_from_state_dict(state, prefix, *rest)


@functools.cache
def _with_low_rank(kind: Any) -> Any:
    """The class of the linears of class `kind` with a low-rank term."""
    return type(f"LowRank{kind.__name__}", (LowRankTerm, kind), {"plain": kind})


def _empty(plain: Any) -> Any:
    """A linear with a low-rank term for pickle to fill."""
    kind = _with_low_rank(plain)
    return kind.__new__(kind)


def add_low_rank(layer: Any, left: Tensor | None, right: Tensor) -> None:
    """Give a linear a low-rank term, in place and in its weight's dtype and device."""
    kind: Any = type(layer)
    layer.__class__ = _with_low_rank(kind)
    for name, factor in (("left", left), ("right", right)):
        own = None if factor is None else nn.Parameter(factor.to(layer.weight))
        layer.register_parameter(name, own)


def save_merged(model: Any) -> None:
    """Let `model.save_pretrained` write its low-rank terms merged into their weights, because no
    loader would read them from a plain folder. The model itself is not changed."""
    if any(isinstance(module, LowRankTerm) for module in model.modules()):
        model.save_pretrained = functools.partial(_save_merged, model)


@torch.no_grad()
def _save_merged(
    self: Any, folder: str | Path, *args: Any, state_dict: Any = None, **options: Any
) -> Any:
    state = dict(self.state_dict() if state_dict is None else state_dict)
    for name, module in self.named_modules():
        parts: Any = (state.get(f"{name}.{part}") for part in ("weight", "left", "right"))
        weight, left, right = parts
        if right is None or not isinstance(module, LowRankTerm):
            continue
        kept = is_conv1d(module)  # [in, out]
        inputs = weight.shape[0 if kept else 1]
        eye = torch.eye(inputs, device=weight.device)
        term = reduced(eye, None if left is None else left.float(), len(right)) @ right.float()
        state[f"{name}.weight"] = (weight.float() + (term if kept else term.t())).to(weight.dtype)
        for part in ("left", "right"):
            state.pop(f"{name}.{part}", None)
    return type(self).save_pretrained(self, folder, *args, state_dict=state, **options)


def _linear_of(model: nn.Module, name: str, sha256: str) -> nn.Module:
    """The module of a stored weight, found by its content if transformers calls it otherwise."""
    try:
        return model.get_submodule(name.rpartition(".")[0])
    except AttributeError:
        held = ((m, m._parameters.get("weight")) for m in model.modules())
        return next(m for m, weight in held if weight is not None and sha256_of(weight) == sha256)


@torch.inference_mode(False)  # weights made in that mode cannot be packed
def load(folder: str | Path, device: torch.device | str = "cpu") -> PreTrainedModel:
    """The transformers model in an exported folder, on `device`, in evaluation mode and in the
    dtype of the export.

    On a GPU its 2:4 linears run packed where this is faster (`models.packed.pack`), and their
    weights do not require gradients; to train, use `from_pretrained`, or `load` on the CPU. If none
    can run packed, a warning says why. For each new shape all algorithms are tried, which takes
    some seconds; the result is stored. Raises ValueError if a file is missing, damaged, or not of
    this export; the file is named."""
    import transformers
    from safetensors.torch import load_file

    from models.hf import one_line

    record, state = read_record(folder), None
    factors: dict[str, list[Any]] = {}
    weights = [name for name in record["files"] if name.endswith(".safetensors") and name != MASKS]
    if not weights:
        raise ValueError(f"{Path(folder) / RECORD} lists no weights; export the run again")
    for file in [CONFIG, *weights]:
        check_file(Path(folder), file, record)
    with one_line(folder, "model"):
        config: Any = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        if hasattr(config, "quantization_config"):  # it is for `models.auto`
            del config.quantization_config
    name = (getattr(config, "architectures", None) or [""])[0]
    kind: Any = getattr(transformers, name, None)
    if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
        raise ValueError(
            f"{Path(folder) / CONFIG} names {name!r}, which is no model of transformers"
        )
    if WEIGHTS in record["files"]:
        state = load_file(Path(folder) / WEIGHTS)
        for name, told in record["tensors"].items():
            if f"{name}.{VALUES}" in state:
                stored = {part: state.pop(f"{name}.{part}", None) for part in PARTS}
                state[name] = expanded({k: v for k, v in stored.items() if v is not None}, told)
            if "low_rank" in told:
                own = name.removesuffix("weight")
                factors[name] = [state.pop(f"{own}{part}", None) for part in ("left", "right")]
    transformers.utils.logging.disable_progress_bar()
    # transformers 4 loads as fp32 by default.
    release = int(transformers.__version__.split(".")[0])
    auto: Any = {"torch_dtype" if release < 5 else "dtype": "auto"}
    with one_line(folder, "model"):
        answer: Any = kind.from_pretrained(
            folder if state is None else None,
            config=config,
            state_dict=state,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are an error below
            **auto,
        )
        model, loading = answer
        if state is not None and (Path(folder) / GENERATION).is_file():  # else it is read already
            model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    for kind_of in ("missing", "unexpected", "mismatched"):
        if found := sorted(loading[f"{kind_of}_keys"]):
            first = found[0] if isinstance(found[0], str) else found[0][0]
            raise ValueError(f"{Path(folder) / CONFIG} is of another model: {first} is {kind_of}")
    for name, (left, right) in factors.items():
        add_low_rank(_linear_of(model, name, record["tensors"][name]["sha256"]), left, right)
    save_merged(model)
    model.eval().to(device)
    pack_on_gpu(model)
    return model


def pack_on_gpu(model: Any) -> None:
    """Let the 2:4 linears of a model on a GPU run packed; a warning says why if they cannot."""
    if next(model.parameters()).is_cuda:
        try:
            pack(model)
        except ValueError as reason:
            warnings.warn(f"{model.config.name_or_path} runs dense: {reason}", stacklevel=3)
