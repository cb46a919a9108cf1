"""The options of `generate`: MindFormers' names, and their meaning here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lite_runner import progress
from lite_runner.api.config import PretrainedConfig
from lite_runner.config import did_you_mean, generation, nearest, show
from lite_runner.config.generation import STRUCTURED_KEYS, decided, sampled, without_effect
from lite_runner.config.schema import GenerateOptions
from lite_runner.errors import ConfigError

# pad_token_id is the model's; all others are keys of the config.
OPTIONS = (
    *(name for name in generation.GenerationConfig.__dataclass_fields__ if name != "pad_token_id"),
    *STRUCTURED_KEYS,
)
# MindFormers' own, which do nothing at these values; no other value is supported.
_OFF: dict[str, tuple[Any, ...]] = {
    "encoder_repetition_penalty": (1.0, 1),
    "renormalize_logits": (False,),
    "parallel_decoding": (False,),
    "logits_processor": ([],),
}
_DEFAULTS = {
    "max_length": 20,
    "do_sample": False,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "repetition_penalty": 1.0,
    "num_beams": 1,
}
_NO_EFFECT = ("use_past", "bos_token_id", "window_size", "level", "guess_set_size")
OUTPUTS = ("return_dict_in_generate", "output_scores", "output_logits")


class GenerationConfig:
    """Options of `generate` in one object, with MindFormers' defaults: max_length 20, greedy,
    top_k 50 where sampling is on. Which tokens end a text or fill it up stays the model's.
    """

    def __init__(self, **options: Any) -> None:
        # The name that MindFormers' model configs have for it.
        if "max_decode_length" in options:
            options.setdefault("max_length", options.pop("max_decode_length"))
        self.__dict__.update(options)

    def __getattr__(self, name: str) -> Any:
        if name not in _DEFAULTS:
            raise AttributeError(f"GenerationConfig has no {name!r}")
        return self.to_dict()[name]

    @classmethod
    def from_model_config(cls, config: PretrainedConfig) -> GenerationConfig:
        """The generation options of a model's config."""
        named = ("do_sample", "temperature", "top_k", "top_p", "repetition_penalty")
        return cls(
            max_length=config.max_decode_length,
            max_new_tokens=config.max_new_tokens,
            **{name: getattr(config, name) for name in named},
        )

    def update(self, **options: Any) -> dict[str, Any]:
        """Set the known options; returns the others."""
        self.__dict__.update({name: options[name] for name in options if is_option(name)})
        return {name: value for name, value in options.items() if not is_option(name)}

    def to_dict(self) -> dict[str, Any]:
        """All options by name; do_sample as those that were given mean it."""
        given = {name: value for name, value in vars(self).items() if value is not None}
        return {**_DEFAULTS, "do_sample": bool(sampled(given)), **given}

    def __repr__(self) -> str:
        return f"GenerationConfig({', '.join(f'{n}={v!r}' for n, v in self.to_dict().items())})"


def merged_options(base: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a GenerationConfig (None, a mapping or any object of the like), and `options`
    over them; do_sample is decided for each of the two alone."""
    given = {name: value for name, value in options.items() if value is not None}
    if idle := without_effect(given):
        progress.note(idle)
    if base is None:
        return decided(given)
    below = base.to_dict() if hasattr(base, "to_dict") else base
    if not isinstance(below, Mapping):
        raise ConfigError(f"generation_config: got {show(base)}, expected a GenerationConfig")
    return {**decided(below), **decided(given)}


def is_option(name: str) -> bool:
    """True for an option that `generate` accepts, even without effect."""
    return name in (*OPTIONS, *_OFF, *_NO_EFFECT, *OUTPUTS, "pad_token_id", "min_length")


def checked_options(
    options: Mapping[str, Any], config: PretrainedConfig, prompts: Sequence[Sequence[int]] = ()
) -> dict[str, Any]:
    """Generation options as top-level keys of a config, for `prompts` in token ids.

    Raises ConfigError for one that is unknown or not available here.
    """
    given = {name: value for name, value in options.items() if value is not None}
    for name, off in _OFF.items():
        if name in given and given.pop(name) not in off:
            raise ConfigError(f"{name} is not available", f"leave {name} out")
    for name in (*_NO_EFFECT, *OUTPUTS, "pad_token_id"):
        given.pop(name, None)  # callers handle the last two
    least = given.pop("min_length", None)
    if settings := [name for name in given if name not in OPTIONS and hasattr(config, name)]:
        chosen = ", ".join(f"{name}={given[name]!r}" for name in settings)
        raise ConfigError(
            f"{', '.join(settings)}: set for the model, not for one call",
            f"AutoModel.from_pretrained(..., {chosen}), or the same in pipeline(model='...', ...)",
        )
    for name in given:
        if name not in OPTIONS:
            near = did_you_mean(nearest(name, OPTIONS))
            raise ConfigError(
                f"{name}: no such option of generate{near}", f"expected one of {', '.join(OPTIONS)}"
            )
    if least:
        given["min_new_tokens"] = max(given.get("min_new_tokens", 0), _new_tokens(least, prompts))
    if "max_length" in given and "max_new_tokens" not in given:
        given["max_new_tokens"] = None  # the config's own must not win over it
    return given


def stop_texts(options: Mapping[str, Any], config: PretrainedConfig) -> tuple[str, ...]:
    """The texts that end a completion: the call's, else the model's."""
    stop = options.get("stop")
    return generation.stop_texts(config.stop if stop is None else stop)


def without_call_options(config: GenerateOptions) -> GenerateOptions:
    """A config without the options of single calls: the one that a backend is loaded for."""
    chosen: dict[str, Any] = dict.fromkeys(("adapter_id", "predict_batch_size", *OPTIONS))
    chosen |= {"predict_data": "", "chat": False, "truncate": "none", "seed": config.seed}
    return replace(config, **chosen)


def _new_tokens(least: Any, prompts: Sequence[Sequence[int]]) -> int:
    """New tokens that bring prompts to min_length."""
    if type(least) is not int or least < 0:
        raise ConfigError(f"min_length: got {show(least)}, expected an integer >= 0")
    lengths = {len(prompt) for prompt in prompts}
    if len(lengths) > 1:
        raise ConfigError(
            f"min_length={least} is a different number of new tokens for each of these prompts,"
            f" which have {min(lengths)} to {max(lengths)} tokens",
            "min_new_tokens=, or one prompt a call",
        )
    return max(0, least - max(lengths, default=0))
