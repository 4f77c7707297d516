"""Loads the weights that a run starts from: a transformers checkpoint or a finished run.

A checkpoint is trained as a transformers model (`model=hf`), or read into a model of this project
of the same shape (`init=FOLDER`). In a run's identity a checkpoint stands with the hash of its
files and a finished run with the hash of its config; paths do not count.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from experiments.data.tokenizer import ALL_FILES
from experiments.data.tokenizer import FILES as TOKENIZERS
from experiments.support import hub, tensor_files
from experiments.support.checkpoint import content_hash, file_hash, sha256
from experiments.support.errors import UserError, one_line
from experiments.support.results import FILE as RESULT
from experiments.support.results import read_training
from methods.nn import lowrank
from models import bert, gpt2, sparse, vit
from models.bert import BertLM
from models.gpt2 import GPT
from models.hf import CausalLM
from models.vit import ViT

# Files of a finished run: the final plain weights, those of the averaged copy, and the state of the
# method's layers before they became plain.
WEIGHTS, AVERAGED, LATENT = "model.safetensors", "ema.safetensors", "latent.safetensors"
_CHECKPOINT_FILES = ("*.json", "*.safetensors", "*.txt", "tokenizer.model")


@dataclass(frozen=True)
class HFConfig:
    """A transformers checkpoint. path: a local folder, or an id on the hub, which
    owner/name@revision pins. block_size: tokens per training sequence; null = the model's most."""

    path: str
    block_size: int | None = None

    def __post_init__(self) -> None:
        if self.block_size is not None and self.block_size < 1:
            raise UserError(f"model.block_size={self.block_size}; it must be at least 1")

    @cached_property
    def folder(self) -> Path:
        """The local folder of the checkpoint; one on the hub is downloaded into the hub's cache."""
        folder = Path(self.path)
        if not folder.is_dir():
            folder = hub.download(self.path, _CHECKPOINT_FILES, "model.path")
        if [path.name for path in folder.glob("*.safetensors")] == [sparse.WEIGHTS]:
            raise UserError(
                f"model.path={self.path} is a compressed export, which models.sparse.load and "
                "models.auto read, and no command; export the run without compressed=true"
            )
        if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
            raise UserError(
                f"model.path={self.path} has no config.json with weights in .safetensors: give the "
                "folder that save_pretrained of transformers wrote"
            )
        return folder

    @property
    def pinned(self) -> str:
        """`path`, for results; an id on the hub is pinned to the commit that was downloaded."""
        commit = None if Path(self.path).is_dir() else hub.commit(self.folder)
        return self.path if commit is None else f"{self.path.partition('@')[0]}@{commit}"

    @property
    def has_tokenizer(self) -> bool:
        """True if the folder holds a tokenizer."""
        return any((self.folder / name).is_file() for name in TOKENIZERS)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the architecture and the weights, 16 hex digits."""
        weights = sorted(self.folder.glob("*.safetensors"))
        return content_hash([self.folder / "config.json", *weights])

    @cached_property
    def tokenizer_fingerprint(self) -> str | None:
        """Hash of the files of the tokenizer, 16 hex digits; None without one."""
        if not self.has_tokenizer:
            return None
        paths = (self.folder / name for name in ALL_FILES)
        found = {path.name: sha256(path) for path in paths if path.is_file()}
        return hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16]

    def build(self, weights: bool = True) -> CausalLM:
        """The model with its weights, on the CPU, or without them, on the meta device."""
        from transformers.utils import logging

        logging.disable_progress_bar()
        try:
            return CausalLM.from_pretrained(self.folder, self.block_size, weights=weights)
        except ValueError as error:
            raise UserError(f"model.path={self.path}: {error}") from error

    def build_ours(self) -> GPT | BertLM | ViT:
        """This project's model with the same outputs, on the CPU in fp32."""
        import transformers
        from transformers.utils import logging

        logging.disable_progress_bar()
        # For a `model_type`: the class that has a certain tensor, the one without it, our function.
        classes: dict[str | None, tuple[str, str, str, Callable[[Any], GPT | BertLM | ViT]]] = {
            "gpt2": ("", "GPT2LMHeadModel", "", gpt2.from_hf),
            "bert": ("seq_relationship", "BertForPreTraining", "BertForMaskedLM", bert.from_hf),
            "vit": ("classifier", "ViTForImageClassification", "ViTModel", vit.from_hf),
        }
        if (found := model_type(self.folder)) not in classes:
            raise UserError(
                f"{self.path} is a checkpoint of {found}; only those of gpt2, bert and "
                "vit can be read into models of this project"
            )
        head, with_head, without, convert = classes[found]
        try:
            parts = [safe_open(path, "pt").keys() for path in self.folder.glob("*.safetensors")]
            kind = with_head if head in str(parts) else without
            loaded, info = getattr(transformers, kind).from_pretrained(
                self.folder, use_safetensors=True, output_loading_info=True
            )
            # The pooler of a ViTModel does not contribute to its features.
            if missing := [n for n in sorted(info["missing_keys"]) if "pooler" not in n]:
                raise ValueError(f"{missing[0]} and {len(missing) - 1} more weights are missing")
            return convert(loaded.float())
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise UserError(f"{self.path}: {one_line(error)}") from error


def model_type(folder: Path) -> str | None:
    """`model_type` of a transformers `config.json`; None for the one of a run, or without one."""
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found.get("model_type") if isinstance(found, dict) else None


def _checkpoint(directory: Path) -> HFConfig | None:
    """`directory` as a transformers checkpoint; None if it holds, or will hold, a run."""
    return None if model_type(directory) is None else HFConfig(str(directory))


def source_hash(directory: Path) -> str:
    """The hash that identifies `init=directory`: of a run's config or a checkpoint's weights."""
    hf = _checkpoint(directory)
    return read_training(directory)["config_hash"] if hf is None else hf.fingerprint


def weight_files(directory: Path, weights: str) -> dict[str, str]:
    """The SHA-256 of the files that hold the `weights` (`sparse` or `dense`) of a finished run, or
    the weights of a transformers checkpoint, by file name."""
    names = (WEIGHTS, LATENT) if weights == "dense" else (WEIGHTS,)
    if _checkpoint(directory) is None:
        check_run_files(directory, read_training(directory), *names)
    paths = (path for name in names for path in tensor_files.files(directory / name))
    return {path.name: file_hash(path) for path in paths if path.is_file()}


def damage(directory: Path, result: dict[str, Any], *names: str) -> str | None:
    """A sentence about the first file of a finished run that is missing or changed; None if all are
    intact. names: the files to check, by the names they were saved under, as far as the run has
    them; without names all. A run without stored hashes must at least have its weights."""
    hashes: dict[str, str | None] = result.get("files", {WEIGHTS: None})
    checked = [n for name in names for n in tensor_files.among(name, hashes)] if names else hashes
    for name in checked:
        path, expected = directory / name, hashes.get(name)
        if not path.is_file():
            return f"{path} is missing"
        if expected is not None and (found := file_hash(path)) != expected:
            return (
                f"{path} was changed since it was written: its sha256 is {found[:12]}..., "
                f"{RESULT} says {expected[:12]}..."
            )
    return None


def check_run_files(directory: Path, result: dict[str, Any], *names: str) -> None:
    """Raise a `UserError` with the command that makes the run again if there is `damage`."""
    if wrong := damage(directory, result, *names):
        how = result.get("command") or f"the settings are in {directory / 'config.json'}"
        raise UserError(f"{wrong}; make the run again: {how}")


def load_weights(model: nn.Module, directory: Path, file: str = WEIGHTS) -> None:
    """Load the weights of the finished run (from `file`) or transformers checkpoint in `directory`
    into the plain `model`, in place. A model on `meta` only gets the parameters this would add."""
    hf = _checkpoint(directory)
    if hf is not None and next(model.parameters()).is_meta:
        return
    state: Mapping[str, Tensor]
    if hf is not None:
        state = dict(hf.build_ours().named_parameters())
    else:
        check_run_files(directory, read_training(directory), file)
        state = tensor_files.load(directory / file, next(model.parameters()).device)
        lowrank.attach(model, state)  # where the weights have low-rank terms
    own = dict(model.named_parameters())
    here, there = ({name: t.shape for name, t in tensors.items()} for tensors in (own, state))
    if wrong := sorted({name for name, _ in here.items() ^ there.items()}):
        raise UserError(
            f"the weights in {directory} do not fit the model: {wrong[0]} and {len(wrong) - 1} "
            "more differ; set model.* to its shape"
        )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(state[name])
