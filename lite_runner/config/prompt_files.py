"""Parsing prompt files: lines of .txt, records of .jsonl and .json, rows of .csv."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from lite_runner import progress
from lite_runner.config.fields import Fault, accepts, hints_of, read, show
from lite_runner.config.generation import GenerationConfig
from lite_runner.config.grammar import value_of
from lite_runner.config.prompt import Message, Request
from lite_runner.config.suggest import NEAR_NAME, did_you_mean, nearest
from lite_runner.errors import ConfigError
from lite_runner.system.json_file import parse_json

KEYS = tuple(field.name for field in fields(Request))
# Options of the whole run, which are errors in a record.
RUN_LEVEL = {*GenerationConfig.__dataclass_fields__, "adapter_id", "system"} - {*KEYS}
MAX_RECORDS = 1 << 20
_MAX_SHOWN = 10  # errors listed per file

# Validation errors of a request of this run.
Check = Callable[[Request], list[str]]


def read_txt(_path: Path, text: str, _: Check) -> list[str]:
    """The non-blank lines of a .txt file; \\n in a line is a line break."""
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    return [line.replace("\\n", "\n") for line in lines if line.strip()]


def read_jsonl(path: Path, text: str, check: Check) -> list[Request]:
    """A request per non-blank line."""
    records = (
        (f"{path}:{number}", _json(line.rstrip("\r\n"), f"{path}:{number}"))
        for number, line in enumerate(io.StringIO(text, newline="\n"), 1)
        if line.strip()
    )
    return _requests(path, records, check)


def read_json(path: Path, text: str, check: Check) -> list[Request]:
    """The requests of a JSON value: a record, a list of records, or the messages of a chat."""
    value = _json(text, str(path))
    if not isinstance(value, list) or _is_chat(value):
        return _requests(path, [(str(path), value)], check)
    return _requests(path, [(f"{path}[{i}]", entry) for i, entry in enumerate(value)], check)


def read_csv(path: Path, text: str, check: Check) -> list[Request]:
    """A request per row. The first row names the columns: `prompt`, or any name of an only column,
    and other keys of a record."""
    before = csv.field_size_limit(max(len(text), 1))
    try:
        return _requests(path, _csv_records(path, text), check)
    finally:
        csv.field_size_limit(before)


READERS: dict[str, Callable[[Path, str, Check], Sequence[str | Request]]] = {
    ".txt": read_txt,
    ".jsonl": read_jsonl,
    ".json": read_json,
    ".csv": read_csv,
}


def _csv_records(path: Path, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    columns: list[str] = []
    try:
        for row in reader:
            if not any(cell.strip() for cell in row):
                continue
            where = f"{path}:{reader.line_num}"
            if not columns:
                columns = _columns(where, row)
                continue
            if len(row) != len(columns):
                raise ConfigError(
                    f"{where}: got {len(row)} columns, expected {len(columns)}:"
                    f" {', '.join(columns)}",
                    "a value with a comma or a line break in it stands in double quotes",
                )
            # Empty cells are null, but for an empty prompt.
            cells = zip(columns, row, strict=True)
            yield where, {n: _cell(n, c) for n, c in cells if c or n == "prompt"}
    except csv.Error as error:
        raise ConfigError(f"{path}:{reader.line_num}: no CSV: {error}") from None


def _columns(where: str, row: list[str]) -> list[str]:
    names = [name.strip() for name in row]
    listed = ", ".join(map(repr, names))
    if len(set(names)) < len(names):
        raise ConfigError(f"{where}: got the columns {listed}, expected each name once")
    if "prompt" in names:
        return names
    if len(names) > 1:
        raise ConfigError(
            f"{where}: got the columns {listed}, expected one that is called prompt, or only one",
            "name the column of the prompts: prompt",
        )
    if any(mark in names[0] for mark in ";\t|"):
        raise ConfigError(f"{where}: got {names[0]!r}, expected columns with commas between them")
    progress.note(f"{where}: the prompts are in the column {names[0]!r}, as its first line says")
    return ["prompt"]


def _cell(name: str, text: str) -> Any:
    """The value of a cell: text, a number, a boolean, or a list of texts."""
    expected = hints_of(Request).get(name, str)
    if name == "stop":
        return value_of(text, expected)
    if accepts(expected, str):
        return text
    try:
        value = parse_json(text.lower())  # spreadsheets write TRUE
    except ValueError:
        return text
    return value if isinstance(value, int | float) else text


def _json(text: str, where: str) -> Any:
    try:
        return parse_json(text)
    except json.JSONDecodeError as error:
        # A .jsonl record is a single line.
        line = f":{error.lineno}" if "\n" in text else ""
        text = f"{where}{line}: no JSON at column {error.colno}: {error.msg}"
        raise ConfigError(text) from None
    except ValueError as error:
        raise ConfigError(f"{where}: no JSON: {error}") from None


def _is_chat(value: Any) -> bool:
    """Whether a JSON value is a list of messages."""
    return isinstance(value, list) and any(
        isinstance(entry, dict) and "role" in entry for entry in value
    )


def _requests(path: Path, records: Iterable[tuple[str, Any]], check: Check) -> list[Request]:
    """Requests of (location, record) pairs. Unknown keys are the user's own data, listed in a note.
    Raises ConfigError for invalid records, and for more than MAX_RECORDS."""
    faults: list[str] = []
    more = 0  # errors beyond _MAX_SHOWN
    unread: set[str] = set()
    found: list[Request] = []
    for where, record in records:
        mine: list[Fault] = []
        request = _request(record, unread, mine)
        texts = [fault.text for fault in mine] or check(request)
        room = _MAX_SHOWN - len(faults)
        faults += [f"{where}: {text}" for text in texts[:room]]
        more += len(texts[room:])
        found.append(request)
        if len(found) > MAX_RECORDS:
            raise ConfigError(f"{path} has more than {MAX_RECORDS} prompts", "split the file")
    listed = f"the keys of a prompt in a file are {', '.join(KEYS)}"
    if not found:
        raise ConfigError(f"{path} has no prompts", listed)
    if len(faults) == 1:
        raise ConfigError(faults[0], listed)
    if faults:
        rest = [f"and {more} more"] if more else []
        lines = "".join(f"\n  - {text}" for text in [*faults, *rest])
        raise ConfigError(f"{len(faults) + more} faults in {path}:{lines}", listed)
    if unread:
        progress.note(f"{path}: not read: {', '.join(sorted(unread))}")
    return found


def _request(record: Any, unread: set[str], faults: list[Fault]) -> Any:
    if isinstance(record, str):
        return Request(prompt=record)
    if _is_chat(record):
        return Request(messages=read(record, tuple[Message, ...], "messages", faults))
    if not isinstance(record, dict):
        faults.append(Fault((), f"got {show(record)}, expected an object with a prompt"))
        return None
    for name in record.keys() - {*KEYS}:
        near = nearest(name, [key for key in KEYS if key != "id"], cutoff=NEAR_NAME)
        if name in RUN_LEVEL:
            text = f"{name} is said for all prompts of a run, as {name}=, and not for one"
            faults.append(Fault((name,), text))
        elif near:
            faults.append(Fault((name,), f"{name}: no such key{did_you_mean(near)}"))
        else:
            unread.add(name)
    return read({name: record[name] for name in KEYS if name in record}, Request, "", faults)
