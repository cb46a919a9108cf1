"""The shape of a model: what every reader, network and check needs to know of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RopeType = Literal["linear", "dynamic", "llama3", "yarn"]


@dataclass(frozen=True)
class RopeScaling:
    """How rotary positions are stretched beyond the trained context.

    Field names and meaning follow transformers' `rope_scaling` / `rope_parameters`.
    """

    type: RopeType
    factor: float
    original_seq_length: int  # positions the model was trained on, before scaling
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None: derived from the factor (and mscale)
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn: round the correction range to whole dimensions


@dataclass(frozen=True)
class ModelConfig:
    """One decoder. Names are those of MindFormers' model_config; every value is resolved."""

    family: str  # bloom, llama, gpt2, or one that lite_runner.register has added
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    n_kv_heads: int  # equals num_heads where keys and values are not grouped
    head_dim: int  # apart from hidden_size / num_heads
    intermediate_size: int  # width of the feed-forward layer
    seq_length: int  # longest context, in tokens
    norm_eps: float  # rms_norm_eps or layernorm_epsilon
    tie_word_embeddings: bool
    theta: float = 10000.0  # llama: base of the rotary frequencies
    rope_scaling: RopeScaling | None = None
    qkv_has_bias: bool = False  # llama family: True in qwen2
    bos_token_id: int | None = None
    eos_token_id: tuple[int, ...] = ()
    pad_token_id: int | None = None


# sha256 of the code of each network that lite_runner.register has added: what is kept between runs
# and made by it is kept by this too.
REGISTERED: dict[str, str] = {}
