"""A run as plain data: groups, file and settings merged, each key validated."""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import field
from functools import cached_property
from pathlib import Path
from typing import Any

from lite_runner.config.argv import Setting
from lite_runner.config.fields import (
    Fault,
    Note,
    accepts,
    annotation_of,
    describe,
    free_mapping,
    is_name,
    leaves,
    read,
    show,
)
from lite_runner.config.grammar import value_of
from lite_runner.config.groups import GROUPS, keys_by_run_mode
from lite_runner.config.mindformers_keys import IGNORED
from lite_runner.config.schema import RunConfig
from lite_runner.config.suggest import did_you_mean, nearest_key
from lite_runner.errors import ConfigError
from lite_runner.records import dataclass


@dataclass(frozen=True)
class Schemas:
    """The configs of the run modes, injected: config/ knows no run mode."""

    config_of: Callable[[str], type[RunConfig]]  # by the name of a run mode
    faults: Callable[[RunConfig], Iterator[Fault]]  # all validation errors of a config

    @cached_property
    def keys(self) -> dict[str, frozenset[str]]:
        """The dotted keys of each run mode, without the common ones."""
        return keys_by_run_mode()

    @cached_property
    def every_key(self) -> frozenset[str]:
        """The dotted keys of all run modes, without the common ones."""
        return frozenset().union(*self.keys.values())

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


def heads(schemas: Schemas) -> list[str]:
    """The first parts of all accepted keys: groups, our keys, MindFormers' keys."""
    known = (*GROUPS, *leaves(RunConfig), *schemas.every_key, *IGNORED)
    return sorted({key.partition(".")[0] for key in known})


@dataclass
class Composed:
    """The plain data of a run, and the validation errors so far."""

    raw: dict[str, Any]
    schemas: Schemas
    schema: type[RunConfig]  # of the run mode
    choices: dict[str, str] = field(default_factory=dict)  # group options chosen by the user
    folders: tuple[Path, ...] = ()  # of groups, besides conf/
    faults: list[Fault] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

    def fail(self, key: str, text: str) -> None:
        """Add a validation error of a key."""
        self.faults.append(Fault((key,), text))

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
            self.fail(key, f"~{key}: a key cannot be left out; {self._left_open(key)}")
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
        faults: list[Fault] = []
        parent, _, name = key.rpartition(".")
        root = free_mapping(key, known)
        section = self.section(parent) if root is None else self._section_of(root, key)
        if section is None:
            return
        read(value, annotation, key, faults)
        if faults:
            self.faults += [dataclasses.replace(f, text=f.text + where) for f in faults]
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
        parents = [key[:i] for i, letter in enumerate(key) if letter == "."]
        if found := next((one for one in (key, *parents) if one in others), None):
            return self.no_effect(key, found)
        if key in own:
            parent = key.rpartition(".")[0]
            kind = self.section(parent).get("type", "null")
            return f"{setting}: {parent} is {kind} here and has no such key"
        if any(entry.startswith(f"{key}.") for entry in (*own, *others)):
            return f"{setting}: a section; its keys are set one by one, as {key}.NAME=VALUE"
        if key == "hydra" or key.startswith(("hydra.", "hydra/")):
            return f"{setting}: of Hydra's own settings only hydra.searchpath=[DIR] is used here"
        near = nearest_key(key, [*known, *others, *GROUPS])
        flag = "--" if setting.flag else ""
        return f"{setting}: no such key{did_you_mean(near and flag + near)}"

    def _left_open(self, key: str) -> str:
        """What to type in place of ~key."""
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
