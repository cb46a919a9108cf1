"""The yaml files of --config: read, laid over one another, and what they say to Hydra.

`defaults` chooses options of the groups, as in a config of Hydra's own; `hydra.searchpath` names
folders with more of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

from lite_runner.config.fields import MAX_DEPTH, show
from lite_runner.config.groups import GROUPS
from lite_runner.config.yaml_file import at, read_yaml
from lite_runner.records import dataclass

_SELF = "_self_"
# Keys by which a file says of which model it is, and sizes that tell two models apart.
_NAMES = ("model.arch.type", "model.model_config.type", "trainer.model_name")
_SIZES = ("hidden_size", "num_layers", "num_heads", "vocab_size")


@dataclass
class ConfigFile:
    """What --config gives, without its `defaults` and `hydra`; all empty where there is none."""

    source: str = ""  # its files, for messages
    raw: dict[str, Any] = field(default_factory=dict)
    choices: dict[str, str] = field(default_factory=dict)  # group -> option
    searchpath: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def read_config(paths: Sequence[str], held: Mapping[str, Any] | None = None) -> ConfigFile:
    """The files `paths`, each laid over those before it, or what a script holds in their place.

    Raises ConfigError for a file that cannot be read.
    """
    config = ConfigFile(" and ".join(paths) or ("the flags" if held is None else "the config"))
    files = [(path, read_yaml(Path(path))) for path in paths] or [("", dict(held or {}))]
    for path, raw in files:
        _take_defaults(config, path, raw)
        if differs := _another_model(config.raw, raw):
            before = " and ".join(paths[: paths.index(path)])
            config.faults.append(f"--config: {path} is of another model than {before} ({differs})")
        config.raw = laid_over(config.raw, raw)
    return config


def laid_over(
    below: Mapping[str, Any], above: Mapping[str, Any], depth: int = MAX_DEPTH
) -> dict[str, Any]:
    """Nested data with the values of `above` in place of those of `below`."""
    result = dict(below)
    for key, value in above.items():
        under = result.get(key)
        if depth and isinstance(under, Mapping) and isinstance(value, Mapping):
            value = laid_over(under, value, depth - 1)
        result[key] = value
    return result


def names_model(raw: Mapping[str, Any], models: Collection[str]) -> bool:
    """Whether a file says of which model it is; a name of the user's own is only a name."""
    if any(at(raw, key) is not None for key in _NAMES[:2]) or at(raw, "pretrained_model_dir"):
        return True
    return at(raw, _NAMES[2]) in models


def _another_model(below: Mapping[str, Any], above: Mapping[str, Any]) -> str:
    """Why two files are of two models, which would be blended; "" where they are not."""
    if not all(any(at(raw, key) is not None for key in _NAMES) for raw in (below, above)):
        return ""
    for key in (*_NAMES, *(f"model.model_config.{name}" for name in _SIZES)):
        first, second = at(below, key), at(above, key)
        if None not in (first, second) and first != second:
            return f"{key} {show(second)}, not {show(first)}"
    return ""


def _take_defaults(config: ConfigFile, path: str, raw: dict[str, Any]) -> None:
    """Move `defaults` and `hydra.searchpath` from a file's data to `config`."""
    where = f" (in {path})" if path else ""
    entries = raw.pop("defaults", None) or []
    if not isinstance(entries, list):
        config.faults.append(f"defaults: got {show(entries)}{where}, expected a list")
        entries = []
    for i, entry in enumerate(entries):
        if entry == _SELF:
            if i < len(entries) - 1:
                config.faults.append(
                    f"defaults: {_SELF} is not the last entry{where}: what the file itself says"
                    " always goes over the options"
                )
        elif isinstance(entry, dict) and len(entry) == 1:
            [(group, option)] = entry.items()
            group = str(group).removeprefix("override ").lstrip("/")
            if group in GROUPS:
                config.choices[group] = str(option)
            else:
                listed = ", ".join(GROUPS)
                config.faults.append(f"defaults: got {group}{where}, expected one of {listed}")
        else:
            config.faults.append(
                f"defaults: got {show(entry)}{where}, expected GROUP: OPTION or {_SELF};"
                " several files are given as --config A --config B"
            )
    hydra = raw.get("hydra")
    if isinstance(hydra, Mapping) and "searchpath" in hydra:
        raw["hydra"] = {key: value for key, value in hydra.items() if key != "searchpath"}
        folders = hydra["searchpath"] or []
        if isinstance(folders, list) and all(isinstance(entry, str) for entry in folders):
            config.searchpath += folders
        else:
            config.faults.append(f"hydra.searchpath: got {show(folders)}{where}, expected a list")
    for key in raw.pop("hydra", None) or {}:
        config.faults.append(f"hydra.{key}: Hydra's own settings are not used here{where}")
