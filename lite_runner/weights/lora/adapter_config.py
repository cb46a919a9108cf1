"""adapter_config.json of an adapter, as PEFT or MindFormers writes it.

Target modules, and the rank and scale of each, are resolved as in PEFT; MindFormers' four keys are
a subset of PEFT's. Anything other than W x + scale B A x is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from lite_runner.config.fields import did_you_mean, nearest
from lite_runner.errors import ArtifactError
from lite_runner.records import dataclass
from lite_runner.system.json_file import read_json_object

Number = TypeVar("Number", int, float)
NAMES = ("adapter_config.json", "config.json")
MAX_PATTERN = 2000  # characters of a regular expression
MAX_REPEATS = 6  # unbounded ones on one way through it, which bounds what a hostile one can cost
# Ways to go on that are tried where a pattern repeats, by the order of magnitude of a module's
# name, and where something may be left out.
_WAYS_OF_A_REPEAT, _WAYS_OF_A_CHOICE = 32, 4
_ESCAPED = re.compile(r"\\.")
_PART = re.compile(r"\[\^?\]?[^\]]*\]|\(\?|[*+]\??|\{\d*,\d*\}\??|[?()|]")
_REPEATED_GROUP = re.compile(r"\)(?:[*+]|\{[\d,])")

# Of no effect on a trained adapter.
_NO_EFFECT = {
    *("auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "fan_in_fan_out"),
    *("inference_mode", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_core"),
    *("peft_version", "qalora_group_size", "revision", "runtime_config", "task_type"),
}
_READ = {
    *("peft_type", "pet_type", "bias", "init_lora_weights", "r", "lora_alpha", "target_modules"),
    *("exclude_modules", "layers_to_transform", "layers_pattern", "rank_pattern"),
    *("alpha_pattern", "use_rslora"),
}
# Initializations that leave the base weights alone; the others subtract from them.
_INITIALIZATIONS = (True, False, None, "gaussian", "orthogonal", "eva")
_ABSENT: tuple[Any, ...] = (None, False, 0, "", [], {})
_WHAT = {
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
                f"{self.where}: target_modules names {', '.join(map(_short, unknown[:5]))}, which "
                f"the model has not{did_you_mean(nearest(unknown[0], known))}",
                f"an adapter of another base? The model has: {', '.join(known)}",
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
    given = targets if isinstance(targets, str) else list(targets)
    return LoraSettings(
        where=where,
        r=r,
        lora_alpha=_alpha(where, "lora_alpha", alpha),
        target_modules=_modules(where, "target_modules", given, needed=True),
        exclude_modules=(),
        layers=(),
        layers_pattern=(),
        rank_pattern={},
        alpha_pattern={},
        use_rslora=False,
    )


def read_settings(folder: Path) -> LoraSettings:
    """The config of the adapter in `folder`. Raises ArtifactError: missing, broken, not LoRA."""
    where = next((folder / name for name in NAMES if (folder / name).is_file()), None)
    if where is None:
        raise ArtifactError(
            f"{folder}: no {NAMES[0]}, expected one beside the adapter's weights",
            "give the folder that peft's save_pretrained wrote, or one laid out like it",
        )
    raw = read_json_object(where)
    _check_kind(where, raw)
    layers = raw.get("layers_to_transform")
    layers = [layers] if type(layers) is int else layers
    if not _is_list_of(layers or [], int):
        raise _wrong(where, "layers_to_transform", layers, "an integer or a list of them")
    return LoraSettings(
        where=where,
        r=_rank(where, "r", raw.get("r")),
        lora_alpha=_alpha(where, "lora_alpha", raw.get("lora_alpha")),
        target_modules=_modules(where, "target_modules", raw.get("target_modules"), needed=True),
        exclude_modules=_modules(where, "exclude_modules", raw.get("exclude_modules")),
        layers=tuple(layers or ()),
        layers_pattern=_plain_names(where, "layers_pattern", raw.get("layers_pattern")),
        rank_pattern={
            _pattern(where, "rank_pattern", key): _rank(where, f"rank_pattern[{key!r}]", value)
            for key, value in _mapping(where, raw, "rank_pattern").items()
        },
        alpha_pattern={
            _pattern(where, "alpha_pattern", key): _alpha(where, f"alpha_pattern[{key!r}]", value)
            for key, value in _mapping(where, raw, "alpha_pattern").items()
        },
        use_rslora=_flag(where, "use_rslora", raw.get("use_rslora")),
    )


def _check_kind(where: Path, raw: Mapping[str, Any]) -> None:
    """Raise ArtifactError for anything but plain LoRA; unknown keys must be off."""
    for key, kinds in (("peft_type", ("LORA",)), ("pet_type", ("lora", "slora"))):
        kind = raw.get(key)
        if kind is not None and kind not in kinds:
            raise _wrong(where, key, kind, " or ".join(kinds))
    if raw.get("bias", "none") not in ("none", None):
        raise _wrong(where, "bias", raw["bias"], "none: trained biases are not supported")
    initialization = raw.get("init_lora_weights")
    if initialization not in _INITIALIZATIONS or type(initialization) is int:
        raise ArtifactError(
            f"{where}: init_lora_weights is {_short(initialization)}, which changes the base "
            "weights before the adapter is added to them",
            "convert it to plain LoRA with peft's save_pretrained("
            "path_initial_model_for_weight_conversion=...)",
        )
    for key, value in raw.items():
        if key in _READ or key in _NO_EFFECT or value in _ABSENT:
            continue
        raise ArtifactError(
            f"{where}: {key} is {_short(value)}: "
            + _WHAT.get(key, "unknown here, and it may change the result")
            + "; only plain LoRA is supported",
            "train the adapter without it, or merge it into its base with peft",
        )


def _by_pattern(patterns: Mapping[str, Number], module: str, default: Number) -> Number:
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def _matches(wanted: str | Collection[str], module: str) -> bool:
    """A string is a regular expression of the full name, an entry of a list its suffix."""
    if isinstance(wanted, str):
        return re.fullmatch(wanted, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in wanted)


def _last_names(modules: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(name.rpartition(".")[2] for name in modules))


def _modules(where: Path, key: str, value: Any, needed: bool = False) -> str | tuple[str, ...]:
    if isinstance(value, str) and value:
        return value if value == "all-linear" else _pattern(where, key, value)
    if not _is_list_of(value or [], str) or (needed and not value):
        raise _wrong(where, key, value, "a list of modules, or a regular expression")
    return tuple(value or ())


def _plain_names(where: Path, key: str, value: Any) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) and value else value or []
    if not _is_list_of(names, str) or not all(re.fullmatch(r"\w+", name) for name in names):
        raise _wrong(where, key, value, "a name or a list of names")
    return tuple(names)


def _pattern(where: Path, key: str, text: str) -> str:
    """A valid regular expression that cannot backtrack for long on a module's name."""
    bare = _ESCAPED.sub("x", text)
    slow = _REPEATED_GROUP.search(bare) or _ways(bare) > _WAYS_OF_A_REPEAT**MAX_REPEATS
    if len(text) > MAX_PATTERN or slow:
        raise _wrong(
            where, key, text, f"a pattern without repeated groups, {MAX_REPEATS} repeats in a row"
        )
    try:
        re.compile(f"({text})")
    except (re.error, RecursionError, OverflowError) as error:
        raise _wrong(where, key, text, f"a regular expression ({error})") from error
    return text


def _ways(bare: str) -> int:
    """Upper bound of the ways that matching a pattern (without escapes) may try.

    Those of a sequence multiply, those of alternatives add up.
    """
    others, ways = [0], [1]  # of each group that is open: alternatives before, and this one
    for part in _PART.findall(bare):
        if part.startswith("("):
            others.append(0)
            ways.append(1)
        elif part == "|":
            others[-1] += ways[-1]
            ways[-1] = 1
        elif part == ")" and len(ways) > 1:
            inside = others.pop() + ways.pop()
            ways[-1] *= inside
        elif part == "?":
            ways[-1] *= _WAYS_OF_A_CHOICE
        elif part[0] in "*+{":
            ways[-1] *= _WAYS_OF_A_REPEAT
    return others[0] + ways[0]


def _mapping(where: Path, raw: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = raw.get(key) or {}
    if not isinstance(value, dict):
        raise _wrong(where, key, value, "an object of pattern -> number")
    return value


def _rank(where: Path, key: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise _wrong(where, key, value, "an integer of at least 1")
    return value


def _alpha(where: Path, key: str, value: Any) -> float:
    # A huge integer is no float at all.
    if type(value) not in (int, float) or not abs(value) < 1e30 or value == 0:
        raise _wrong(where, key, value, "a number other than 0")
    return float(value)


def _flag(where: Path, key: str, value: Any) -> bool:
    if value not in (None, True, False) or type(value) is int:
        raise _wrong(where, key, value, "true or false")
    return bool(value)


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(item) is kind for item in value)


def _short(value: object) -> str:
    text = repr(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= 60 else text[:57] + "..."


def _wrong(where: Path, key: str, got: object, expected: str) -> ArtifactError:
    return ArtifactError(f"{where}: {key} is {_short(got)}, expected {expected}")
