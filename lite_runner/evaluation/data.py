"""Documents of a data set, read from its published files.

A split of a data set is found by the names of files and folders: test.jsonl,
test-00000-of-00001.parquet, ARC-Easy-Test.jsonl, val/law_val.csv, abstract_algebra/dev.parquet.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from lite_runner.errors import ArtifactError, ConfigError, EnvironmentFault
from lite_runner.records import dataclass
from lite_runner.system.files import parse_json

Document: TypeAlias = "dict[str, Any]"

KINDS = (".jsonl", ".jsonl.gz", ".json", ".csv", ".tsv", ".parquet")
MOST_BYTES = 1 << 28  # of a file, unpacked
MOST_FILES = 10_000
DEPTH = 3  # of folders
# Names of a split in published files, its own first.
_WORDS = {
    "test": ("test",),
    "validation": ("validation", "valid", "val", "dev"),
    "train": ("train", "training"),
    "dev": ("dev",),
}
_SHARD = re.compile(r"-\d{5}-of-\d{5}$")


@dataclass(frozen=True)
class DataSet:
    """The files of a data set."""

    root: Path  # a folder, or one file
    files: tuple[Path, ...]
    named: Mapping[str, Path] | None = None  # by split, if the task names them

    @classmethod
    def of(cls, path: Path) -> DataSet:
        """The documents at a path. Raises ConfigError without any."""
        found = tuple(_files(path))
        if not found:
            raise ConfigError(
                f"{path}: no data: expected files {', '.join(KINDS)} in it or in its folders"
            )
        return cls(path, found)

    def split(self, name: str, subset: str = "") -> tuple[Path, ...]:
        """The files of a split, those of a subset where it has several; a single file is every
        split."""
        if self.named is not None:
            return (self.named[name],) if name in self.named else ()
        if self.root.is_file():
            return self.files
        mine = [path for path in self.files if not subset or self._in_subset(path, subset)]
        for word in _WORDS.get(name, (name,)):
            if found := [path for path in mine if word in self._words(path, subset)]:
                return tuple(found)
        return ()

    def subsets(self, known: Sequence[str]) -> list[str]:
        return [name for name in known if any(self._in_subset(path, name) for path in self.files)]

    def _in_subset(self, path: Path, subset: str) -> bool:
        parts = [part.lower() for part in self._parts(path)]
        stem = parts.pop()
        words = (word for every in _WORDS.values() for word in every)
        return subset in (*parts, stem) or stem in {f"{subset}_{word}" for word in words}

    def _words(self, path: Path, subset: str) -> set[str]:
        *folders, stem = (part.lower() for part in self._parts(path))
        return {*folders, *re.split(r"[-_.]", stem.removeprefix(f"{subset}_"))}

    def _parts(self, path: Path) -> Sequence[str]:
        """Folders below the root, and the file's name without suffix and shard number."""
        stem = path.name
        for ending in sorted(KINDS, key=len, reverse=True):
            stem = stem.removesuffix(ending)
        return (*path.relative_to(self.root).parts[:-1], _SHARD.sub("", stem))


def data_set(folder: Path, names: Sequence[str], *, only: bool) -> DataSet:
    """The data set that is this file, or lies in a folder under one of these names, in whatever
    case; or, where it is the `only` one that is asked for, the folder's own files. Raises
    ConfigError."""
    if folder.is_file():
        return DataSet.of(folder)
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise ConfigError(f"eval.data: {folder}: {error.strerror}") from None
    wanted = [_plain(name) for name in names]
    named = [one for one in entries if one.is_dir() or one.name.endswith(KINDS)]
    for match in (str.__eq__, str.startswith):
        for name in wanted:
            for entry in named:
                if match(_plain(entry.name.partition(".")[0]), name):
                    return DataSet.of(entry)
    if only and any(True for _ in _files(folder)):
        return DataSet.of(folder)
    listed = ", ".join(entry.name for entry in entries[:20]) or "nothing"
    raise ConfigError(
        f"eval.data: {folder} has no data of {names[0]}: got {listed}",
        f"put the published files into {folder / names[0]}",
    )


def read_documents(paths: Sequence[Path], columns: Sequence[str] = ()) -> list[Document]:
    """The documents of files, in the order of their names. `columns`: those of a CSV file without a
    heading. Raises ArtifactError for a broken one."""
    return [one for path in sorted(paths) for one in _read(path, columns)]


def _read(path: Path, columns: Sequence[str]) -> list[Document]:
    try:
        if path.name.endswith(".parquet"):
            return _read_parquet(path)
        text = _text(path)
        if path.suffix in (".csv", ".tsv"):
            return _rows(text, "\t" if path.suffix == ".tsv" else ",", columns)
        if path.suffix == ".json":
            return _objects(parse_json(text))
        return [_object(one, number) for number, one in enumerate(text.split("\n"), 1) if one]
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, csv.Error, EOFError, zlib.error) as error:
        raise ArtifactError(f"{path}: {error}") from None


def _text(path: Path) -> str:
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"more than {MOST_BYTES:,} bytes")
    return str(data, "utf-8-sig").replace("\r\n", "\n")


def _object(line: str, number: int) -> Document:
    try:
        value = parse_json(line)
    except ValueError as error:
        raise ValueError(f"line {number}: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"line {number}: got {type(value).__name__}, expected an object")
    return value


def _objects(value: Any) -> list[Document]:
    """The list of objects in a JSON file, at the top or under one key."""
    if isinstance(value, dict):
        lists = [each for each in value.values() if isinstance(each, list)]
        value = lists[0] if len(lists) == 1 else value
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise ValueError("expected a list of objects")
    return value


def _rows(text: str, delimiter: str, columns: Sequence[str]) -> list[Document]:
    rows = [row for row in csv.reader(io.StringIO(text), delimiter=delimiter) if row]
    if not rows:
        return []
    heading = rows[0]
    if len(columns) == len(heading) and not set(columns) <= set(heading):
        heading = list(columns)  # a file without one
    else:
        del rows[0]
    for number, row in enumerate(rows, 1):
        if len(row) != len(heading):
            raise ValueError(f"row {number}: got {len(row)} fields, expected {len(heading)}")
    return [dict(zip(heading, row, strict=True)) for row in rows]


def _read_parquet(path: Path) -> list[Document]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:  # also raised by a pyarrow for NumPy 2
        raise EnvironmentFault(
            f"{path}: reading parquet takes pyarrow, which this Python cannot import: {error}",
            "pip install 'pyarrow<22', or take the data set's JSON lines or CSV files",
        ) from None
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"more than {MOST_BYTES:,} bytes")
    try:
        rows: list[Document] = parquet.read_table(path).to_pylist()
    except ArrowException as error:
        raise ValueError(f"not parquet: {' '.join(str(error).split())[:200]}") from None
    try:
        json.dumps(rows[:1])
    except TypeError as error:
        raise ValueError(f"values that are not JSON: {error}") from None
    return rows


def _files(path: Path, depth: int = DEPTH) -> Iterator[Path]:
    """The data files at a path, in order, at most so many folders deep."""
    if path.is_file():
        if path.name.endswith(KINDS):
            yield path
        return
    seen = 0
    for entry in sorted(path.iterdir()) if path.is_dir() else ():
        if entry.name.startswith("."):
            continue
        if entry.is_dir() and not depth:
            continue
        for found in _files(entry, depth - 1):
            seen += 1
            if seen > MOST_FILES:
                raise ConfigError(f"{path}: more than {MOST_FILES:,} files")
            yield found


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")
