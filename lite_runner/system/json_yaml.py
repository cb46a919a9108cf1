"""JSON and YAML that anybody may have written, read strictly and bounded; errors are one line.

Python's own reader of JSON lets pass what fails far from the file: a number that no float holds,
half of a surrogate pair that no print encodes, the last of two equal keys, nesting that ends the
stack.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import yaml
from yaml.composer import Composer

from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.records import dataclass
from lite_runner.system.files import read_small

MAX_BYTES = 16 << 20
MAX_DEPTH = 64
MAX_DIGITS = 40  # of an integer; transformers writes 31 for a length without a limit
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")


def parse_json(data: bytes | str, *, constants: bool = False) -> Any:
    """The value of a JSON text, bytes being UTF-8. Every key, text and number in it is usable, but
    for Python's own NaN and Infinity, where `constants` lets them pass.

    Raises ValueError, and so JSONDecodeError, for whatever is wrong with it.
    """
    text = data if isinstance(data, str) else data.decode("utf-8-sig")
    try:
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_int=_integer,
            parse_float=_number,
            parse_constant=float if constants else _constant,
        )
    except RecursionError:
        raise ValueError("nested too deeply") from None
    _check_depth(value)
    if _SURROGATE_ESCAPE.search(text):
        shown = json.dumps(value, ensure_ascii=False)
        if half := _SURROGATE.search(shown):
            near = shown[max(half.start() - 20, 0) : half.end()]
            raise ValueError(f"half of a surrogate pair, no character, in {near!a}")
    return value


def read_json(
    path: Path,
    what: str = "valid JSON",
    *,
    most: int = MAX_BYTES,
    hint: str = "",
    constants: bool = False,
) -> Any:
    """The value in a JSON file of at most `most` bytes.

    Raises ArtifactError, "{path}: not {what}: ...", or where it cannot be read.
    """
    try:
        with path.open("rb") as file:
            # read() makes a buffer of as many bytes at once; a pipe has no size.
            size = os.fstat(file.fileno()).st_size or most
            data = file.read(min(most, size) + 1)
        if len(data) > most:
            raise ValueError(f"more than {most:,} bytes")
        return parse_json(data, constants=constants)
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror or error}", hint) from error
    except ValueError as error:  # of a path with a NUL as well
        raise ArtifactError(f"{path}: not {what}: {error}", hint) from error


def read_json_object(
    path: Path,
    what: str = "valid JSON",
    *,
    most: int = MAX_BYTES,
    hint: str = "",
    constants: bool = False,
) -> dict[str, Any]:
    """As `read_json`, of a file that holds an object."""
    value = read_json(path, what, most=most, hint=hint, constants=constants)
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise ArtifactError(f"{path}: not {what}: a JSON {kind}, expected an object", hint)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {key!r} occurs twice")
            seen.add(key)
    return found


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number of {len(text)} digits: {text[:20]}...")
    return int(text)


def _number(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:20]} is beyond all floats")
    return value


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        objects = [one.values() for one in level if isinstance(one, dict)]
        lists = [one for one in level if isinstance(one, list)]
        if not objects and not lists:
            return
        level = [child for children in (*objects, *lists) for child in children]
    raise ValueError("nested too deeply")


MAX_CONFIG_BYTES = 128 << 20  # that of a run holds a prompt from standard input
MAX_YAML_DEPTH = 100

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
        if self._depth > MAX_YAML_DEPTH:
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
        made: dict[Any, Any] = super().construct_mapping(node, deep)
        return made


_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"),
    list("-+0123456789"),
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
    except RecursionError:
        raise ConfigError(f"{where}: nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{where}: broken yaml: {' '.join(str(error).split())}") from None
    if raw is None:
        raise ConfigError(f"{where}: the file is empty; expected a yaml of sections")
    if not isinstance(raw, dict):
        raise ConfigError(f"{where}: got a {type(raw).__name__}, expected sections (a mapping)")
    return raw
