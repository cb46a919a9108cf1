"""Hugging Face checkpoints: the files of a folder, and names to and from the canonical ones."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lite_runner.architectures import KNOWN, Parameter, architecture_of, parameters, stored_rows
from lite_runner.architectures.next_token import in_hugging_face
from lite_runner.architectures.spec import Decoder
from lite_runner.errors import ArtifactError
from lite_runner.system.files import read_json
from lite_runner.weights import LazyTensor, derived, same_values, shifted, transposed
from lite_runner.weights.formats import TORCH_INDEX
from lite_runner.weights.formats.fused import by_name, fuse, fused_experts, separated, split
from lite_runner.weights.formats.packed_matrices import unpack
from lite_runner.weights.formats.safetensors_file import StoredTensor, open_safetensors
from lite_runner.weights.layouts import check_tensors

MAX_INDEX = 100_000_000  # bytes
# Buffers that older releases of transformers saved; the network computes them itself.
_BUFFERS = re.compile(r"(^|\.)((attn|attention)\.(masked_)?bias|rotary_(pos_)?emb\.inv_freq)$")

# Of multimodal models.
_OTHER_PARTS = re.compile(
    r"(model\.)?(vision_tower|vision_model|multi_modal_projector|visual|audio_tower|embed_vision"
    r"|embed_audio)\."
)
# Of a layer that shares the keys of an earlier one, with the prefixes that `full_name` knows.
_KEYS = re.compile(
    r"(language_model\.)?(model\.)?(language_model\.)?layers\.(?P<layer>\d{1,5})\.self_attn\."
    r"(k_proj|v_proj|k_norm|v_norm)\."
)


def is_buffer(name: str) -> bool:
    """True if a tensor of this name is a buffer, not a weight."""
    return _BUFFERS.search(name) is not None


def open_index(index: Path) -> dict[str, LazyTensor]:
    """All tensors of a sharded checkpoint, whose shards are in the folder of `index`."""
    shards = read_index(index)
    tensors: dict[str, LazyTensor] = {}
    others: dict[str, StoredTensor] = {}  # parts of quantized matrices, possibly in several shards
    for file, names in sorted(shards.items()):
        shard = index.parent / file
        if not shard.is_file():
            raise ArtifactError(
                f"{index}: the shard {file} is missing "
                f"({len(names)} tensors of {len(shards)} shards)",
                "fetch the missing file; the download may have been interrupted",
            )
        own: dict[str, StoredTensor] = {}
        if index.name == TORCH_INDEX:
            from lite_runner.weights.formats.torch_file import open_torch

            found = open_torch(shard, is_buffer)
        else:
            found = open_safetensors(shard, is_buffer, own)
        held = found.keys() | own.keys()
        absent = [name for name in names if name not in held and not is_buffer(name)]
        extra = [name for name in (*found, *own) if name not in names]
        if absent or extra:
            kind, listed = ("lacks", absent) if absent else ("also holds", extra)
            raise ArtifactError(
                f"{shard}: not the shard that {index.name} describes: it {kind} {len(listed)} "
                f"tensors: {', '.join(listed[:5])}",
                "fetch the index and its shards again, all of one revision",
            )
        tensors.update(found)
        others.update(own)
    return unpack(tensors, others, index)


def read_index(index: Path) -> dict[str, set[str]]:
    """Shard file name -> names of its tensors."""
    content = read_json(index, "a valid index", most=MAX_INDEX, hint="fetch it again")
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ArtifactError(f"{index}: expected an object weight_map of tensor -> shard file")
    suffix = ".bin" if index.name == TORCH_INDEX else ".safetensors"
    shards: defaultdict[str, set[str]] = defaultdict(set)
    for name, file in weight_map.items():
        # A plain name cannot leave the folder. Symbolic links are fine: the hub's cache uses them.
        if not isinstance(file, str) or not re.fullmatch(rf"[\w][\w.+-]*\{suffix}", file):
            raise ArtifactError(
                f"{index}: tensor {name!r} points to {file!r}, expected the name of a {suffix} "
                "file in the same folder",
                "do not use this checkpoint: an index has no reason to point elsewhere",
            )
        shards[file].add(name)
    return dict(shards)


def _name(parameter: Parameter) -> str:
    return parameter.hugging_face


def shapes_in_files(config: Decoder) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of every tensor the model needs."""
    return {name: _shape_in_file(parts, config) for name, parts in by_name(config, _name).items()}


def _shape_in_file(parts: list[Parameter], config: Decoder) -> tuple[int, ...]:
    shape = parts[0].shape[::-1] if parts[0].transposed else parts[0].shape
    if _is_by_head(parts[0], config):
        return (shape[0] // config.head_dim, config.head_dim)
    if len(parts) > 1:
        shape = (sum(part.shape[0] for part in parts), *shape[1:])
    return shape[::-1] if _is_conv1d(parts[0], config) else shape


def _is_conv1d(parameter: Parameter, config: Decoder) -> bool:
    """True if transformers stores it as Conv1D, [in, out]; other linear layers are [out, in]."""
    return architecture_of(config).conv1d and parameter.is_linear


def _is_less_one(parameter: Parameter, config: Decoder) -> bool:
    """True for the weight of a norm to which transformers adds 1."""
    is_norm = parameter.role is not None and parameter.role.endswith("norm")
    is_norm = is_norm and parameter.kind == "weight"
    return is_norm and architecture_of(config).norms_less_one


def _is_by_head(parameter: Parameter, config: Decoder) -> bool:
    """True for a norm of queries or keys with weights of each head, [heads, head_dim] in files."""
    return parameter.role in ("query_norm", "key_norm") and config.attention.qk_norm_apart


def _is_of_another_part(name: str, config: Decoder) -> bool:
    """True for a tensor of another part of a multimodal model than the text model."""
    if _OTHER_PARTS.match(name) is None:
        return False
    return any(one.text_of == config.architecture for one in KNOWN.values())


def _is_of_next_token_layer(name: str, config: Decoder) -> bool:
    """True for a tensor of a layer for multi-token prediction, behind the model's own."""
    layer = re.match(r"model\.layers\.(\d{1,5})\.", name)
    further = layer is not None and int(layer[1]) >= config.num_layers
    further = further or name.startswith("mtp.")
    return further and architecture_of(config).next_token_layers


def _is_of_borrowed_keys(name: str, config: Decoder) -> bool:
    """True for keys and values of a layer that takes those of an earlier one: Gemma 4's smaller
    checkpoints have them, and transformers leaves them out."""
    found = _KEYS.match(name)
    return found is not None and config.borrows(int(found["layer"]))


def full_name(name: str, expected: Mapping[str, object]) -> str:
    """`name` with the prefix that checkpoints of the bare model leave out, and without that of the
    text model of a model with other parts."""
    for prefix, kept in (("language_model.", ""), ("model.language_model.", "model.")):
        short = kept + name.removeprefix(prefix)
        if name.startswith(prefix) and (short in expected or short == "lm_head.weight"):
            return short
    for prefix in ("model.", "transformer."):
        if name not in expected and prefix + name in expected:
            return prefix + name
    return name


def _in_pieces(config: Decoder) -> dict[str, list[str]]:
    """Norm with weights per head -> the tensors of its heads, for files that store them apart."""
    if not architecture_of(config).tensor_by_head:
        return {}
    return {
        one.hugging_face: [
            one.hugging_face.replace(".weight", f".{head}.weight")
            for head in range(_shape_in_file([one], config)[0])
        ]
        for one in parameters(config)
        if _is_by_head(one, config)
    }


def _joined(found: Mapping[str, LazyTensor], config: Decoder) -> Mapping[str, LazyTensor]:
    """The tensors of a file, with norms stored in pieces joined."""
    joined, used = {}, set()
    for name, pieces in _in_pieces(config).items():
        held = [found[one] for one in pieces if one in found]
        if len(held) == len(pieces) and len({(one.shape, one.dtype) for one in held}) == 1:
            joined[name] = LazyTensor(
                (len(held), *held[0].shape), held[0].dtype, partial(_stacked, held)
            )
            used.update(pieces)
    return {name: one for name, one in found.items() if name not in used} | joined


def _stacked(held: list[LazyTensor]) -> NDArray[np.generic]:
    return np.stack([one.read() for one in held])


def _row(tensor: LazyTensor, row: int) -> LazyTensor:
    return derived(tensor, tensor.shape[1:], lambda array: array[row])


def from_hugging_face(
    found: Mapping[str, LazyTensor], config: Decoder, where: str
) -> dict[str, LazyTensor]:
    """Canonical tensors from Hugging Face's, complete and validated. Raises ArtifactError."""
    if config.joins is not None:
        found = in_hugging_face(found, where)
    found = _joined(separated(found, config, where), config)
    expected = shapes_in_files(config)
    beside = architecture_of(config).projections or ()
    known = {**expected, **dict.fromkeys(beside)}
    named: dict[str, LazyTensor] = {}
    for stored_name, tensor in found.items():
        name = full_name(stored_name, known)
        if name in named:
            raise ArtifactError(f"{where}: tensor {name} occurs twice, with and without prefix")
        left_out = (_is_of_another_part, _is_of_next_token_layer, _is_of_borrowed_keys)
        if not is_buffer(name) and not any(is_of(name, config) for is_of in left_out):
            named[name] = tensor
    table = parameters(config)
    words = named.get(table[0].hugging_face)
    if words is not None and beside and beside[0] in named and beside[1] in named:
        inward, outward = map(named.pop, beside)
        named["lm_head.weight"] = _product(named.get("lm_head.weight", words), outward, where)
        named[table[0].hugging_face] = _product(words, transposed(inward), where)
    # Quantizing tools store Conv1D's matrices like those of other linear layers.
    conv1d = {one.hugging_face for one in table if _is_conv1d(one, config)}
    named = {
        name: transposed(one) if one.block_type and name in conv1d else one
        for name, one in named.items()
        if not _is_no_bias(name, one, named, expected)
    }
    head = None if "lm_head.weight" in expected else named.pop("lm_head.weight", None)
    check_tensors({name: tensor.shape for name, tensor in named.items()}, expected, where)
    if head is not None:
        check_tied_head(head, named[table[0].hugging_face], where)
    return {
        parameter.name: _from_file(parameter, named[parameter.hugging_face], config)
        for parameter in table
    }


def _product(table: LazyTensor, matrix: LazyTensor, where: str) -> LazyTensor:
    """A table [rows, width] times a matrix [width, hidden]."""
    sizes = table.shape, matrix.shape
    if any(len(shape) != 2 for shape in sizes) or table.shape[1] != matrix.shape[0]:
        raise ArtifactError(
            f"{where}: an embedding or head {list(table.shape)} does not fit the projection"
            f" {list(matrix.shape)}"
        )
    return LazyTensor(
        (table.shape[0], matrix.shape[1]), "F32", lambda: table.float32() @ matrix.float32()
    )


def _is_no_bias(
    name: str, tensor: LazyTensor, named: Mapping[str, LazyTensor], expected: Mapping[str, object]
) -> bool:
    """True for the zeros that GPTQ's tools write for a layer without a bias."""
    matrix = named.get(f"{name.removesuffix('.bias')}.weight")
    packed = matrix is not None and matrix.block_type and name not in expected
    return bool(packed) and name.endswith(".bias") and not tensor.read().any()


def check_tied_head(head: LazyTensor, embedding: LazyTensor, where: str) -> None:
    """Raise ArtifactError if a stored head differs from the embedding that it is tied to."""
    if not same_values(head, embedding):
        raise ArtifactError(
            f"{where}: the output head differs from the word embedding {list(embedding.shape)}, "
            "but the model's config ties them",
            "set model.model_config.tie_word_embeddings=false",
        )


def _from_file(parameter: Parameter, tensor: LazyTensor, config: Decoder) -> LazyTensor:
    conv1d = _is_conv1d(parameter, config)
    if _is_less_one(parameter, config):
        tensor = shifted(tensor, 1.0)
    if parameter.role == "head" and config.normed_head:
        return with_normed_rows(tensor)
    if _is_by_head(parameter, config):
        tensor = derived(tensor, parameter.shape, lambda array: array)
    if stored_rows(parameter, config) is not None:
        return split(transposed(tensor) if conv1d else tensor, parameter, config)
    return tensor if conv1d == parameter.transposed else transposed(tensor)


def with_normed_rows(head: LazyTensor) -> LazyTensor:
    """A head as a model with `normed_head` computes with it."""
    return derived(head, head.shape, _normed_rows)


def _normed_rows(head: NDArray[Any]) -> NDArray[Any]:
    wide = head.astype(np.float32)
    lengths = np.sqrt((wide * wide).sum(-1, keepdims=True))
    normed: NDArray[Any] = (wide / np.maximum(lengths, 1e-12)).astype(head.dtype)
    return normed


def to_hugging_face(tensors: Mapping[str, LazyTensor], config: Decoder) -> dict[str, LazyTensor]:
    """Canonical tensors as Hugging Face's, under the names that transformers writes."""
    named = fused_experts(tensors, config) | {
        name: _to_file(parts, tensors, config)
        for name, parts in by_name(config, _name).items()
        if parts[0].fused is None
    }
    for name, pieces in _in_pieces(config).items():
        whole = named.pop(name)
        named |= {piece: _row(whole, head) for head, piece in enumerate(pieces)}
    return named


def _to_file(
    parts: list[Parameter], tensors: Mapping[str, LazyTensor], config: Decoder
) -> LazyTensor:
    first = parts[0]
    conv1d = _is_conv1d(first, config)
    held = [tensors[part.name] for part in parts]
    if _is_less_one(first, config):
        held = [shifted(one, -1.0) for one in held]
    if stored_rows(first, config) is None:
        return held[0] if conv1d == first.transposed else transposed(held[0])
    fused = fuse(parts, held, config)
    if _is_by_head(first, config):
        return derived(fused, _shape_in_file(parts, config), lambda array: array)
    return transposed(fused) if conv1d else fused
