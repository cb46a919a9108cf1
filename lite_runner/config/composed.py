"""A run as plain data: groups, file and settings merged, each key validated.

The config that a run keeps in its folder, given again as --config, repeats it from any folder.
"""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import field, fields, replace
from functools import cached_property
from pathlib import Path
from types import NoneType
from typing import Any

from lite_runner.config.argv import Setting, equivalent_of
from lite_runner.config.fields import (
    Invalid,
    Note,
    accepts,
    annotation_of,
    at,
    describe,
    did_you_mean,
    free_mapping,
    hints_of,
    is_name,
    leaves,
    nearest_key,
    paths_of,
    put_at,
    read,
    show,
)
from lite_runner.config.grammar import value_of
from lite_runner.config.groups import GROUPS, keys_by_run_mode, options_of
from lite_runner.config.mindformers import IGNORED
from lite_runner.config.prompts import STANDARD_INPUT, is_file, prompt_file, read_prompts
from lite_runner.config.schema import GenerateOptions, RunConfig
from lite_runner.errors import ConfigError
from lite_runner.records import dataclass
from lite_runner.system.secret import KEY


@dataclass(frozen=True)
class Schemas:
    """The configs of the run modes, injected: config/ knows no run mode."""

    config_of: Callable[[str], type[RunConfig]]  # by the name of a run mode
    errors: Callable[[RunConfig], Iterator[Invalid]]  # all validation errors of a config
    notes: Callable[[RunConfig], list[str]]  # for the user, of a valid one

    def is_of_a_run(self, raw: Mapping[str, Any]) -> bool:
        """True if a yaml is the config that a run has left in its folder."""
        return is_of_a_run(raw, self.config_of)

    @cached_property
    def keys(self) -> dict[str, frozenset[str]]:
        """The dotted keys of each run mode, without the common ones."""
        return keys_by_run_mode()

    @cached_property
    def every_key(self) -> frozenset[str]:
        """The dotted keys of all run modes, without the common ones."""
        return frozenset().union(*self.keys.values())

    @cached_property
    def heads(self) -> list[str]:
        """The first parts of all accepted keys: groups, our keys, MindFormers' keys."""
        known = (*GROUPS, *hints_of(RunConfig), *self.every_key, *IGNORED)
        return sorted({key.partition(".")[0] for key in known})

    def run_modes_with(self, key: str) -> list[str]:
        """The run modes that have a dotted key."""
        return [mode for mode, keys in self.keys.items() if key in keys]

    def of(self, mode: Any) -> type[RunConfig]:
        """The config class of a run mode; RunConfig for a value that is not a string, which is
        reported elsewhere. Raises ConfigError for an unknown run mode."""
        if not isinstance(mode, str):
            return RunConfig
        if mode not in self.keys:
            expected = ", ".join(self.keys)
            raise ConfigError(f"conf/: run_mode: got {show(mode)}, expected one of {expected}")
        return self.config_of(mode)


@dataclass
class Composed:
    """The plain data of a run, and the validation errors so far."""

    raw: dict[str, Any]
    schemas: Schemas
    schema: type[RunConfig]  # of the run mode
    choices: dict[str, str] = field(default_factory=dict)  # group options chosen by the user
    own: dict[str, str] = field(default_factory=dict)  # options of the user's own groups
    folders: tuple[Path, ...] = ()  # of groups, besides conf/
    errors: list[Invalid] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

    def fail(self, key: str, text: str) -> None:
        """Add a validation error of a key."""
        self.errors.append(Invalid((key,), text))

    def set(self, setting: Setting) -> None:
        """Apply one `key=value` of the command line."""
        key, prefix = setting.key, setting.prefix
        known = leaves(self.schema, self.raw)
        annotation = annotation_of(key, known)
        if key in GROUPS:
            self.fail(key, f"{setting}: expected {key}=OPTION, without {prefix}")
        elif annotation is None:
            # Null for a key of another run mode has no effect.
            if setting.value not in ("", "null") or key not in self.others:
                self.fail(key, self._unknown(setting, list(known)))
        elif prefix == "~":
            self.fail(key, f"~{key}: a key cannot be left out; {self._unset_hint(key)}")
        elif prefix == "+":
            self.fail(key, f"{setting}: the key exists; leave out the +")
        elif isinstance(setting.value, list):
            self.assign(key, setting.value, "")
        else:
            try:
                value = value_of(setting.value, annotation)
            except ValueError as error:
                got = show(setting.value)
                self.fail(key, f"{key}: got {got}, expected {describe(annotation)} ({error})")
            else:
                self.assign(key, value, "")

    def assign(self, key: str, value: Any, where: str) -> None:
        """Set a known key, or add an error, with `where` appended, if the type is wrong."""
        known = leaves(self.schema, self.raw)
        annotation = annotation_of(key, known)
        errors: list[Invalid] = []
        parent, _, name = key.rpartition(".")
        root = free_mapping(key, known)
        section = self.section(parent) if root is None else self._section_of(root, key)
        if section is None:
            return
        read(value, annotation, key, errors)
        if errors:
            self.errors += [f._replace(text=f.text + where) for f in errors]
        elif key in ("model.arch.type", "model.model_config.type") and section.get(name) != value:
            text = f"{key}: got {show(value)}{where}, but the model chosen has {section.get(name)}"
            self.fail("model", f"{text}; another one is chosen with model=")
        else:
            section[name] = value

    def section(self, key: str) -> dict[str, Any]:
        """The section of a dotted key; empty if there is none."""
        section: Any = self.raw
        for name in key.split(".") if key else ():
            section = section.get(name) if isinstance(section, Mapping) else None
        return section if isinstance(section, dict) else {}

    @property
    def others(self) -> Collection[str]:
        """The dotted keys that only other run modes have."""
        return self.schemas.every_key - leaves(self.schema).keys()

    def no_effect(self, name: str, key: str) -> str:
        """The error of `name`, whose `key` only other run modes have."""
        modes = " or ".join(self.schemas.run_modes_with(key))
        mode = self.raw["run_mode"]
        return f"{name} has no effect with run_mode={mode}, only with run_mode={modes}"

    def _unknown(self, setting: Setting, known: list[str]) -> str:
        """The error of an unknown key, with a suggestion."""
        key = setting.key
        own, others = leaves(self.schema), self.others
        if any(entry.startswith(f"{key}.") for entry in own):
            return f"{setting}: a section; its keys are set one by one, as {key}.NAME=VALUE"
        parents = [key[:i] for i, letter in enumerate(key) if letter == "."]
        below = [one for one in others if one.startswith(f"{key}.")]
        if found := next((one for one in (key, *parents, *below) if one in others), None):
            return self.no_effect(key, found)
        if key in own:
            parent = key.rpartition(".")[0]
            kind = self.section(parent).get("type", "null")
            return f"{setting}: {parent} is {kind} here and has no such key"
        if key == "hydra" or key.startswith(("hydra.", "hydra/")):
            return f"{setting}: without --multirun only hydra.searchpath=[DIR] is used here"
        near = nearest_key(key, [*known, *others, *GROUPS])
        flag = "--" if setting.flag else ""
        elsewhere = "" if near or len(key) == 1 else equivalent_of(key)  # a letter means too much
        hint = f"; here it is {elsewhere}" if elsewhere else did_you_mean(near and flag + near)
        return f"{setting}: no such key{hint}"

    def _unset_hint(self, key: str) -> str:
        """The hint to type in place of ~key."""
        *sections, name = key.split(".")
        value = self.section(".".join(sections)).get(name)
        if accepts(annotation_of(key, leaves(self.schema, self.raw)), types.NoneType):
            return f"{key}=null leaves it open"
        shown = json.dumps(value) if not isinstance(value, str) else value
        return f"without it, it is {key}={shown}"

    def _section_of(self, root: str, key: str) -> dict[str, Any] | None:
        """The mapping of `key` inside the free mapping `root`, created if missing; None, and an
        error, where the key is not possible."""
        *parents, name = key[len(root) + 1 :].split(".")
        if not all(is_name(part) for part in (*parents, name)):
            self.fail(key, f"{key}: expected names of letters, digits, _ and - between the dots")
            return None
        above, _, first = root.rpartition(".")
        section, at_key = self.section(above), above
        for part in (first, *parents):
            at_key = f"{at_key}.{part}"
            if section.get(part) is None:
                section[part] = {}
            section = section[part]
            if not isinstance(section, dict):
                self.fail(key, f"{key}: {at_key} is {show(section)}, not a section")
                return None
        if isinstance(section.get(name), dict):
            self.fail(key, f"{key}: a section; its keys are set one by one, as {key}.NAME=VALUE")
            return None
        return section


def with_input(config: RunConfig) -> RunConfig:
    """The config with the prompt that standard input holds, which can be read once. Raises
    ConfigError as `read_prompts`."""
    if not isinstance(config, GenerateOptions) or config.predict_data != STANDARD_INPUT:
        return config
    return replace(config, predict_data=tuple(read_prompts(config)))


def kept(config: RunConfig) -> dict[str, Any]:
    """Plain data of a config that means the same in every folder."""
    raw = config.to_dict()
    for key, kind, value in paths_of(config):
        if isinstance(value, tuple):
            put_at(raw, key, [_absolute(path, there=not kind.written) for path in value])
        elif value:
            put_at(raw, key, _absolute(value, there=not kind.written))
    if str(at(raw, KEY)).startswith("file:"):
        put_at(raw, KEY, f"file:{_absolute(at(raw, KEY)[5:])}")
    if isinstance(config, GenerateOptions):
        path = prompt_file(config.predict_data)
        if path is not None and is_file(path):
            raw["predict_data"] = str(path.absolute())
    return raw


def is_of_a_run(raw: Mapping[str, Any], config_of: Callable[[str], type[RunConfig]]) -> bool:
    """True if a yaml is what `kept` gives: no other has every key of its run mode."""
    mode = raw.get("run_mode")
    if not isinstance(mode, str) or mode not in options_of("run_mode"):
        return False
    # A run that is older than a key does not have it: one that may be null, a switch, or a section
    # of such.
    known = leaves(config_of(mode))
    later = {key for key, takes in known.items() if accepts(takes, NoneType) or takes is bool}
    heads = {key.partition(".")[0] for key in known.keys() - later}
    return heads - later <= raw.keys()


def run_again(
    raw: Mapping[str, Any],
    groups: Mapping[str, Any],
    said: Collection[str],
    schema: type[RunConfig],
    every: Collection[str],
) -> dict[str, Any]:
    """The config of a former run (`raw`, of `kept`) with what was typed of the groups over it.

    `groups` are those composed, `said` the keys that the typed options say, `every` the keys of all
    run modes. What `schema`, the run mode's config, does not have of them is left out: the former
    run mode had it, and another one is typed.
    """
    heads = {key.partition(".")[0] for key in every}
    gone = heads - {field.name for field in fields(schema)}
    again = {**groups, **{key: value for key, value in raw.items() if key not in gone}}
    for key in leaves(schema):
        section, _, name = key.rpartition(".")
        former = at(again, section) if section and not section.startswith("model") else None
        if isinstance(former, Mapping) and name not in former:  # the run is older than the key
            put_at(again, key, at(groups, key))
    for key in leaves(schema).keys() & said | {"run_mode"}:
        put_at(again, key, at(groups, key))
    return again


def _absolute(value: str, there: bool = False) -> str:
    """A path from the root; what is to be `there` and is not may be no path, but the name of a
    source."""
    if "://" in value:
        return value
    try:
        path = Path(value).expanduser()
        return str(path.absolute()) if not there or path.exists() else value
    except (OSError, RuntimeError, ValueError):  # too long, ~name of nobody, a NUL
        return value
