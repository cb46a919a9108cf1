"""The configs of MindFormers' families: a model of given sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lite_runner.api.config import AutoConfig, PretrainedConfig
from lite_runner.api.model_source import resolve_source
from lite_runner.api.settings import WEIGHTS
from lite_runner.config.groups import options_of


class _SizedConfig(PretrainedConfig):
    """The config of a family's model of given sizes; the other settings are those of `_base`.

    `checkpoint_name_or_path` may be the name of a model, whose weights it then has; without one
    the weights are random, as in MindFormers.
    """

    _base: str

    def __init__(self, **settings: Any) -> None:
        source = settings.setdefault(WEIGHTS, None)
        base = str(source) if source in options_of("model") else self._base
        super().__init__(resolve_source(base))
        self.update(settings)

    @classmethod
    def from_pretrained(cls, name_or_dir: str | Path, **settings: Any) -> PretrainedConfig:
        """As AutoConfig.from_pretrained."""
        return AutoConfig.from_pretrained(name_or_dir, **settings)


class BloomConfig(_SizedConfig):
    """A BLOOM's; what is not given is as in bloom_560m."""

    _base = "bloom_560m"


class ChatGLM2Config(_SizedConfig):
    """A ChatGLM2's or ChatGLM3's; what is not given is as in glm2_6b."""

    _base = "glm2_6b"


class GLMConfig(_SizedConfig):
    """A ChatGLM-6B's; what is not given is as in glm_6b."""

    _base = "glm_6b"


class GPT2Config(_SizedConfig):
    """A GPT-2's; what is not given is as in gpt2."""

    _base = "gpt2"


class LlamaConfig(_SizedConfig):
    """A Llama's; what is not given is as in llama2_7b.

    The width of the feed-forward layer follows from hidden_size, multiple_of and
    ffn_dim_multiplier, unless intermediate_size gives it.
    """

    _base = "llama2_7b"

    def __init__(self, **settings: Any) -> None:
        if "hidden_size" in settings and settings.get("intermediate_size") is None:
            settings.setdefault("multiple_of", 256)
        super().__init__(**settings)


class Qwen2Config(LlamaConfig):
    """A Qwen2's, which MindFormers writes as a Llama with qkv_has_bias; otherwise as qwen2_7b."""

    _base = "qwen2_7b"
