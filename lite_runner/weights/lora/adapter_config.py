"""adapter_config.json of an adapter, as PEFT or MindFormers writes it.

Target modules, and the rank and scale of each, are resolved as in PEFT; MindFormers' four keys are
a subset of PEFT's. Anything other than W x + scale B A x is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from lite_runner.architectures.fields import Fields
from lite_runner.config import did_you_mean, nearest
from lite_runner.errors import ArtifactError
from lite_runner.records import dataclass
from lite_runner.system.files import read_json_object
from lite_runner.system.regex_cost import check_cost

Number = TypeVar("Number", int, float)
NAMES = ("adapter_config.json", "config.json")
MAX_PATTERN = 2000  # characters of a regular expression
MAX_REPEATS = 6  # unbounded repeats on one path through it, which bounds the cost of a hostile one
MAX_WAYS = 1 << 20  # of bounded repeats and alternatives

# Without effect on a trained adapter.
_NO_EFFECT = {
    *("auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "fan_in_fan_out"),
    *("inference_mode", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_core"),
    *("peft_version", "qalora_group_size", "revision", "runtime_config", "task_type"),
}
# Initializations that leave the base weights unchanged; others subtract from them.
_INITIALIZATIONS = (True, False, None, "gaussian", "orthogonal", "eva")
_ABSENT: tuple[Any, ...] = (None, False, 0, "", [], {})
_UNSUPPORTED = {
    "use_dora": "DoRA, which also changes the length of the weights",
    "modules_to_save": "whole modules beside LoRA",
    "lora_bias": "a bias beside B",
}


@dataclass(frozen=True)
class LoraSettings:
    """One validated adapter_config.json."""

    where: Path
    r: int
    lora_alpha: float
    target_modules: str | tuple[str, ...]
    exclude_modules: str | tuple[str, ...]
    layers: tuple[int, ...]  # layers_to_transform; (): all
    layers_pattern: tuple[str, ...]
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    use_rslora: bool

    def rank(self, module: str) -> int:
        """The rank in a module: that of the first pattern that matches the end of its name."""
        return _by_pattern(self.rank_pattern, module, self.r)

    def scale(self, module: str) -> float:
        """The factor of B A: alpha / r, or alpha / sqrt(r) if rank-stabilized."""
        rank = self.rank(module)
        alpha = _by_pattern(self.alpha_pattern, module, self.lora_alpha)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def targets(self, modules: Iterable[str], head: str) -> set[str]:
        """The adapter's target modules among the model's; "all-linear" leaves out `head`.

        Raises ArtifactError if the model lacks one of them, or none matches.
        """
        modules = list(modules)
        wanted = self.target_modules
        if wanted == "all-linear":
            found = [name for name in modules if name != head]
        else:
            found = [name for name in modules if _matches(wanted, name)]
        if not isinstance(wanted, str):
            self._check_known(wanted, modules)
        kept = {
            name
            for name in found
            if not _matches(self.exclude_modules, name) and self._is_in_layers(name)
        }
        if not kept:
            raise ArtifactError(
                f"{self.where}: target_modules {_short(wanted)} matches no module of the model"
                + (" that is not excluded" if found else ""),
                f"the model has: {', '.join(_last_names(modules))}",
            )
        return kept

    def _check_known(self, wanted: Collection[str], modules: list[str]) -> None:
        unknown = [n for n in wanted if not any(_matches((n,), name) for name in modules)]
        if unknown:
            known = _last_names(modules)
            raise ArtifactError(
                f"{self.where}: target_modules names {', '.join(map(_short, unknown[:5]))}, which"
                f" the model does not have{did_you_mean(nearest(unknown[0], known))}",
                f"is it an adapter of another base? The model has: {', '.join(known)}",
            )

    def _is_in_layers(self, module: str) -> bool:
        """PEFT counts the first number behind a name as the layer; no regular expressions here,
        so that layers_pattern is a plain name as in PEFT's documents."""
        if not self.layers or isinstance(self.target_modules, str):
            return True
        parts = module.split(".")
        for before, number in pairwise(parts):
            if number.isdecimal() and (not self.layers_pattern or before in self.layers_pattern):
                return int(number) in self.layers
        return False


def lora_settings(where: Path, r: int, alpha: float, targets: str | Sequence[str]) -> LoraSettings:
    """Settings of an adapter without a config file; `where` is named in messages.

    Raises ArtifactError for an invalid pattern.
    """
    modules = targets if isinstance(targets, str) else list(targets)
    return _settings(where, {"r": r, "lora_alpha": alpha, "target_modules": modules})


def read_settings(folder: Path) -> LoraSettings:
    """The config of the adapter in `folder`. Raises ArtifactError: missing, broken, not LoRA."""
    where = next((folder / name for name in NAMES if (folder / name).is_file()), None)
    if where is None:
        raise ArtifactError(
            f"{folder}: no {NAMES[0]}, expected one beside the adapter's weights",
            "give the folder that peft's save_pretrained wrote, or one laid out like it",
        )
    return _settings(where, read_json_object(where))


def _settings(where: Path, raw: dict[str, Any]) -> LoraSettings:
    fields = Fields(raw, str(where))
    _check_kind(fields)
    layers = fields.raw.get("layers_to_transform")
    layers = [layers] if type(layers) is int else layers or []
    if not _is_list_of(layers, int):
        raise fields.invalid("layers_to_transform", layers, "an integer or a list of them")
    settings = LoraSettings(
        where,
        r=_rank(fields, "r", fields.raw.get("r")),
        lora_alpha=_alpha(fields, "lora_alpha", fields.raw.get("lora_alpha")),
        target_modules=_modules(fields, "target_modules", needed=True),
        exclude_modules=_modules(fields, "exclude_modules"),
        layers=tuple(layers),
        layers_pattern=_plain_names(fields, "layers_pattern"),
        rank_pattern=_by_regex(fields, "rank_pattern", _rank),
        alpha_pattern=_by_regex(fields, "alpha_pattern", _alpha),
        use_rslora=fields.flag("use_rslora", False),
    )
    _check_others(fields)
    return settings


def _check_kind(fields: Fields) -> None:
    """Raise ArtifactError for anything but plain LoRA."""
    fields.choice("peft_type", ("LORA",))
    fields.choice("pet_type", ("lora", "slora"))
    if (bias := fields.raw.get("bias")) not in ("none", None):
        raise fields.invalid("bias", bias, "none: trained biases are not supported")
    initialization = fields.raw.get("init_lora_weights")
    if initialization not in _INITIALIZATIONS or type(initialization) is int:
        raise ArtifactError(
            f"{fields.where}: init_lora_weights is {_short(initialization)}, which changes the "
            "base weights before the adapter is added to them",
            "convert it to plain LoRA with peft's save_pretrained("
            "path_initial_model_for_weight_conversion=...)",
        )


def _check_others(fields: Fields) -> None:
    """Raise ArtifactError for a key that was not read, unless it is off."""
    for key in fields.unread():
        value = fields.raw[key]
        if key in _NO_EFFECT or value in _ABSENT:
            continue
        raise ArtifactError(
            f"{fields.where}: {key} is {_short(value)}: "
            + _UNSUPPORTED.get(key, "unknown here, and it may change the result")
            + "; only plain LoRA is supported",
            "train the adapter without it, or merge it into its base with peft",
        )


def _by_pattern(patterns: Mapping[str, Number], module: str, default: Number) -> Number:
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def _matches(wanted: str | Collection[str], module: str) -> bool:
    """A string is a regular expression for the full name, a list entry a suffix of it."""
    if isinstance(wanted, str):
        return re.fullmatch(wanted, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in wanted)


def _last_names(modules: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(name.rpartition(".")[2] for name in modules))


def _modules(fields: Fields, key: str, needed: bool = False) -> str | tuple[str, ...]:
    value = fields.raw.get(key)
    if isinstance(value, str) and value:
        return value if value == "all-linear" else _regex(fields, key, value)
    if not _is_list_of(value or [], str) or (needed and not value):
        raise fields.invalid(key, value, "a list of modules, or a regular expression")
    return tuple(value or ())


def _plain_names(fields: Fields, key: str) -> tuple[str, ...]:
    value = fields.raw.get(key)
    names = [value] if isinstance(value, str) and value else value or []
    if not _is_list_of(names, str) or not all(re.fullmatch(r"\w+", name) for name in names):
        raise fields.invalid(key, value, "a name or a list of names")
    return tuple(names)


def _by_regex(
    fields: Fields, key: str, number: Callable[[Fields, str, Any], Number]
) -> dict[str, Number]:
    value = fields.raw.get(key) or {}
    if not isinstance(value, dict):
        raise fields.invalid(key, value, "an object of pattern -> number")
    return {
        _regex(fields, key, one): number(fields, f"{key}[{one!r}]", it) for one, it in value.items()
    }


def _regex(fields: Fields, key: str, text: str) -> str:
    """A valid regular expression that cannot backtrack for long on a module's name."""
    try:
        if len(text) <= MAX_PATTERN:
            re.compile(f"({text})")
    except (re.error, RecursionError, OverflowError) as error:
        raise fields.invalid(key, text, f"a regular expression ({error})") from error
    try:
        check_cost(f"(?:{text})$", most_degree=MAX_REPEATS, most_factor=MAX_WAYS)
        if len(text) > MAX_PATTERN:
            raise ValueError("it is too long")
    except ValueError as error:
        expected = f"a pattern without repeated groups, {MAX_REPEATS} repeats in a row ({error})"
        raise fields.invalid(key, text, expected) from error
    return text


def _rank(fields: Fields, key: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise fields.invalid(key, value, "an integer of at least 1")
    return value


def _alpha(fields: Fields, key: str, value: Any) -> float:
    # A huge integer overflows float.
    if type(value) not in (int, float) or not abs(value) < 1e30 or value == 0:
        raise fields.invalid(key, value, "a number other than 0")
    return float(value)


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(item) is kind for item in value)


def _short(value: object) -> str:
    text = repr(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= 60 else text[:57] + "..."
