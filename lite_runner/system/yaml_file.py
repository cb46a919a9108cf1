"""Yaml files, read strictly and bounded."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import Composer

from lite_runner.errors import ConfigError
from lite_runner.records import dataclass
from lite_runner.system.files import read_small

MAX_CONFIG_BYTES = 128 << 20  # that of a run holds a prompt from standard input
MAX_DEPTH = 100
ROOM = 1 << 16  # for aliases, in characters beyond those of the file

try:
    from yaml import CSafeLoader
except ImportError:  # PyYAML was built without libyaml; its wheels have it
    from yaml import SafeLoader
else:

    class SafeLoader(Composer, CSafeLoader):  # type: ignore[no-redef]
        """libyaml's parser, in a seventh of the time, with the composer of Python, which may be
        told how deep to go: on a file of brackets libyaml's own exhausts the stack."""

        def __init__(self, stream: bytes) -> None:
            CSafeLoader.__init__(self, stream)
            Composer.__init__(self)


class _StrictLoader(SafeLoader):
    """Safe yaml in which 1e-6 is a number and a key that is given twice is an error."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise RecursionError
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, (str, int)) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice", key_node.start_mark
                )
            if isinstance(key, (str, int)):
                seen.add(key)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


@dataclass(frozen=True)
class Tagged:
    """A value with a tag of somebody's own, such as `!function utils.f`: what it is."""

    text: str

    def __str__(self) -> str:
        return self.text


class _TaggedLoader(_StrictLoader):
    """The same, in which unknown tags are Tagged values."""


_TaggedLoader.add_multi_constructor(
    "!", lambda _, suffix, node: Tagged(f"!{suffix} {node.value if node.id == 'scalar' else ''}")
)


class _Dumper(yaml.SafeDumper):
    """Safe yaml that is read back as it was: a U+0085 that is not escaped is read as \\n."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style='"' if "\x85" in text else None
    ),
)


def dump_yaml(raw: Mapping[str, Any]) -> str:
    """Plain containers and scalars as yaml, in their order."""
    text: str = yaml.dump(dict(raw), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text


def read_yaml(path: Path, where: str = "") -> dict[str, Any]:
    """The mapping in a yaml file, a config's, or with `where` that of a task: a message begins with
    it, and tags are kept. Raises ConfigError: missing, too large, broken, empty."""
    of_task, where = bool(where), where or f"--config {path}"
    try:
        data = read_small(path, "a config", MAX_CONFIG_BYTES)
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror}") from None
    except ValueError as error:  # a NUL in the path
        raise ConfigError(f"{where}: {error}") from None
    try:
        raw = yaml.load(data, _TaggedLoader) if of_task else yaml.load(data, _StrictLoader)
        size = _expanded(raw, {})
    except RecursionError:
        raise ConfigError(f"{where}: nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{where}: broken yaml: {' '.join(str(error).split())}") from None
    if size > 2 * len(data) + ROOM:
        raise ConfigError(
            f"{where}: its aliases (*NAME) repeat too much of it, or a value holds itself",
            "write out what they stand for",
        )
    if raw is None:
        raise ConfigError(f"{where}: the file is empty; expected a yaml of sections")
    if not isinstance(raw, dict):
        raise ConfigError(f"{where}: got a {type(raw).__name__}, expected sections (a mapping)")
    return raw


def _expanded(value: Any, sizes: dict[int, float]) -> float:
    """Values and characters of `value`, one that is shared counted wherever it stands: a few lines
    of aliases make billions. Infinite where it holds itself."""
    if isinstance(value, str | bytes):
        return 1 + len(value)
    if not isinstance(value, dict | list):
        return 1
    if id(value) not in sizes:
        sizes[id(value)] = math.inf
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        sizes[id(value)] = 1 + sum(_expanded(part, sizes) for part in parts)
    return sizes[id(value)]
