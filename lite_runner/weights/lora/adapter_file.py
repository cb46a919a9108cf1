"""The file of an adapter's weights, PEFT's or MindFormers', and its tensors by module."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from lite_runner.errors import ArtifactError
from lite_runner.system.files import sha256_of
from lite_runner.weights.checkpoint import LORA, PICKLES, weights_file
from lite_runner.weights.derive import same_values
from lite_runner.weights.formats.ckpt_file import open_ckpt
from lite_runner.weights.formats.safetensors_file import looks_like_safetensors, open_safetensors
from lite_runner.weights.formats.torch_file import looks_like_torch, refused
from lite_runner.weights.lora.adapter import Adapter
from lite_runner.weights.lora.adapter_config import NAMES, read_settings
from lite_runner.weights.tensor import LazyTensor

PEFT_FILE, MINDFORMERS_FILE = "adapter_model.safetensors", "adapter_model.ckpt"
FILES = (*NAMES, PEFT_FILE, MINDFORMERS_FILE)  # that may be read in an adapter's folder
PREFIX = "base_model.model."  # of every name in PEFT's files
_PEFT = re.compile(r"(.+)\.(?:lora_([AB])\.weight|lora_embedding_([AB])|base_layer\.weight)")


def open_weights(folder: Path) -> tuple[Path, dict[str, LazyTensor]]:
    """The file of the adapter in `folder`, and its tensors. Raises ArtifactError."""
    file = weights_of(folder)
    return file, open_safetensors(file) if looks_like_safetensors(file) else open_ckpt(file)


def weights_of(folder: Path) -> Path:
    """The file of an adapter's weights; never a pickle."""
    files = [folder / name for name in (PEFT_FILE, MINDFORMERS_FILE)]
    there = [file for file in files if file.is_file()]
    if len(there) > 1:
        raise ArtifactError(
            f"{folder}: holds both {PEFT_FILE} and {MINDFORMERS_FILE}, expected one of them",
            "move one away",
        )
    if not there:
        for item in sorted(folder.iterdir()):
            if item.suffix in PICKLES:
                raise refused(item, f"an adapter's are expected in {PEFT_FILE}")
        raise ArtifactError(
            f"{folder}: no weights, expected {PEFT_FILE} or {MINDFORMERS_FILE} beside {NAMES[0]}"
        )
    file = weights_file(there[0])
    # The first byte of a safetensors file is one of a length, and may be a pickle's.
    if not looks_like_safetensors(file) and looks_like_torch(file):
        raise refused(file, f"an adapter's are expected in {PEFT_FILE}")
    return file


def is_peft_file(names: Iterable[str]) -> bool:
    """Whether tensors of these names are PEFT's."""
    return any(_PEFT.fullmatch(name) for name in names)


def tensors_by_module(
    found: Mapping[str, LazyTensor], is_peft: bool
) -> dict[str, dict[str, LazyTensor]]:
    """Module -> its tensors "a", "b" and "copy" of the base weight; "" -> the rest by name."""
    stored: defaultdict[str, dict[str, LazyTensor]] = defaultdict(dict)
    for name, tensor in found.items():
        match = (_PEFT if is_peft else LORA).fullmatch(name)
        if match is None:
            stored[""][name] = tensor
            continue
        prefix = PREFIX if is_peft else "transformer."  # of MindFormers' BLOOM with a head
        kind = (match[2] or (is_peft and match[3]) or "copy").lower()
        module = stored[match[1].removeprefix(prefix)]
        # One adapter may have the names of several of MindFormers' releases.
        if kind in module and not same_values(module[kind], tensor):
            stored[""][name] = tensor
        module[kind] = tensor
    return dict(stored)


def digest(adapter: Adapter) -> str:
    """SHA-256 of an adapter's config and weights, which identifies what is derived from them."""
    return sha256_of(read_settings(adapter.folder).where, weights_of(adapter.folder))
