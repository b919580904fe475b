"""Sources: finds a checkpoint (folder, Hub id or loaded model), checks it, and reads its tensors one by one."""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from .conversion_maps import FAMILIES

# Everything that a conversion reads, and no pickle.
HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "README.md", "LICEN[CS]E*"]
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt", "*.model")
PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")
_OLD_NORM_NAMES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


class ConversionError(ValueError):
    """A checkpoint can't be converted; the message says why and what to do."""


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Where one tensor of a checkpoint lies."""

    file: Path
    key: str
    shape: tuple[int, ...]


@dataclass(kw_only=True)
class SourceCheckpoint:
    """A checked folder of config, tokenizer and safetensors.

    Args:
        label: what the caller named it by.
        tensors: by name, older spellings of layer norms replaced.
    """

    label: str
    folder: Path
    config: PreTrainedConfig
    tensors: dict[str, StoredTensor]
    tokenizer: Any = None

    @property
    def architecture(self) -> str | None:
        return (getattr(self.config, "architectures", None) or [None])[0]

    @property
    def files(self) -> list[Path]:
        """The files with weights, in order."""
        return sorted({stored.file for stored in self.tensors.values()})

    def read(self, name: str) -> Tensor:
        stored = self.tensors[name]
        with _open_weights(stored.file) as weights:
            return weights.get_tensor(stored.key)

    def dtype(self, name: str) -> torch.dtype:
        return self.read(name).dtype


@contextmanager
def open_source(source: Any, *, tokenizer: Any = None) -> Iterator[SourceCheckpoint]:
    """Finds and checks a source; a loaded model is saved aside for as long as it is needed."""
    if isinstance(source, nn.Module):
        if not hasattr(source, "save_pretrained"):
            raise ConversionError(
                f"source is a {type(source).__name__}: give a transformers model, a folder or a Hub id"
            )
        label = getattr(source.config, "name_or_path", "") or type(source).__name__
        with TemporaryDirectory() as folder:
            save: Any = source.save_pretrained
            save(folder)
            yield _check_folder(Path(folder), label=label, tokenizer=tokenizer)
    else:
        yield _check_folder(_find_folder(str(source)), label=str(source), tokenizer=tokenizer)


def _find_folder(source: str) -> Path:
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ConversionError(f"{source} is a file: give the folder that holds config.json and the weights")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", source) or source.startswith("."):
        raise ConversionError(f"there is no folder {source}, and it is not a Hub id (owner/name) either")
    try:
        return Path(snapshot_download(source, allow_patterns=HUB_FILES))
    except Exception as error:
        raise ConversionError(
            f"there is no folder {source}, and the Hub could not provide a repository of that name "
            f"({type(error).__name__}): check the name and the connection (HF_HUB_OFFLINE="
            f"{os.environ.get('HF_HUB_OFFLINE', '')!r}), or download it and give its folder"
        ) from error


def _check_folder(folder: Path, *, label: str, tokenizer: Any) -> SourceCheckpoint:
    config = read_config(folder)
    tensors = _list_tensors(folder)
    if tokenizer is None and any(any(folder.glob(pattern)) for pattern in TOKENIZER_FILES):
        tokenizer = _load_tokenizer(folder)
    return SourceCheckpoint(label=label, folder=folder, config=config, tensors=tensors, tokenizer=tokenizer)


def _load_tokenizer(folder: Path) -> Any:
    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:
        raise ConversionError(
            f"the tokenizer in {folder} can't be loaded ({type(error).__name__}: {error}): install what it needs, or "
            "give a loaded one as `tokenizer`"
        ) from error


def read_config(folder: Path) -> PreTrainedConfig:
    path = folder / "config.json"
    if not path.exists():
        raise ConversionError(f"{folder} has no config.json: give the folder that save_pretrained wrote")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConversionError(f"{path} is not valid JSON ({error}): download or save it again") from error
    if not isinstance(raw, dict):
        raise ConversionError(f"{path} holds a {type(raw).__name__}, not the fields of a config: save it again")
    if raw.get("quantization_config"):
        raise ConversionError(f"{folder} holds quantised weights: convert the original ones, then quantise the result")
    model_type = raw.get("model_type")
    try:
        return AutoConfig.from_pretrained(folder)
    except (ValueError, KeyError) as error:
        raise ConversionError(
            f"{path} has model_type={model_type!r} and can't be read: {str(error).splitlines()[0]} "
            f"Known: {', '.join(FAMILIES)}"
        ) from error


def _list_tensors(folder: Path) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for file in _weight_files(folder):
        with _open_weights(file) as weights:
            for key in weights.keys():  # noqa: SIM118  the handle is no dict
                name = key
                for old, new in _OLD_NORM_NAMES.items():
                    name = name.replace(old, new)
                shape = tuple(weights.get_slice(key).get_shape())
                tensors[name] = StoredTensor(file=file, key=key, shape=shape)
    return tensors


def _weight_files(folder: Path) -> list[Path]:
    index, single = folder / SAFE_WEIGHTS_INDEX_NAME, folder / SAFE_WEIGHTS_NAME
    if index.exists():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        missing = [name for name in names if not (folder / name).exists()]
        if missing:
            raise ConversionError(f"{index} names files that are not there: {', '.join(missing)}; download them too")
        return [folder / name for name in names]
    if single.exists():
        return [single]
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if pickles:
        raise ConversionError(
            f"{folder} has its weights as pickle only ({', '.join(pickles)}), which can run code when opened and is "
            "never opened here. If you trust it, load it once with its transformers class and save_pretrained() it, "
            "which writes safetensors; then convert that folder, or give the loaded model as the source"
        )
    raise ConversionError(f"{folder} has no weights: {SAFE_WEIGHTS_NAME} or {SAFE_WEIGHTS_INDEX_NAME} is needed")


@contextmanager
def _open_weights(file: Path) -> Iterator[Any]:
    try:
        handle = safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ConversionError(
            f"{file} is damaged or cut off ({file.stat().st_size:,} bytes; {error}): download or save it again"
        ) from error
    with handle as weights:
        yield weights
