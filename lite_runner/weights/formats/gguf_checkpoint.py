"""A GGUF file as a model: its config, rotary scaling, and tensors under canonical names."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lite_runner.architectures import (
    GGUF,
    KNOWN,
    Parameter,
    Rows,
    architecture_of,
    of_gguf,
    parameters,
)
from lite_runner.architectures.fields import MAX_LAYERS
from lite_runner.architectures.positions import longrope_attention_factor
from lite_runner.architectures.spec import Decoder, RopeScaling, Rotary
from lite_runner.config import did_you_mean, nearest
from lite_runner.errors import ArtifactError
from lite_runner.weights import LazyTensor, derived, transposed, with_rows
from lite_runner.weights.formats import model_config_from_hf
from lite_runner.weights.formats.gguf_file import Array, GGUFFile

NEXT_TOKEN = "nextn_predict_layers"
FREQUENCIES = "rope_freqs.weight"
INSTEAD = "take the model's Hugging Face checkpoint instead"  # hint of errors
SHORT, LONG = "rope_factors_short.weight", "rope_factors_long.weight"  # of LongRoPE
# Architecture metadata without effect, with the reason; any other key that is not read is refused
# unless it is 0, false, empty or NEUTRAL.
NO_EFFECT = {
    "vocab_size": "the embedding has it",
    "tensor_data_layout": "where the converter had it from",
    "rope.scaling.finetuned": "how the model was trained",
    "rope.dimension_sections": "of images: a text's positions are the same in all sections",
    "n_deepstack_layers": "of images",
    "attention.layer_norm_epsilon": "of the other kind of norm",
    "attention.layer_norm_rms_epsilon": "of the other kind of norm",
}
NEUTRAL = {
    "attention.max_alibi_bias": 8.0,
    "expert_group_count": 1,
    "expert_group_used_count": 1,
    "expert_weights_scale": 1.0,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
}


class _Hyperparameters:
    """The architecture's metadata, and which keys were read."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self._prefix = f"{architecture}."
        self._given = {
            key.removeprefix(self._prefix): value
            for key, value in file.metadata.items()
            if key.startswith(self._prefix)
        }
        self._where = file.path
        self._read: set[str] = set()

    def value(self, key: str, default: object = None) -> Any:
        """A number, a text, or one number a layer where these differ."""
        self._read.add(key)
        found = self._given.get(key, default)
        if isinstance(found, Array):
            values = found.values()
            found = values[0] if len(set(values)) == 1 else values
        return shortest(found) if isinstance(found, float) else found

    def refuse_others(self, config: Decoder) -> None:
        """Raise ArtifactError for keys that were not read and may change the result."""
        sparse = config.sparse
        experts = None if sparse is None else sparse.experts
        width = 0 if sparse is None else sparse.width
        same = NEUTRAL | {
            "expert_gating_func": 2 if experts is not None and experts.sigmoid else 1,
            "expert_weights_norm": experts is not None and experts.renormalized,
            "expert_shared_count": experts.shared // width if experts else 0,
            "expert_shared_feed_forward_length": experts.shared if experts else 0,
            "expert_feed_forward_length": width,
            "attention.head_count_kv": config.n_kv_heads,
            "attention.key_length": config.head_dim,
            "attention.value_length": config.head_dim,
            "rope.dimension_count": (config.rotary and config.rotary.dims) or config.head_dim,
        }
        if config.rotary is not None and config.rotary.proportional:
            size, local = config.rotated_head(config.rotary), self.value("attention.key_length_swa")
            same |= dict.fromkeys(("attention.value_length", "rope.dimension_count"), size)
            same |= dict.fromkeys(("attention.value_length_swa", "rope.dimension_count_swa"), local)
        for key in sorted(self._given.keys() - self._read - NO_EFFECT.keys()):
            value = self.value(key)
            if value and value != same.get(key):
                expected = f", expected {same[key]}" if key in same else ""
                raise ArtifactError(
                    f"{self._where}: {self._prefix}{key} = {value} is not supported{expected}"
                )


def config_of_gguf(file: GGUFFile) -> Decoder:
    """The model that the metadata describes. Raises ArtifactError for one that is not supported."""
    architecture = file.metadata.get("general.architecture")
    named = of_gguf(architecture)
    if named is None or not isinstance(architecture, str):
        known = [one.gguf.name or one.name for one in KNOWN.values() if one.gguf is not None]
        near = nearest(architecture, known) if isinstance(architecture, str) else None
        raise ArtifactError(
            f"{file.path}: general.architecture is {architecture!r}, expected one of "
            f"{', '.join(known)}{did_you_mean(near)}"
        )
    found, gguf = named
    given = _Hyperparameters(file, architecture)
    if not given.value("attention.causal", True):
        raise ArtifactError(
            f"{file.path}: {architecture}.attention.causal = false: the model sees the tokens that "
            "follow, and so generates no text"
        )
    every = given.value("block_count")
    if type(every) is not int or not 1 <= every <= MAX_LAYERS:
        raise ArtifactError(
            f"{file.path}: {architecture}.block_count is {every!r}, expected 1 to {MAX_LAYERS}",
            INSTEAD,
        )
    try:
        raw = _as_hugging_face(file, gguf, given.value)
    except (TypeError, ValueError, IndexError, ArithmeticError) as error:
        raise ArtifactError(
            f"{file.path}: metadata of {architecture} is incomplete or malformed: {error}", INSTEAD
        ) from error
    config = model_config_from_hf(
        {"model_type": found.name} | raw, f"{file.path}: metadata", notes=False
    )
    given.refuse_others(config)
    if config.rotary is None:
        return config
    if config.rotary.proportional:
        dims = _rotated_dims(file, config, config.rotary)
        return config.with_rotary(replace(config.rotary, dims=dims))
    scaling = scaling_of_frequencies(file, config, config.rotary)
    return config if scaling is None else config.with_rope_scaling(scaling)


def _as_hugging_face(file: GGUFFile, gguf: GGUF, value: Callable[..., Any]) -> dict[str, Any]:
    """The metadata as a Hugging Face config.json, which is then checked as one."""
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    embedding = file.tensors.get("token_embd.weight")
    vocab_size = tokens.count if isinstance(tokens, Array) else None
    if embedding is not None:  # it may be padded beyond the vocabulary
        vocab_size = embedding.shape[0]
    eos = [file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    raw = {
        "vocab_size": vocab_size,
        "hidden_size": value("embedding_length"),
        "num_hidden_layers": _layers(value),
        "num_attention_heads": value("attention.head_count"),
        "max_position_embeddings": value("context_length"),
        "intermediate_size": value("feed_forward_length"),
        "tie_word_embeddings": _is_tied(file),
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": [token for token in dict.fromkeys(eos) if token is not None],
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id"),
        "rope_theta": value("rope.freq_base", 10000.0),
        "rope_scaling": longrope(file, value) or scaling_of_metadata(value),
    }
    given = raw | {name: value(key) for name, key in gguf.keys.items()}
    return given | gguf.inferred(file.tensors, given)


def _layers(value: Callable[..., Any]) -> Any:
    """The model's number of layers, without those for multi-token prediction."""
    every, further = value("block_count"), value(NEXT_TOKEN, 0)
    return every - further if type(further) is int and 0 <= further < every else every


def _is_tied(file: GGUFFile) -> bool:
    """True if there is no output head, or only a copy of the embedding, as older files have."""
    head, embedding = file.tensors.get("output.weight"), file.tensors.get("token_embd.weight")
    if head is None or embedding is None:
        return head is None
    return head.type_name == embedding.type_name and np.array_equal(head.data, embedding.data)


def from_gguf(file: GGUFFile, config: Decoder) -> dict[str, LazyTensor]:
    """Canonical tensors of the file, complete and checked, or ArtifactError."""
    from lite_runner.architectures.next_token import in_gguf
    from lite_runner.weights.formats.hugging_face import check_tied_head
    from lite_runner.weights.layouts import check_tensors

    if config.joins is not None:
        file = replace(file, tensors=in_gguf(file.tensors, str(file.path)))
    table = parameters(config)
    experts = None if config.sparse is None else config.sparse.experts
    expected: dict[str, tuple[int, ...]] = {}
    starts = {}  # of parameters within fused tensors, in the order of their parts
    for parameter in sorted(table, key=lambda one: one.part or 0):
        name = _name_in_file(parameter, file)
        if halves := _halves_of_latents(parameter, file):
            latent, heads = config.attention.latent, config.num_heads
            assert latent is not None
            keys, values = halves
            expected |= {keys: (heads, latent.rank, latent.plain)}
            expected |= {values: (heads, latent.value, latent.rank)}
            starts[parameter.name] = 0
            continue
        if experts is not None and "_exps." in name and parameter.expert is not None:
            rows, *rest = parameter.shape
            parts = 1 if name == parameter.gguf else 2  # gate before up
            expected[name] = (experts.count, parts * rows, *rest)
            part = int(parts == 2 and parameter.role == "expert_up")
            starts[parameter.name] = (parts * parameter.expert + part) * rows
            continue
        rows, *rest = parameter.shape[::-1] if parameter.transposed else parameter.shape
        starts[parameter.name] = start = expected.get(name, (0,))[0]
        expected[name] = (start + rows, *rest)
    positions = tensors_of_scaling(config)
    found = {
        name: _shape(one.shape, expected.get(name))
        for name, one in file.tensors.items()
        if name not in positions
        and not _of_next_token(name, file, config)
        and not _of_borrowed_keys(name, config)
    }
    head = file.tensors.get("output.weight")
    tied_twice = head is not None and "output.weight" not in expected
    if tied_twice:
        del found["output.weight"]
    check_tensors(found, expected, str(file.path))
    if head is not None and tied_twice:
        check_tied_head(head.lazy(), file.tensors[table[0].gguf].lazy(), str(file.path))
    named = of_gguf(file.metadata.get("general.architecture"))
    assert named is not None  # `config` was read from it
    _, gguf = named
    found_in: dict[str, LazyTensor] = {}
    for one in table:
        if (places := gguf.fused_rows(one, config)) is not None:
            found_in[one.name] = _taken(file.tensors[one.gguf].lazy(), one.shape, places)
            continue
        held = _from_file(one, file, starts[one.name])
        found_in[one.name] = in_canonical_order(held, one, config, gguf)
    return found_in


def _taken(tensor: LazyTensor, shape: tuple[int, ...], rows: Rows) -> LazyTensor:
    return with_rows(tensor, shape, lambda array: array[rows])


def in_canonical_order(
    held: LazyTensor, parameter: Parameter, model: Decoder, gguf: GGUF
) -> LazyTensor:
    """The rows of a parameter in our order, from that of a file."""
    if gguf.permuted and parameter.rotary_heads:
        halves = partial(_halves, heads=parameter.rotary_heads)
        return with_rows(held, held.shape, halves)
    rows = gguf.rows(parameter, model)
    held = held if rows is None else _taken(held, held.shape, rows)
    if (columns := gguf.columns(parameter, model)) is not None:
        held = derived(held, held.shape, lambda array: array[:, columns])
    if parameter.role != "recurrent_log":
        return held
    return LazyTensor(held.shape, "F32", lambda: np.log(-held.float32()))


def file_order(parameter: Parameter, model: Decoder) -> Callable[[NDArray[Any]], NDArray[Any]]:
    """The permutation of rows to the order of the file."""
    gguf = architecture_of(model).gguf
    assert gguf is not None
    if gguf.permuted and (heads := parameter.rotary_heads):

        def pairs(array: NDArray[Any]) -> NDArray[Any]:
            halves = array.reshape(heads, 2, -1, *array.shape[1:])
            return halves.swapaxes(1, 2).reshape(array.shape)

        return pairs
    rows = gguf.rows(parameter, model)

    def moved(array: NDArray[Any]) -> NDArray[Any]:
        if rows is None:
            return array
        result = np.empty_like(array)
        result[rows] = array
        return result

    return moved


def _shape(stored: tuple[int, ...], expected: tuple[int, ...] | None) -> tuple[int, ...]:
    """The expected shape, if only axes differ: a vector may be a row, or the rows of heads."""
    return expected if expected is not None and _same_numbers(stored, expected) else stored


def _same_numbers(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """True if a vector is cut into rows, or axes of 1 are left out."""
    if 1 in (len(one), len(other)):
        return math.prod(one) == math.prod(other)
    return [size for size in one if size > 1] == [size for size in other if size > 1]


def _of_next_token(name: str, file: GGUFFile, config: Decoder) -> bool:
    """True for a tensor of the layers for multi-token prediction, behind the model's own."""
    if f"{file.metadata['general.architecture']}.{NEXT_TOKEN}" not in file.metadata:
        return False
    block, _, layer = name.partition(".")
    number = layer.partition(".")[0]
    return block == "blk" and number.isdecimal() and int(number) >= config.num_layers


_KEYS = re.compile(r"blk\.(?P<layer>\d{1,5})\.attn_(k|v|k_norm)\.")


def _of_borrowed_keys(name: str, config: Decoder) -> bool:
    """True for keys of a layer that shares those of an earlier one."""
    found = _KEYS.match(name)
    return found is not None and config.borrows(int(found["layer"]))


def _name_in_file(parameter: Parameter, file: GGUFFile) -> str:
    """Some files have gate and up of all experts in one tensor, older ones a tensor for each
    expert, as blk.0.ffn_gate.7.weight."""
    if parameter.expert is None or parameter.gguf in file.tensors:
        return parameter.gguf
    both = re.sub(r"ffn_(gate|up)_exps", "ffn_gate_up_exps", parameter.gguf)
    if both in file.tensors:
        return both
    own = parameter.gguf.replace("_exps.", f".{parameter.expert}.")
    return own if own in file.tensors else parameter.gguf


def _halves_of_latents(parameter: Parameter, file: GGUFFile) -> tuple[str, str] | None:
    """Newer files have what keys and values are made of apart, as absorbed attention reads them;
    None: one tensor, or another parameter."""
    if parameter.role != "latent_values" or parameter.gguf in file.tensors:
        return None
    keys, values = (parameter.gguf.replace("attn_kv_b", one) for one in ("attn_k_b", "attn_v_b"))
    return (keys, values) if keys in file.tensors and values in file.tensors else None


def _joined(parameter: Parameter, halves: tuple[str, str], file: GGUFFile) -> LazyTensor:
    """The two matrices as one: of each head the rows of its key, which such files have as
    columns, then of its value."""

    def read() -> NDArray[np.float32]:
        keys, values = (file.tensors[name].lazy().float32() for name in halves)
        both = np.concatenate([keys.swapaxes(1, 2), values], axis=1)
        return np.ascontiguousarray(both.reshape(parameter.shape))

    return LazyTensor(parameter.shape, "F32", read)


def _from_file(parameter: Parameter, file: GGUFFile, start: int) -> LazyTensor:
    """`start`: its first row in a tensor that holds several, one after the other."""
    if halves := _halves_of_latents(parameter, file):
        return _joined(parameter, halves, file)
    stored = file.tensors[_name_in_file(parameter, file)]
    if parameter.expert is not None and len(stored.shape) > len(parameter.shape):  # all experts
        rows = stored.shape[0] * stored.shape[1]
        stored = replace(stored, shape=(rows, *stored.shape[2:]))
    whole = parameter.part is None and parameter.expert is None
    if whole and not parameter.transposed and _same_numbers(stored.shape, parameter.shape):
        stored = replace(stored, shape=parameter.shape)
    tensor = stored.lazy() if whole else stored.lazy(start, start + parameter.shape[0])
    if parameter.transposed:
        return transposed(tensor)
    return tensor


def _halves(array: NDArray[Any], heads: int) -> NDArray[Any]:
    """Rows of q or k in which the two of each rotation are adjacent."""
    pairs = array.reshape(heads, -1, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)


def tensors_of_scaling(config: Decoder) -> set[str]:
    """The tensors of a file with rotary factors, not weights; `config` has them already."""
    scaling = None if config.rotary is None else config.rotary.scaling
    is_longrope = scaling is not None and scaling.type == "longrope"
    return {FREQUENCIES, SHORT, LONG} if is_longrope else {FREQUENCIES}


def shortest(value: float) -> float:
    """The shortest decimal that rounds to this float32: 1e-5, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def scaling_of_metadata(value: Any) -> dict[str, Any] | None:
    """A `rope_scaling` object; what is not given is as in llama.cpp: linear, by a factor of 1."""
    kind = value("rope.scaling.type", "linear")
    factor = value("rope.scaling.factor", value("rope.scale_linear"))  # the second in older files
    factor = factor or 1.0  # 0 means none, too
    scaling = {
        "rope_type": kind,
        "factor": factor,
        "original_max_position_embeddings": value("rope.scaling.original_context_length"),
        "beta_fast": value("rope.scaling.yarn_beta_fast"),
        "beta_slow": value("rope.scaling.yarn_beta_slow"),
    }
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    return {key: given for key, given in scaling.items() if given is not None}


def longrope(file: GGUFFile, value: Callable[..., Any]) -> dict[str, Any] | None:
    """A `rope_scaling` object of LongRoPE; None if the file has no tensors with its factors."""
    if SHORT not in file.tensors or LONG not in file.tensors:
        return None
    context = value("context_length")
    original = value("rope.scaling.original_context_length") or context
    factor = value("rope.scaling.attn_factor")
    usual = longrope_attention_factor(context / original, original)
    stored = {"short_factor": file.tensors[SHORT], "long_factor": file.tensors[LONG]}
    lists = {name: one.lazy().float32().reshape(-1) for name, one in stored.items()}
    return {
        "rope_type": "longrope",
        "original_max_position_embeddings": original,
        # The converter writes the default too, as a float32.
        "attention_factor": factor if factor and abs(factor / usual - 1) > 1e-6 else None,
        **{name: list(map(shortest, one)) for name, one in lists.items()},
    }


def scaling_of_frequencies(file: GGUFFile, config: Decoder, rotary: Rotary) -> RopeScaling | None:
    """The llama3 scaling whose factors the file lists a frequency each, None where there are none.

    Only the scaling of Llama 3.1 to 3.3 (low 1, high 4, trained on 8192 positions, any factor),
    and of Llama 4 (high 1), can be told from its factors.
    """
    stored = file.tensors.get(FREQUENCIES)
    if stored is None:
        return None
    factors = stored.lazy().float32().reshape(-1).astype(np.float64)
    if factors.size and np.all(factors == 1.0):
        return None
    if factors.size == config.head_dim // 2 and rotary.scaling is None:
        for high in (4.0, 1.0):
            scaling = RopeScaling("llama3", float(factors.max()), 8192, high_freq_factor=high)
            found = llama3_factors(rotary.theta, config.head_dim, scaling)
            if np.allclose(found, factors, rtol=1e-5, atol=0.0):
                return scaling
    raise ArtifactError(
        f"{file.path}: {FREQUENCIES} [{factors.size}] does not hold the factors of Llama 3's "
        "rotary scaling, and other frequency factors are not supported",
        INSTEAD,
    )


def _rotated_dims(file: GGUFFile, config: Decoder, rotary: Rotary) -> int:
    """Number of rotated dimensions of a head: those whose factors are 1, before others that
    stop them. Raises ArtifactError."""
    stored, size = file.tensors.get(FREQUENCIES), config.rotated_head(rotary)
    if stored is None:
        return size
    factors = stored.lazy().float32().reshape(-1)
    count = int((factors == 1).sum())
    if not count or not np.array_equal(factors, frequency_stops(size, 2 * count)):
        raise ArtifactError(
            f"{file.path}: {FREQUENCIES} [{factors.size}], expected {size // 2} factors: 1, then"
            f" {_STOP}",
            INSTEAD,
        )
    return 2 * count


_STOP = np.float32(1e30)  # divisor of a frequency that rotates nothing


def frequency_stops(size: int, dims: int) -> NDArray[np.float32]:
    """Divisors of the frequencies of a head of `size` numbers, of which `dims` are rotated."""
    factors = np.full(size // 2, _STOP)
    factors[: dims // 2] = 1
    return factors


def llama3_factors(theta: float, head_dim: int, scaling: RopeScaling) -> NDArray[np.float64]:
    """Divisors of the rotary frequencies, float64 [head_dim / 2]."""
    exponents = np.arange(0, head_dim, 2) / head_dim
    wavelengths = 2 * math.pi * theta**exponents
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_seq_length / wavelengths
    if low == high:  # there are none in between
        return np.where(turns < low, scaling.factor, 1.0)
    smooth = (turns - low) / (high - low)
    # Frequencies between the two bounds move smoothly from unchanged to divided by the factor.
    smooth = np.clip(smooth, 0.0, 1.0)
    factors: NDArray[np.float64] = 1 / ((1 - smooth) / scaling.factor + smooth)
    return factors
