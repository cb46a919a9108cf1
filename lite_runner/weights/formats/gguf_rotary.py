"""Scaling of rotary positions in a GGUF file: metadata, and tensors with a factor per frequency."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lite_runner.architectures.positions import longrope_attention_factor
from lite_runner.architectures.spec import Decoder, RopeScaling, Rotary
from lite_runner.errors import ArtifactError
from lite_runner.weights.formats.gguf_file import GGUFFile

FREQUENCIES = "rope_freqs.weight"
SHORT, LONG = "rope_factors_short.weight", "rope_factors_long.weight"  # of LongRoPE


def tensors_of_scaling(config: Decoder) -> set[str]:
    """The tensors of a file that hold no weights but factors, which are in `config` by now."""
    scaling = None if config.rotary is None else config.rotary.scaling
    is_longrope = scaling is not None and scaling.type == "longrope"
    return {FREQUENCIES, SHORT, LONG} if is_longrope else {FREQUENCIES}


def shortest(value: float) -> float:
    """The decimal number that was meant by a float32: 1e-5, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def scaling_of_metadata(value: Any) -> dict[str, Any] | None:
    """A `rope_scaling` object; what is not given is as in llama.cpp: linear, by a factor of 1."""
    kind = value("rope.scaling.type", "linear")
    factor = value("rope.scaling.factor", value("rope.scale_linear"))  # the second in older files
    factor = factor or 1.0  # 0 stands for none, too
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
        # The converter writes the usual one too, as a float32.
        "attention_factor": factor if factor and abs(factor / usual - 1) > 1e-6 else None,
        **{name: list(map(shortest, one)) for name, one in lists.items()},
    }


def scaling_of_frequencies(file: GGUFFile, config: Decoder, rotary: Rotary) -> RopeScaling | None:
    """The llama3 scaling whose factors the file lists a frequency each, None where there are none.

    Only the scaling of Llama 3.1 to 3.3 (low 1, high 4, trained on 8192 positions, any factor)
    can be told from its factors.
    """
    stored = file.tensors.get(FREQUENCIES)
    if stored is None:
        return None
    factors = stored.lazy().float32().reshape(-1).astype(np.float64)
    if factors.size and np.all(factors == 1.0):
        return None
    if factors.size == config.head_dim // 2 and rotary.scaling is None:
        scaling = RopeScaling("llama3", float(factors.max()), 8192)
        if np.allclose(
            llama3_factors(rotary.theta, config.head_dim, scaling), factors, rtol=1e-5, atol=0.0
        ):
            return scaling
    raise ArtifactError(
        f"{file.path}: {FREQUENCIES} [{factors.size}] does not hold the factors of Llama 3's "
        "rotary scaling, and other frequency factors are not supported",
        "take the model's Hugging Face checkpoint instead",
    )


def llama3_factors(theta: float, head_dim: int, scaling: RopeScaling) -> NDArray[np.float64]:
    """What each rotary frequency is divided by, float64 [head_dim / 2]."""
    exponents = np.arange(0, head_dim, 2) / head_dim
    wavelengths = 2 * math.pi * theta**exponents
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = (scaling.original_seq_length / wavelengths - low) / (high - low)
    # Frequencies between the two bounds move smoothly from unchanged to divided by the factor.
    smooth = np.clip(smooth, 0.0, 1.0)
    factors: NDArray[np.float64] = 1 / ((1 - smooth) / scaling.factor + smooth)
    return factors
