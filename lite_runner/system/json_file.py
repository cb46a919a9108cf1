"""JSON that anybody may have written: one reader, whose errors are one line.

Python's own reader of JSON lets pass what fails far from the file: a number that no float holds,
half of a surrogate pair that no print encodes, the last of two equal keys, nesting that ends the
stack.
"""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any, NoReturn

from lite_runner.errors import ArtifactError

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
