"""Settings of a model in a run's config (model.model_config): what architectures have in common.

An architecture adds its own, under the names of MindFormers' config class. The defaults stand in
conf/; here are types, ranges, and what does not go together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Annotated, Any, Literal

from lite_runner.architectures.fields import MAX_LAYERS
from lite_runner.architectures.spec import RopeScaling
from lite_runner.records import (
    Count,
    Fraction,
    Index,
    InputPath,
    Penalty,
    Positive,
    Range,
    TopP,
    dataclass,
)

PREFIX = "model.model_config."
TokenIds = Index | tuple[Index, ...] | None
Error = tuple[tuple[str, ...], str]  # dotted keys, and a sentence about them


@dataclass(frozen=True, kw_only=True)
class PetLoraSettings:
    """One LoRA adapter that is trained into the checkpoint, as in MindFormers' yaml."""

    pet_type: Literal["lora"]
    lora_rank: Count = 8
    lora_alpha: Positive = 16.0
    target_modules: str | tuple[str, ...]  # a regular expression, or names


@dataclass(frozen=True, kw_only=True)
class LearnedKeySettings:
    """Keys and values in front of each sequence's that are trained into the checkpoint: p-tuning
    v2, recognized by its names, or prefix tuning."""

    pet_type: Literal["ptuning2", "prefixtuning"]
    pre_seq_len: Count = 128
    prefix_projection: bool = False  # they are made by a network of two layers
    projection_dim: Count = 128  # its width


PetSettings = PetLoraSettings | LearnedKeySettings


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class Settings:
    """Settings in `model.model_config` of every model."""

    type: str  # MindFormers' config class
    checkpoint_name_or_path: InputPath  # source of the weights, unless load_checkpoint is given
    compute_dtype: Literal["auto", "float32", "float16", "bfloat16"]
    use_past: bool  # keep keys and values between steps
    is_sample_acceleration: bool  # an exported graph chooses the likeliest token itself
    # Each is what the top-level option of its name means while that one is null.
    do_sample: bool
    temperature: Positive
    top_k: Index
    top_p: TopP
    repetition_penalty: Penalty
    max_decode_length: Count | None  # = max_length
    max_new_tokens: Count | None
    pet_config: PetSettings | None = None  # of a MindFormers yaml


@dataclass(frozen=True, kw_only=True)
class AutoSettings(Settings):
    """Settings of model=auto: the sizes are read from the checkpoint."""

    type: Literal["auto"] = "auto"


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class DecoderSettings(Settings):
    """Settings of every model whose sizes are in conf/."""

    seq_length: Count
    hidden_size: Count
    num_layers: Annotated[int, Range(1, MAX_LAYERS)]
    num_heads: Count
    vocab_size: Count
    tie_word_embeddings: bool
    bos_token_id: Index | None
    eos_token_id: TokenIds
    pad_token_id: Index | None

    def errors(self) -> Iterator[Error]:
        """Settings that do not go together."""
        if self.hidden_size % self.num_heads:
            yield error(
                f"hidden_size: got {self.hidden_size}, expected a multiple of"
                f" num_heads={self.num_heads}",
                *("hidden_size", "num_heads"),
            )


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class RotarySettings(DecoderSettings):
    """Settings of models with rotary positions under Llama's names."""

    n_kv_heads: Count | None  # null: as num_heads
    head_dim: Count | None  # null: hidden_size / num_heads
    intermediate_size: Count
    theta: Positive
    rope_scaling: RopeScaling | None
    partial_rotary_factor: Fraction | None = None  # of a head; null: all of it
    qkv_has_bias: bool
    attn_proj_has_bias: bool = False
    mlp_bias: bool = False
    sliding_window: Count | None = None  # latest tokens that one sees, itself among them

    def errors(self) -> Iterator[Error]:
        heads, kv_heads = self.num_heads, self.n_kv_heads or self.num_heads
        if self.head_dim is None:
            yield from super().errors()
        if heads % kv_heads:
            yield error(
                f"num_heads: got {heads}, expected a multiple of n_kv_heads={kv_heads}",
                *("num_heads", "n_kv_heads"),
            )
        head_dim = self.head_dim or self.hidden_size // heads
        if head_dim % 2 or head_dim == 0:
            yield error(
                f"head_dim: got {head_dim}, expected an even number: rotary positions turn pairs",
                "head_dim",
            )
        factor = self.partial_rotary_factor
        if factor is not None and (int(head_dim * factor) < 2 or int(head_dim * factor) % 2):
            yield error(
                f"partial_rotary_factor: got {factor:g}, expected a fraction of the"
                f" {head_dim} of a head that is an even number: rotary positions turn pairs",
                "partial_rotary_factor",
            )
        if self.rope_scaling is not None:
            yield from _rope_errors(self.rope_scaling)


def token_ids(value: int | tuple[int, ...] | None) -> tuple[int, ...]:
    """One id, several or none as a tuple."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else value


def _rope_errors(rope: RopeScaling) -> Iterator[Error]:
    key = "rope_scaling"
    if rope.factor < 1:
        yield error(f"{key}.factor: got {rope.factor:g}, expected >= 1", key)
    if rope.original_seq_length < 1:
        yield error(
            f"{key}.original_seq_length: got {rope.original_seq_length}, expected >= 1", key
        )
    if rope.type == "llama3" and not 0 < rope.low_freq_factor < rope.high_freq_factor:
        yield error(
            f"{key}: got low_freq_factor={rope.low_freq_factor:g} and"
            f" high_freq_factor={rope.high_freq_factor:g}, expected 0 < low < high",
            key,
        )
    if rope.type == "yarn" and not 0 < rope.beta_slow < rope.beta_fast:
        yield error(
            f"{key}: got beta_slow={rope.beta_slow:g} and beta_fast={rope.beta_fast:g},"
            " expected 0 < slow < fast",
            key,
        )


def error(text: str, *names: str) -> Error:
    """A sentence about settings, and their dotted keys."""
    return tuple(f"{PREFIX}{name}" for name in names), f"{PREFIX}{text}"


def network_of(raw: Mapping[str, Any]) -> Any:
    """The network that a yaml of MindFormers names; None: it names none."""
    model = raw.get("model")
    arch = model.get("arch") if isinstance(model, Mapping) else None
    return arch.get("type") if isinstance(arch, Mapping) else None


@dataclass
class Translation:
    """The settings of a MindFormers yaml under our dotted keys."""

    assignments: dict[str, Any] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
