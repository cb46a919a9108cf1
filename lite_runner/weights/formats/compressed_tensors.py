"""Folders in compressed-tensors' pack-quantized form, which transformers and vLLM load, written.

For what the tensors of a linear layer mean see packed_matrices. Here weights have 4 bits in groups,
or 8 bits by row, both around zero; the embedding, the head and norms keep 16 bits.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lite_runner.architectures import Parameter, architecture_of, parameters
from lite_runner.architectures.quantization import Quantization, Scheme, schemes
from lite_runner.architectures.spec import Decoder
from lite_runner.errors import ConfigError
from lite_runner.weights import CHUNK, LazyTensor, cast
from lite_runner.weights.formats import hf_from_model_config
from lite_runner.weights.formats.hugging_face import to_hugging_face
from lite_runner.weights.formats.safetensors_file import (
    ITEM_BYTES,
    Entry,
    counted,
    read_once,
    write_entries,
)
from lite_runner.weights.quantization.quantized import (
    QuantizedTensor,
    check_columns,
    quantize,
    quantize_around_zero,
)

FORMAT = "compressed-tensors"
_HINT = "quantize.format=folder, or a GGUF file"


def check_writable(model: Decoder, quantization: Quantization, *, calibrated: bool) -> None:
    """Raise ConfigError for a model that transformers lacks, or has not in linear layers, and
    ArtifactError for groups that do not divide a matrix."""
    hf_from_model_config(model)
    layers, wanted = _linear_layers(model, quantization), schemes(model, quantization)
    parts = [one for each in layers.values() for one in each]
    if architecture_of(model).conv1d or any(one.expert is not None for one in parts):
        what = "Conv1D layers" if architecture_of(model).conv1d else "experts"
        text = f"quantize.format={FORMAT}: {model.architecture} has {what}"
        raise ConfigError(f"{text}, expected linear layers alone", _HINT)
    fused = next((name for name, each in layers.items() if len(each) > 1), None)
    if calibrated and fused:
        raise ConfigError(
            f"calibrated matrices are rounded apart, and {fused} has several as one",
            f"quantize.method=nearest, or {_HINT}",
        )
    for one in parts:
        check_columns(_columns(one), wanted[one.name], one.name)


def tensors_bytes(model: Decoder, quantization: Quantization) -> int:
    linear = {one.name for each in _linear_layers(model, quantization).values() for one in each}
    wanted, total = schemes(model, quantization), 0
    for one in parameters(model):
        if one.name not in linear:
            total += 2 * math.prod(one.shape)
            continue
        rows = math.prod(one.shape) // _columns(one)
        layer = _tensors(rows, _columns(one), wanted[one.name])
        total += sum(ITEM_BYTES[dtype] * math.prod(shape) for dtype, shape in layer.values())
    return total


def write_folder(
    folder: Path,
    tensors: Mapping[str, LazyTensor],
    model: Decoder,
    quantization: Quantization,
    *,
    calibrated: bool,
    advance: Callable[[int], None] = lambda count: None,
) -> None:
    """Write the weights and config.json into `folder`, matrices in the nearest integers, or those
    that `calibrated` tensors have. `advance` is called for each tensor. Raises ArtifactError and
    EnvironmentFault."""
    layers, wanted = _linear_layers(model, quantization), schemes(model, quantization)
    held = Counter(one.hugging_face for one in parameters(model))
    entries: list[Entry] = []
    for name, tensor in to_hugging_face(tensors, model).items():
        if name in layers:
            first, scheme = layers[name][0], wanted[layers[name][0].name]
            own = tensors[first.name].integers if calibrated else None
            grouped = replace(scheme, group=scheme.group or tensor.shape[1])  # scales are float16
            read = own.read if own else partial(rounded, name, tensor, grouped)
            layer = name.removesuffix("weight")
            layout = {
                f"{layer}{end}": one
                for end, one in _tensors(tensor.shape[0], tensor.shape[1], scheme).items()
            }
            stored = read_once(layout, partial(_arrays, read, layer))
        else:
            stored = iter([of_16_bits(name, tensor)])
        entries += counted(stored, partial(advance, held[name]))
    write_entries(folder / "model.safetensors", entries, {"format": "pt"})
    every = _linear_layers(model, Quantization(quantization.quant, quantization.group))
    left = sorted(name.removesuffix(".weight") for name in every.keys() - layers.keys())
    config = hf_from_model_config(model) | {
        "dtype": "bfloat16" if any(one.dtype == "BF16" for one in entries) else "float16",
        "quantization_config": _described(
            {name.removesuffix(".weight"): wanted[each[0].name] for name, each in layers.items()},
            ["lm_head", *left],
        ),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _described(layers: Mapping[str, Scheme], ignored: list[str]) -> dict[str, Any]:
    """The quantization_config of config.json, for the formats of modules by name."""
    targets: dict[Scheme, list[str]] = {}
    for name, scheme in layers.items():
        targets.setdefault(scheme, []).append(name)
    groups = {}
    for index, (scheme, names) in enumerate(targets.items()):
        weights = {
            "num_bits": scheme.bits,
            "type": "int",
            "symmetric": True,
            "strategy": "group" if scheme.group else "channel",
            "group_size": scheme.group or None,
            "dynamic": False,
        }
        named = ["Linear"] if len(targets) == 1 else names
        groups[f"group_{index}"] = {"targets": named, "weights": weights}
    return {
        "quant_method": FORMAT,
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ignored,
    }


def _linear_layers(model: Decoder, quantization: Quantization) -> dict[str, list[Parameter]]:
    return linear_layers(model, quantization, lambda one: one.hugging_face)


def linear_layers(
    model: Decoder, quantization: Quantization, name_of: Callable[[Parameter], str]
) -> dict[str, list[Parameter]]:
    """The quantized matrices by the format's name: several where it fuses them."""
    wanted = schemes(model, quantization)
    found: dict[str, list[Parameter]] = {}
    for one in parameters(model):
        if one.is_linear and one.role != "head" and one.name in wanted:
            found.setdefault(name_of(one), []).append(one)
    return found


def _columns(one: Parameter) -> int:
    return one.shape[0] if one.transposed else one.shape[1]


def of_16_bits(name: str, tensor: LazyTensor) -> Entry:
    """bfloat16 unchanged, other floats as float16."""
    half = tensor if tensor.dtype == "BF16" else cast(name, tensor, "F16")
    return Entry(name, half.dtype, half.shape, partial(half.chunks, CHUNK))


def rounded(name: str, tensor: LazyTensor, scheme: Scheme) -> QuantizedTensor:
    """The nearest integers around zero."""
    if scheme.bits == 8:
        return quantize(tensor.float32(), 8, scheme.group, name)
    return quantize_around_zero(tensor.float32(), scheme.group, name)


def _tensors(rows: int, columns: int, scheme: Scheme) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Type and shape of a layer's tensors, by the suffix of their names."""
    return {
        "weight_shape": ("I64", (2,)),
        "weight_packed": ("I32", (rows, columns * scheme.bits // 32)),
        "weight_scale": ("F16", (rows, columns // (scheme.group or columns))),
    }


def _arrays(read: Callable[[], QuantizedTensor], layer: str) -> Iterator[tuple[str, NDArray[Any]]]:
    matrix = read()
    values = matrix.values.view(np.uint8)
    yield f"{layer}weight_shape", np.array(matrix.shape, np.int64)
    yield f"{layer}weight_packed", values if matrix.bits == 4 else values ^ np.uint8(0x80)
    yield f"{layer}weight_scale", matrix.scales
