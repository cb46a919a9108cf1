"""MindSpore Golden Stick's round-to-nearest quantization, as a model's own `quant` setting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from enum import Enum
from typing import Any

from lite_runner.api.model import PreTrainedModel
from lite_runner.errors import ConfigError
from lite_runner.records import dataclass

# (weights, inputs) -> quant; qint4x2 is MindSpore's type of two integers in a byte
_QUANT = {("int8", ""): "a16w8", ("qint4x2", ""): "a16w4", ("int8", "int8"): "a8w8"}


class BackendTarget(Enum):
    """A network's target; it has no effect: a model has a device of its own."""

    NONE = "none"
    ASCEND = "ascend"


class PTQMode(Enum):
    """Quantization of weights, or loading of quantized ones."""

    QUANTIZE = "quantize"
    DEPLOY = "deploy"


@dataclass
class PTQConfig:
    """MindSpore's types of quantized weights, inputs and cache."""

    mode: PTQMode = PTQMode.QUANTIZE
    backend: BackendTarget = BackendTarget.ASCEND
    opname_blacklist: Sequence[str] = field(default_factory=list)
    weight_quant_dtype: Any = "int8"
    act_quant_dtype: Any = None
    kvcache_quant_dtype: Any = None

    def settings(self) -> dict[str, Any]:
        """The same as settings of a model. Raises ConfigError for unsupported ones."""
        names = [
            _name(one)
            for one in (self.weight_quant_dtype, self.act_quant_dtype, self.kvcache_quant_dtype)
        ]
        quant = _QUANT.get((names[0], names[1]))
        if quant is None or names[2] not in ("", "int8"):
            raise ConfigError(
                f"PTQConfig: got weight_quant_dtype={names[0] or None},"
                f" act_quant_dtype={names[1] or None}, kvcache_quant_dtype={names[2] or None};"
                " expected weights of int8 or qint4x2, int8 inputs with int8 weights alone, and a"
                " cache of int8 or None"
            )
        names_kept = self.opname_blacklist
        kept = [names_kept] if isinstance(names_kept, str) else list(names_kept)
        cache = {"kv_cache": "int8"} if names[2] else {}
        return {"quant": quant, "modules_to_not_convert": kept or None} | cache


class NetworkHelper:
    """A helper that Golden Stick asks about a model; nothing is asked here."""

    def __init__(self, config: Any = None) -> None:
        self.config = config


class MFLlama2Helper(NetworkHelper):
    """MindFormers' helper of a Llama 2."""


class RoundToNearest:
    """Golden Stick's RTN: `apply`, then `convert`, then the model computes with integers."""

    def __init__(self, config: PTQConfig | None = None) -> None:
        self._settings = (config or PTQConfig()).settings()

    def apply(self, network: PreTrainedModel, network_helper: Any = None) -> PreTrainedModel:
        """Checks that it is a model. Raises ConfigError."""
        if not isinstance(network, PreTrainedModel):
            raise ConfigError(
                f"RoundToNearest.apply: got {type(network).__name__}, expected a model",
                "AutoModel.from_config(...) makes one",
            )
        return network

    def convert(self, network: PreTrainedModel) -> PreTrainedModel:
        """Quantize the model's matrices, or those that are loaded into it later."""
        self.apply(network).config.update(self._settings)
        return network


def _name(dtype: Any) -> str:
    """The name of a type of MindSpore; "" for None."""
    return "" if dtype is None else str(dtype).rpartition(".")[2].lower()
