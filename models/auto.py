"""Lets transformers (5 and later) load compressed exports: import this module, then call
`from_pretrained(folder)` of any class that fits.

The loaded model is a plain one with 2:4 weights, which can be trained and saved. With
`device_map="cuda"` its 2:4 linears run packed as after `models.sparse.load`, and their weights do
not require gradients; to train, load it on the CPU and move it.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.hub import cached_file
from transformers.utils.quantization_config import QuantizationConfigMixin

from models import sparse


@register_quantization_config(sparse.FORMAT)
class Sparse24Config(QuantizationConfigMixin):
    """The `quantization_config` of a compressed export."""

    dequantize = True  # the loaded weights are plain tensors

    def __init__(self, **_: Any) -> None:
        self.quant_method = sparse.FORMAT  # type: ignore[assignment]


class Expand(ConversionOps):
    """Makes a dense weight of its stored parts."""

    def __init__(self, described: dict[str, Any]) -> None:
        self.described = described

    def convert(
        self,
        input_dict: dict[str, Any],
        *_: Any,
        full_layer_name: str = "",
        model: Any = None,
        **__: Any,
    ) -> dict[str, Any]:
        given = {name.removeprefix("weight."): found for name, found in input_dict.items()}
        parts = {k: found[0] if isinstance(found, list) else found for k, found in given.items()}
        told = self.described.get(full_layer_name, {"axis": 1, "dtype": "bfloat16"})
        weight = sparse.expanded(parts, told)
        # transformers has cast floats to the model's dtype, but no integers and scales.
        dtype = model.get_parameter(full_layer_name).dtype
        return {"weight": weight.to(dtype) if sparse.SCALES in parts else weight}


@register_quantizer(sparse.FORMAT)
class Sparse24Quantizer(HfQuantizer):
    """Reads a compressed export, whose files it compares with their SHA-256."""

    expand: Expand

    def update_attn_implementation(self, config: Any) -> Any:
        config.transformers_weights = sparse.WEIGHTS
        return config

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Any = None, **_: Any
    ) -> Any:
        folder, config = Path(checkpoint_files[0]).parent, model.config
        del config.transformers_weights
        if not (folder / sparse.RECORD).is_file() and not Path(config.name_or_path).is_dir():
            # In the hub's cache, whose folders are commits.
            cached_file(config.name_or_path, sparse.RECORD, revision=folder.name)
        record = sparse.read_record(folder)
        for name in (sparse.CONFIG, sparse.WEIGHTS):
            sparse.check_file(folder, name, record)
        # By the names that this model has: a model without a head lacks the first part.
        own, first = {n for n, _ in model.named_parameters()}, f"{model.base_model_prefix}."
        described = {
            next((n for n in (name, name.removeprefix(first)) if n in own), name): told
            for name, told in record["tensors"].items()
        }
        self.expand = Expand(described)
        for name, told in described.items():
            if name in own and (rank := told.get("low_rank")):
                layer: Any = model.get_submodule(name.rpartition(".")[0])
                rows, columns = told["shape"] if told["axis"] else told["shape"][::-1]
                with torch.device("meta"):
                    left = torch.empty(rank, columns) if told["left"] else None
                    sparse.add_low_rank(layer, left, torch.empty(rank, rows))
        return model

    def get_weight_conversions(self) -> list[Any]:
        return [
            WeightConverter([f"weight.{part}" for part in sparse.PARTS], "weight", [self.expand])
        ]

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> nn.Module:
        sparse.save_merged(model)
        sparse.pack_on_gpu(model)
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True
