"""Checkpoints with a layer for multi-token prediction. The functions that
scripts/make_next_token_reference.py runs too need NumPy alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from lite_runner.architectures.spec import Decoder
    from lite_runner.backends.native.backend import NativeBackend

Tensors = dict[str, NDArray[Any]]
REFERENCE = Path(__file__).parent / "fixtures/reference"
CASES = ("deepseek_v3", "glm4_moe", "qwen3_next", "qwen3_5_text")  # of these
_QWEN = {
    "eh_proj": "fc",
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "shared_head.norm": "norm",
}


def next_token_tensors(case: str, tensors: Mapping[str, NDArray[Any]]) -> Tensors:
    """A layer for the tiny model of a case, by the names in files: the numbers of the model's last
    layer, in another order, and random ones."""
    random = np.random.default_rng(0)
    last = f"model.layers.{_layers(tensors) - 1}."
    inner = {
        name.removeprefix(last): random.permutation(one.reshape(-1)).reshape(one.shape)
        for name, one in sorted(tensors.items())
        if name.startswith(last)
    }
    hidden = tensors["model.norm.weight"].size
    outer = {
        "eh_proj.weight": random.standard_normal((hidden, 2 * hidden)) / hidden**0.5,
        **{
            f"{name}.weight": (not case.startswith("qwen3")) + 0.3 * random.standard_normal(hidden)
            for name in ("enorm", "hnorm", "shared_head.norm")
        },
    }
    outer = {name: one.astype(np.float32) for name, one in outer.items()}
    return _named(case, tensors, inner, outer)


def agreeing_tensors(case: str, tensors: Mapping[str, NDArray[Any]], share: float) -> Tensors:
    """A model, whose layers add a `share` of what they add in the tiny one, and a layer that
    predicts what it says without any: what follows a token alone."""
    scaled = {
        name: one * np.float32(share)
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight"))
        else one
        for name, one in tensors.items()
    }
    last = f"model.layers.{_layers(tensors) - 1}."
    inner = {n.removeprefix(last): 0 * one for n, one in tensors.items() if n.startswith(last)}
    norm = tensors["model.norm.weight"]
    ones = np.full_like(norm, not case.startswith("qwen3"))
    matrix = np.eye(len(norm), 2 * len(norm), dtype=np.float32)
    outer = {"eh_proj": matrix, "enorm": ones, "hnorm": ones, "shared_head.norm": norm}
    named = {f"{name}.weight": one for name, one in outer.items()}
    return scaled | _named(case, tensors, inner, named)


def _layers(tensors: Mapping[str, NDArray[Any]]) -> int:
    return len({name.split(".")[2] for name in tensors if name.startswith("model.layers.")})


def _named(
    case: str, tensors: Mapping[str, NDArray[Any]], inner: Tensors, outer: Tensors
) -> Tensors:
    if case.startswith("qwen3"):
        names = {name: f"mtp.{_QWEN[name.removesuffix('.weight')]}.weight" for name in outer}
        renamed = {names[name]: one for name, one in outer.items()}
        return {f"mtp.layers.0.{name}": one for name, one in inner.items()} | renamed
    copies = {
        "embed_tokens.weight": tensors["model.embed_tokens.weight"],
        "shared_head.head.weight": tensors["lm_head.weight"],
    }
    every = inner | outer | copies
    return {f"model.layers.{_layers(tensors)}.{name}": one for name, one in every.items()}


def write_with_layer(case: str, folder: Path, agreeing: float | None = None) -> Path:
    """The tiny model of a case with a layer, as a Hugging Face folder; `agreeing`: one of
    `agreeing_tensors`."""
    from safetensors.numpy import load_file, save_file

    source = REFERENCE / case
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = load_file(source / "model.safetensors")
    if agreeing is None:
        tensors |= next_token_tensors(case, tensors)
    else:
        tensors = agreeing_tensors(case, tensors, agreeing)
    save_file(tensors, folder / "model.safetensors")
    return folder


def config_at(folder: Path) -> Decoder:
    """The model in a Hugging Face folder."""
    from lite_runner.weights.formats import model_config_from_hf

    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return model_config_from_hf(raw, "config.json", notes=False)


def with_layer(folder: Path, slots: int, length: int) -> NativeBackend:
    """The backend of the files of `write_with_layer`."""
    from lite_runner.architectures.next_token import next_token_layer
    from lite_runner.backends.native.backend import NativeBackend, NativeOptions
    from lite_runner.backends.native.next_token import NextToken
    from lite_runner.native.packed_model import pack
    from lite_runner.weights.checkpoint import open_checkpoint
    from lite_runner.weights.read_ahead import QuantizedWeights

    model = config_at(folder)
    layer = next_token_layer(model)
    assert layer is not None

    def packed(one: Decoder) -> Any:
        return list(pack(one, QuantizedWeights(open_checkpoint(folder, one), one)))

    further = partial(NextToken, layer, packed(layer))
    options = NativeOptions(slots, length, cache="fp32")
    return NativeBackend(model, packed(model), options, next_token=further)
