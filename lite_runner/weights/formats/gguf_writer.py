"""GGUF writer, the counterpart of `gguf_checkpoint`."""

from __future__ import annotations

import math
import mmap
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lite_runner.architectures import Parameter, architecture_of, parameters
from lite_runner.architectures.spec import Decoder
from lite_runner.errors import ConfigError
from lite_runner.records import dataclass
from lite_runner.system.files import new_file, require_space
from lite_runner.weights import LazyTensor
from lite_runner.weights.formats import hf_from_model_config
from lite_runner.weights.formats.gguf_checkpoint import (
    FREQUENCIES,
    config_of_gguf,
    file_order,
    frequency_stops,
    llama3_factors,
)
from lite_runner.weights.formats.gguf_file import TYPES, GGUFFile, GGUFHeader, GGUFTensor
from lite_runner.weights.quantization.k_quants import Search, blocks_of, blocks_of_integers

GGUFKind = Literal["Q8_0", "Q4_0", "Q4_1", "Q4_K_M"]
# general.file_type of llama.cpp.
_FILE_TYPES: dict[GGUFKind, int] = {"Q8_0": 7, "Q4_0": 2, "Q4_1": 3, "Q4_K_M": 15}
_SIZES = {name: (block, nbytes) for name, block, nbytes in TYPES.values()}
_FLOATS: dict[str, type[np.generic]] = {"F32": np.float32, "F16": np.float16}
# For rows that are not whole blocks.
_FALLBACKS = {"Q4_K": "Q5_0", "Q6_K": "Q8_0", "Q8_0": "F16", "Q4_0": "F16", "Q4_1": "F16"}
_FALLBACKS["Q5_0"] = "F16"


@dataclass(frozen=True)
class _Tensor:
    """A tensor of the file, and the parameters concatenated in it."""

    name: str
    shape: tuple[int, ...]  # NumPy's
    type_name: str
    parts: tuple[Parameter, ...]

    @property
    def nbytes(self) -> int:
        block, size = _SIZES[self.type_name]
        return math.prod(self.shape) // block * size


def gguf_bytes(model: Decoder, kind: GGUFKind) -> int:
    """Bytes of the tensors of `write_gguf`. Raises ConfigError as it does."""
    return sum(one.nbytes for one in _layout(model, kind, ()))


def check_writable(model: Decoder, kind: GGUFKind) -> None:
    """Raise ConfigError where the metadata of a GGUF file cannot express the model."""
    layout, metadata = _layout(model, kind, ()), _metadata(model, kind)
    tensors = {
        one.name: GGUFTensor(one.shape, one.type_name, np.array([place]).view(np.uint8))
        for place, one in enumerate(layout)
    }
    if (factors := _frequencies(model)) is not None:
        tensors[FREQUENCIES] = GGUFTensor(factors.shape, "F32", factors.view(np.uint8))
    header = GGUFHeader(Path("GGUF"), mmap.mmap(-1, 1), metadata, (), 0)
    read = replace(
        config_of_gguf(GGUFFile(header, tensors)),
        bos_token_id=model.bos_token_id,
        eos_token_id=model.eos_token_id,
        pad_token_id=model.pad_token_id,
    )
    if read != model:
        found = read.sizes()
        lost = [f"{name}={one}" for name, one in model.sizes().items() if found[name] != one]
        raise ConfigError(
            f"{model.architecture}: a GGUF file cannot express {', '.join(lost) or 'its layers'}",
            "quantize.format=folder",
        )


def write_gguf(
    path: Path,
    tensors: Mapping[str, LazyTensor],
    model: Decoder,
    kind: GGUFKind,
    tokenizer: Mapping[str, Any],
    advance: Callable[[int], None] = lambda count: None,
    *,
    search: Search,
    importance: Mapping[str, NDArray[np.float32]] | None = None,
    finer: Collection[str] = (),
) -> int:
    """Write canonical tensors as the GGUF file `path`; returns the bytes of its tensors. Matrices
    that have such blocks, or integers that are such, are written as they are.

    `tokenizer`: the keys of its metadata; `search`: for the scales of blocks; `importance`: of the
    inputs of its tensors [experts or 1, in], which the integers are chosen by; `finer`: parameters
    that become Q8_0. A tensor at a time is in memory; `advance` is called for each. Raises
    ConfigError for a model that GGUF cannot express, EnvironmentFault and ArtifactError; nothing
    half-written gets the final name.
    """
    import gguf

    layout = _layout(model, kind, finer)
    size = sum(one.nbytes for one in layout)
    with new_file(path) as fresh:
        require_space(fresh.parent, size)
        metadata = _metadata(model, kind)
        writer = gguf.GGUFWriter(fresh, metadata.pop("general.architecture"))
        for key, value in {**metadata, **tokenizer}.items():
            writer.add_key_value(key, value, _value_type(value))
        factors = _frequencies(model)
        if factors is not None:
            writer.add_tensor(FREQUENCIES, factors)
        for one in layout:
            kind_of_tensor = gguf.GGMLQuantizationType[one.type_name]
            dtype: type[np.generic] = _FLOATS.get(one.type_name, np.uint8)
            row = one.nbytes // math.prod(one.shape[:-1])
            # For blocks the library expects the bytes of a row.
            shape = one.shape if dtype is not np.uint8 else (*one.shape[:-1], row)
            writer.add_tensor_info(one.name, shape, np.dtype(dtype), one.nbytes, kind_of_tensor)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if factors is not None:
            writer.write_tensor_data(factors)
        for one in layout:
            sizes = None if importance is None else importance.get(one.name)
            writer.write_tensor_data(_bytes(one, tensors, model, search, sizes))
            advance(len(one.parts))
        writer.close()
    return size


def _value_type(value: object) -> Any:
    from gguf import GGUFValueType

    kinds = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING", list: "ARRAY"}
    return GGUFValueType[kinds[type(value)]]


def _layout(model: Decoder, kind: GGUFKind, finer: Collection[str]) -> list[_Tensor]:
    together: defaultdict[str, list[Parameter]] = defaultdict(list)
    for one in parameters(model):
        gguf = architecture_of(model).gguf
        if not one.gguf or gguf is None or not gguf.written:
            raise ConfigError(
                f"{model.architecture}: cannot be written as a GGUF file", "quantize.format=folder"
            )
        together[one.gguf].append(one)
    found = []
    for name, parts in together.items():
        parts.sort(key=lambda one: (one.part or 0, one.expert or 0))
        first = parts[0]
        rows, *rest = first.shape[::-1] if first.transposed else first.shape
        shape: tuple[int, ...] = (sum(_rows(one) for one in parts), *rest)
        if first.expert is not None:
            shape = (len(parts), rows, *rest)
        elif first.role in ("query_norm", "key_norm") and model.attention.qk_norm_apart:
            shape = (rows // model.head_dim, model.head_dim)
        type_name = _type_of(first, len(parts), model, "Q8_0" if first.name in finer else kind)
        found.append(_Tensor(name, shape, type_name, tuple(parts)))
    return found


def _rows(parameter: Parameter) -> int:
    return parameter.shape[1] if parameter.transposed else parameter.shape[0]


def _type_of(parameter: Parameter, parts: int, model: Decoder, kind: GGUFKind) -> str:
    """The type of a tensor: in Q4_K_M the most sensitive have Q6_K, as in llama.cpp."""
    is_end = parameter.role in ("embedding", "head", "side_table")
    if parameter.kind != "weight" or not (parameter.is_linear or is_end):
        return "F32"
    wanted: str = "Q4_K" if kind == "Q4_K_M" else kind
    if is_end and kind in ("Q4_0", "Q4_1"):
        wanted = "Q8_0"  # as quant=a16w4 has them
    elif kind == "Q4_K_M":
        table = parameter.role == "embedding" and not model.tie_word_embeddings
        fused = parts > 1 and parameter.expert is None and parameter.role == "query"
        if (is_end and not table) or fused or _is_sensitive(parameter, model.num_layers):
            wanted = "Q6_K"
    columns = parameter.shape[0] if parameter.transposed else parameter.shape[1]
    while wanted in _FALLBACKS and columns % _SIZES[wanted][0]:
        wanted = _FALLBACKS[wanted]
    return wanted


def _is_sensitive(parameter: Parameter, layers: int) -> bool:
    """llama.cpp's choice: of values and down projections those of the first and last eighth of the
    layers, and each third between."""
    if parameter.role not in ("value", "down", "expert_down") or parameter.layer is None:
        return False
    eighth = layers // 8
    inner = (parameter.layer - eighth) % 3 == 2
    return parameter.layer < eighth or parameter.layer >= 7 * layers // 8 or inner


def _bytes(
    tensor: _Tensor,
    tensors: Mapping[str, LazyTensor],
    model: Decoder,
    search: Search,
    importance: NDArray[np.float32] | None,
) -> NDArray[Any]:
    first = tensor.parts[0]
    held = tensors[first.name]
    if len(tensor.parts) == 1:
        move = file_order(first, model)
        if held.blocks is not None and held.blocks.type_name == tensor.type_name:
            return np.ascontiguousarray(move(held.blocks.read().data))
        integers = held.integers
        if integers is not None and integers.scheme.group == 32 and not integers.scheme.group_bytes:
            name, blocks = blocks_of_integers(integers.read())
            if name == tensor.type_name:
                return np.ascontiguousarray(move(blocks))
    rows = [_floats(one, tensors[one.name], model) for one in tensor.parts]
    values = rows[0] if len(rows) == 1 else np.concatenate(rows)
    if dtype := _FLOATS.get(tensor.type_name):
        return values.astype(dtype)
    if importance is None or tensor.type_name == "Q8_0":
        return blocks_of(values, tensor.type_name, search)
    if len(importance) == 1:  # with the same inputs
        return blocks_of(values, tensor.type_name, search, importance[0])
    each = zip(np.split(values, len(importance)), importance, strict=True)
    return np.concatenate([blocks_of(one, tensor.type_name, search, sizes) for one, sizes in each])


def _floats(parameter: Parameter, tensor: LazyTensor, model: Decoder) -> NDArray[np.float32]:
    values = tensor.float32()
    values = np.ascontiguousarray(values.T if parameter.transposed else values)
    return np.ascontiguousarray(file_order(parameter, model)(values))


def _frequencies(model: Decoder) -> NDArray[np.float32] | None:
    rotary = model.rotary
    if rotary is not None and rotary.proportional:
        size = model.rotated_head(rotary)
        return frequency_stops(size, rotary.dims or size)
    if rotary is None or rotary.scaling is None or rotary.scaling.type != "llama3":
        return None
    return llama3_factors(rotary.theta, model.head_dim, rotary.scaling).astype(np.float32)


def _metadata(model: Decoder, kind: GGUFKind) -> dict[str, Any]:
    architecture = architecture_of(model)
    gguf = architecture.gguf
    assert gguf is not None
    raw = hf_from_model_config(model)
    name = gguf.name or architecture.name
    values: dict[str, Any] = {
        "context_length": model.seq_length,
        "embedding_length": model.hidden_size,
        "block_count": model.num_layers,
        "feed_forward_length": model.intermediate_size,
        "attention.head_count": model.num_heads,
        "attention.head_count_kv": model.n_kv_heads,
        "vocab_size": model.vocab_size,
        **{key: raw[field] for field, key in gguf.keys.items() if raw.get(field) is not None},
    }
    if model.sparse is not None and (experts := model.sparse.experts) is not None:
        values["expert_gating_func"] = 2 if experts.sigmoid else 1
        values["expert_feed_forward_length"] = model.sparse.width
        if experts.shared:
            values["expert_shared_feed_forward_length"] = experts.shared
    if (rotary := model.rotary) is not None:
        values["rope.freq_base"] = float(rotary.theta)
        values["rope.dimension_count"] = rotary.dims or model.head_dim
        values["attention.value_length"] = model.head_dim
        if (scaling := rotary.scaling) is not None and scaling.type in ("linear", "yarn"):
            values["rope.scaling.type"] = scaling.type
            values["rope.scaling.factor"] = float(scaling.factor)
            if scaling.type == "yarn":
                values["rope.scaling.original_context_length"] = scaling.original_seq_length
    values |= gguf.more(model)
    plain = {key: _plain(value) for key, value in values.items()}
    return {
        "general.architecture": name,
        "general.quantization_version": 2,
        "general.file_type": _FILE_TYPES[kind],
        **{f"{name}.{key}": value for key, value in plain.items()},
    }


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
