"""The JSON schema of run configs, for editors: https://json-schema.org/draft/2020-12."""

from __future__ import annotations

import itertools
import json
import types
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml

from lite_runner.config import hints_of, members_of
from lite_runner.config.compose import Schemas
from lite_runner.config.groups import options_of
from lite_runner.config.help import Key, key_tables
from lite_runner.config.mindformers import IGNORED
from lite_runner.records import Range, Variants

_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_PLAIN = {bool: "boolean", int: "integer", float: "number", str: "string", types.NoneType: "null"}
_OF_MINDFORMERS = "A key of MindFormers' yaml: accepted and ignored."


def schema_text(schemas: Schemas) -> str:
    """The schema as run_lite.py schema prints it."""
    return json.dumps(json_schema(schemas), indent=1)


def json_schema(schemas: Schemas) -> dict[str, Any]:
    """The schema of a yaml for --config: the keys of all run modes with their types, meanings and
    defaults; what may go together is checked by a run alone."""
    maker, modes = _Maker(), options_of("run_mode")
    kinds: dict[str, list[dict[str, Any]]] = {}  # several for keys that differ between run modes
    listed: dict[str, Key] = {}
    for mode in modes:
        config: Any = schemas.config_of(mode)
        for name, annotation in hints_of(config).items():
            kinds.setdefault(name, []).append(maker.schema(annotation))
        for key in itertools.chain.from_iterable(key_tables(mode, schemas).values()):
            listed.setdefault(key.name, key)
    kinds["run_mode"] = [{"enum": modes}]
    for mode in modes:
        maker.describe(schemas.config_of(mode), "", listed)
    properties = {name: _described(listed.get(name), _any_of(kinds[name])) for name in kinds}
    ours = {
        "defaults": {"type": "array", "description": "Config groups that the file builds on."},
        "hydra": {"type": "object", "description": "searchpath; of --multirun: launcher, sweeper"},
    }
    theirs = {name.partition(".")[0]: {"description": _OF_MINDFORMERS} for name in IGNORED}
    return {
        "$schema": _DRAFT,
        "title": "lite-runner",
        "type": "object",
        "properties": dict(sorted((theirs | ours | properties).items())),
        "additionalProperties": False,
        "$defs": maker.sections,
    }


class _Maker:
    """Makes the schemas of annotations; each section has one, by the name of its class."""

    def __init__(self) -> None:
        self.sections: dict[str, dict[str, Any]] = {}

    def schema(self, annotation: Any) -> dict[str, Any]:
        """The schema of a type, as `lite_runner.config.read` takes it."""
        origin, inner = get_origin(annotation), get_args(annotation)
        if origin is Annotated and isinstance(inner[1], Variants):
            return _any_of(map(self._section, inner[1]))
        if origin is Annotated:
            return self.schema(inner[0]) | _limits(inner[1])
        if origin in (Union, types.UnionType):
            return _any_of(self.schema(member) for member in inner)
        if origin is Literal:
            return {"enum": list(inner)}
        if origin is tuple:
            return {"type": "array", "items": self.schema(inner[0])}
        if origin is Mapping:
            entries = {} if inner[1] in (Any, object) else self.schema(inner[1])
            return {"type": "object", "additionalProperties": entries or True}
        if annotation in _PLAIN:
            return {"type": _PLAIN[annotation]}
        if annotation is object:
            return {}
        return self._section(annotation)

    def _section(self, cls: type) -> dict[str, Any]:
        name = cls.__name__
        if name not in self.sections:
            self.sections[name] = {}  # a section may contain itself
            hints = hints_of(cls)
            self.sections[name] = {
                "type": "object",
                "properties": {key: self.schema(kind) for key, kind in hints.items()},
                "additionalProperties": False,
            }
        return {"$ref": f"#/$defs/{name}"}

    def describe(self, cls: Any, prefix: str, listed: Mapping[str, Key]) -> None:
        """Add the meanings in conf/ to the keys in a class's sections."""
        properties = self.sections.get(cls.__name__, {}).get("properties", {})
        for name, annotation in hints_of(cls).items():
            for section in _sections(annotation):
                self.describe(section, f"{prefix}{name}.", listed)
            if name in properties:
                properties[name] = _described(listed.get(prefix + name), properties[name])


def _described(key: Key | None, schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a key with its meaning and default, if conf/ lists it with a meaning."""
    if key is None or not key.meaning:  # a model's size has no common default
        return schema
    return {"description": key.meaning, **schema, "default": yaml.safe_load(key.default)}


def _sections(annotation: Any) -> list[Any]:
    return [one for one in members_of(annotation) if is_dataclass(one)]


def _any_of(schemas: Iterable[dict[str, Any]]) -> dict[str, Any]:
    every = list({str(one): one for one in schemas}.values())
    return every[0] if len(every) == 1 else {"anyOf": every}


def _limits(limits: Any) -> dict[str, Any]:
    if not isinstance(limits, Range):
        return {}  # a path
    low = {"exclusiveMinimum" if limits.above else "minimum": limits.low}
    return low if limits.high is None else low | {"maximum": limits.high}
