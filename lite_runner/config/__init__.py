"""From the command line to one checked, typed `RunConfig`, without importing MindSpore.

In this module: plain data (of yaml or a command line) read into typed dataclasses; every error is
kept. A dataclass says all there is to say: the types, the choices (`Literal`), the ranges
(`Annotated[int, Range(1)]`), sections (a nested dataclass) and variants (a union of
dataclasses, told apart by their field `type`, or by their names where they have none; or
`Annotated[Section, Variants(...)]`, which are imported by their `type`), mappings
(`Mapping[Name, Entry]`; an `object` is left to another reader) and free ones (`Mapping[str, Any]`:
scalars under any names, nested at will). Unknown names get the nearest known one as a hint.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import re
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from lite_runner.errors import ConfigError
from lite_runner.errors import show as show
from lite_runner.records import PathText, Variants, dataclass
from lite_runner.system.files import user_path

Scalar = str | int | float | bool | None  # values of a free mapping
MAX_DEPTH = 8  # of keys; a yaml file can hold a mapping that contains itself
MISSING = "???"  # OmegaConf's
_NAME = re.compile(r"\w[\w-]*")
_HELP = "run_lite.py --help lists the groups and keys"


class Invalid(NamedTuple):
    """A validation error: a sentence, and the dotted keys that it is about."""

    keys: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class Note:
    """A note for the user about a config; `detail` goes to run.log."""

    text: str
    detail: str = ""


def raise_errors(errors: Iterable[Invalid]) -> None:
    """Raise all `errors` as one ConfigError, if there are any."""
    if texts := list(dict.fromkeys(error.text for error in errors)):
        error = ConfigError.of(texts)
        error.hint = _HELP
        raise error


def invalid(keys: tuple[str, ...] | str, text: str) -> Invalid:
    """An error about one key, or about several."""
    return Invalid((keys,) if isinstance(keys, str) else keys, text)


def read(value: Any, annotation: Any, key: str, errors: list[Invalid]) -> Any:
    """`value` converted to `annotation`; where it does not fit, None, with an entry in `errors`."""
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType) or _variants(annotation):
        return _read_union(value, annotation, key, errors)
    if origin is Annotated:
        base, allowed = get_args(annotation)
        before = len(errors)
        result = read(value, base, key, errors)
        valid = len(errors) == before
        if valid and isinstance(allowed, PathText):
            return _read_path(result, key, errors)
        if valid and result not in allowed:
            return _misfit(value, annotation, key, errors)
        return result
    if origin is Literal:
        # True == 1 in Python, so the types are compared too.
        if any(type(value) is type(choice) and value == choice for choice in get_args(annotation)):
            return value
        return _misfit(value, annotation, key, errors)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            return _misfit(value, annotation, key, errors)
        item = get_args(annotation)[0]
        return tuple(read(v, item, f"{key}[{i}]", errors) for i, v in enumerate(value))
    if _is_section(annotation):
        return _read_section(value, annotation, key, errors)
    if origin is Mapping:
        free = get_args(annotation)[1] is Any
        return (_read_free if free else _read_mapping)(value, annotation, key, errors)
    if annotation is float and type(value) in (int, float):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        return number if math.isfinite(number) else _misfit(value, annotation, key, errors)
    if annotation is object or type(value) is annotation:
        return value
    return _misfit(value, annotation, key, errors)


def _read_path(text: str, key: str, errors: list[Invalid]) -> str | None:
    try:
        user_path(text, key)
    except ConfigError as error:
        errors.append(invalid(key, error.message))
        return None
    return text


def _read_union(value: Any, annotation: Any, key: str, errors: list[Invalid]) -> Any:
    if isinstance(value, Mapping) and (section := variant(annotation, value)) is not None:
        return _read_section(value, section, key, errors)
    members = [member for member in members_of(annotation) if member is not types.NoneType]
    if value is None and accepts(annotation, types.NoneType):
        return None
    sections = [member for member in members if _is_section(member)]
    if sections and isinstance(value, Mapping):
        kinds = tuple(kind for member in sections for kind in variant_names(member))
        return read(value.get("type"), Literal[kinds], f"{key}.type", errors)
    for kinds_of_value, origin in (((list, tuple), tuple), (Mapping, Mapping)):
        if isinstance(value, kinds_of_value):
            for member in members:
                if get_origin(member) is origin:
                    return read(value, member, key, errors)
    for member in members:
        trial: list[Invalid] = []
        result = read(value, member, key, trial)
        if not trial:
            return result
    return _misfit(value, annotation, key, errors)


def _read_section(value: Any, section: Any, key: str, errors: list[Invalid]) -> Any:
    if not isinstance(value, Mapping):
        return _misfit(value, section, key, errors)
    hints = hints_of(section)
    prefix = f"{key}." if key else ""
    for name in value:
        if name not in hints:
            near = nearest_key(str(name), hints)
            text = f"{prefix}{name}: no such key{did_you_mean(near and prefix + near)}"
            errors.append(Invalid((f"{prefix}{name}",), text))
    given: dict[str, Any] = {}
    before = len(errors)
    for field in dataclasses.fields(section):
        if field.name in value:
            where = prefix + field.name
            given[field.name] = read(value[field.name], hints[field.name], where, errors)
        elif field.default is dataclasses.MISSING:
            expected = describe(hints[field.name])
            text = f"{prefix}{field.name}: missing; expected {expected}"
            errors.append(Invalid((prefix + field.name,), text))
    return section(**given) if len(errors) == before else None


def _read_free(value: Any, annotation: Any, key: str, errors: list[Invalid]) -> Any:
    if not isinstance(value, Mapping):
        return _misfit(value, annotation, key, errors)
    if key.count(".") >= MAX_DEPTH:
        errors.append(Invalid((key,), f"{key[:80]}: nested too deeply"))
        return None
    found: dict[str, Any] = {}
    before = len(errors)
    for name, entry in value.items():
        where = f"{key}.{name}"
        if not is_name(name):
            text = f"{key}: got the name {show(name)}, expected letters, digits, _ and -"
            errors.append(Invalid((where,), text))
        elif isinstance(entry, Mapping):
            found[name] = _read_free(entry, annotation, where, errors)
        else:
            found[name] = read(entry, Scalar, where, errors)
    return found if len(errors) == before else None


def _read_mapping(value: Any, annotation: Any, key: str, errors: list[Invalid]) -> Any:
    if not isinstance(value, Mapping):
        return _misfit(value, annotation, key, errors)
    names, entries = get_args(annotation)
    return {
        read(name, names, f"{key}: a name", errors): read(entry, entries, f"{key}.{name}", errors)
        for name, entry in value.items()
    }


def is_name(name: Any) -> bool:
    """True for a valid key of a free mapping; a dot would mean nesting."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def _misfit(value: Any, annotation: Any, key: str, errors: list[Invalid]) -> None:
    choices = get_args(annotation) if get_origin(annotation) is Literal else ()
    near = nearest(str(value), list(map(str, choices)))
    if value == "None" and types.NoneType in get_args(annotation):
        near = "null"
    tail = did_you_mean(near)
    text = f"{key}: got {show(value)}, expected {describe(annotation)}{tail}"
    errors.append(Invalid((key,), text))


def _is_section(annotation: Any) -> bool:
    return hasattr(annotation, "__dataclass_fields__")


def describe(annotation: Any) -> str:
    """The expected values of an annotation, in words."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return describe(inner[0]) + ("" if isinstance(inner[1], PathText) else f" {inner[1]}")
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(describe(member) for member in inner))
    if origin is Literal:
        listed = ", ".join(str(choice) for choice in inner)
        return f"one of {listed}" if len(inner) > 1 else listed
    if origin is tuple:
        return f"a list ({describe(inner[0])} each)"
    if _is_section(annotation) or origin is Mapping:
        return "a section"
    words = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
    return words.get(annotation, "null")


@functools.cache
def hints_of(section: Any) -> dict[str, Any]:
    """The evaluated annotations of a dataclass, in the order of its fields."""
    hints: dict[str, Any] = {}
    for one in reversed(section.__mro__):
        hints |= _own_hints(one)
    return {field.name: hints[field.name] for field in dataclasses.fields(section)}


@functools.cache
def _own_hints(section: type) -> dict[str, Any]:
    """The type hints of a class without its bases: get_type_hints evaluates those of a base
    anew for each class on it."""
    return inspect.get_annotations(section, eval_str=True)


@functools.cache
def variant_names(section: Any) -> tuple[str, ...]:
    """The values of `type` that select a variant."""
    return get_args(hints_of(section).get("type"))


def _variants(annotation: Any) -> Variants | None:
    metadata = get_args(annotation)[1] if get_origin(annotation) is Annotated else None
    return metadata if isinstance(metadata, Variants) else None


def variant(annotation: Any, raw: Any) -> Any:
    """The dataclass of a union that `raw` is meant for, by its `type`; None where none fits."""
    if variants := _variants(annotation):
        kind = raw.get("type") if isinstance(raw, Mapping) else None
        return variants.load(kind) if kind in variants.types else None
    sections = [member for member in members_of(annotation) if _is_section(member)]
    if len(sections) == 1:
        return sections[0]
    if not isinstance(raw, Mapping):
        return None
    untyped = [section for section in sections if not variant_names(section)]
    if untyped:  # selected by their names
        return max(untyped, key=lambda section: len(raw.keys() & hints_of(section).keys()))
    kind = raw.get("type")
    return next((section for section in sections if kind in variant_names(section)), None)


def members_of(annotation: Any) -> tuple[Any, ...]:
    """The types that an annotation accepts."""
    if variants := _variants(annotation):
        return tuple(variants)
    is_union = get_origin(annotation) in (Union, types.UnionType)
    return get_args(annotation) if is_union else (annotation,)


@functools.cache
def _fields(section: Any) -> list[tuple[str, Any, bool, bool]]:
    """Each field as (name, annotation, True if it may be a section, True if it may be none)."""
    found = []
    for name, annotation in hints_of(section).items():
        members = () if _variants(annotation) else members_of(annotation)
        nested = not members or any(map(_is_section, members))
        found.append((name, annotation, nested, not nested or types.NoneType in members))
    return found


# Shape of plain data: its sections by name, each with its class and own sections.
_Shape = tuple[tuple[str, tuple[Any, "_Shape"]], ...]


def leaves(section: Any, raw: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
    """Every dotted key below `section` with its annotation.

    With `raw` only the keys that fit its variants, and nothing below a section that is null.
    """
    return _leaves(section, None if raw is None else _shape(section, raw), "")


def _shape(section: Any, raw: Mapping[str, Any]) -> _Shape:
    found: list[tuple[str, tuple[Any, _Shape]]] = []
    for name, annotation, nested, _ in _fields(section):
        value = raw.get(name) if nested else None
        if isinstance(value, Mapping) and (chosen := variant(annotation, value)) is not None:
            found.append((name, (chosen, _shape(chosen, value))))
    return tuple(found)


@functools.lru_cache(maxsize=256)
def _leaves(section: Any, shape: _Shape | None, prefix: str) -> Mapping[str, Any]:
    """`leaves` below a prefix, of data of this shape; None: of any."""
    found: dict[str, Any] = {}
    chosen = dict(shape or ())
    for name, annotation, nested, plain in _fields(section):
        if plain:
            found[prefix + name] = annotation
        below: list[tuple[Any, _Shape | None]] = []
        if name in chosen:
            below = [chosen[name]]
        elif shape is None and nested:
            below = [(member, None) for member in members_of(annotation) if _is_section(member)]
        for member, inner in below:
            found |= _leaves(member, inner, f"{prefix}{name}.")
    return found


def free_mapping(key: str, known: Mapping[str, Any]) -> str | None:
    """The key of the free mapping around a dotted key; None if there is none."""
    parents = [key[:i] for i, character in enumerate(key) if character == "."]
    roots = (root for root in parents if accepts(known.get(root), Mapping))
    return next(roots, None)


def annotation_of(key: str, known: Mapping[str, Any]) -> Any:
    """The annotation of a dotted key, given the `known` ones; None for an unknown key."""
    return Scalar if free_mapping(key, known) is not None else known.get(key)


def accepts(annotation: Any, kind: Any) -> bool:
    """True if an annotation takes a `kind` (str, tuple, Mapping, NoneType)."""
    plain = (_plain(member) for member in members_of(annotation))
    return any(kind in (member, get_origin(member)) for member in plain)


def section_errors(config: Any) -> Iterator[Invalid]:
    """Validation errors that the sections of a config report (`errors`)."""
    cls: Any = type(config)
    for name, _, nested, _ in _fields(cls):
        section = getattr(config, name)
        if not nested or not _is_section(section):
            continue
        if hasattr(section, "errors"):
            yield from (Invalid(*error) for error in section.errors())
        yield from section_errors(section)


def paths_of(section: Any, prefix: str = "") -> Iterator[tuple[str, PathText, Any]]:
    """The paths, and lists of paths, that a config has: dotted key, kind and value."""
    cls: Any = type(section)
    for name, kind in _path_fields(cls):
        value = getattr(section, name)
        if kind is not None:
            yield f"{prefix}{name}", kind, value
        elif _is_section(value):
            yield from paths_of(value, f"{prefix}{name}.")


@functools.cache
def _path_fields(section: Any) -> list[tuple[str, PathText | None]]:
    """The fields that hold paths, each with its kind, and those that hold sections."""
    found: list[tuple[str, PathText | None]] = []
    for name, annotation, nested, _ in _fields(section):
        kind = None if _variants(annotation) else _path_kind(annotation)
        if kind is not None or nested:
            found.append((name, kind))
    return found


def _path_kind(annotation: Any) -> PathText | None:
    for member in members_of(annotation):
        item = get_args(member)[0] if get_origin(member) is tuple else member
        if get_origin(item) is Annotated and isinstance(kind := get_args(item)[1], PathText):
            return kind
    return None


def _plain(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def put_at(raw: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key in nested data; existing sections stay."""
    *sections, name = key.split(".")
    for section in sections:
        below = raw.get(section)
        raw[section] = dict(below) if isinstance(below, Mapping) else {}
        raw = raw[section]
    raw[name] = value


def without(raw: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Nested data without a dotted key."""
    name, _, below = key.partition(".")
    rest = dict(raw)
    if below and key in rest:  # a name with dots
        rest.pop(key)
    elif below and isinstance(section := rest.get(name), Mapping):
        rest[name] = without(section, below)
    elif not below:
        rest.pop(name, None)
    return rest


def at(raw: Any, key: str) -> Any:
    """The value of a dotted key in nested data; None where there is none."""
    for name in key.split("."):
        raw = raw.get(name) if isinstance(raw, Mapping) else None
    return raw


_GIGABYTES = re.compile(r"(?=.*[1-9])(\d{1,9}(?:\.\d{1,9})?)GB")


def size_errors(key: str, text: str | None) -> Iterator[Invalid]:
    """The validation error of a key that holds neither a size nor null."""
    if text is not None and not _GIGABYTES.fullmatch(text):
        yield invalid(key, f"{key}: got {show(text)}, expected gigabytes as 58GB or 3.5GB")


def bytes_of(text: str) -> int:
    """The bytes of a valid size."""
    return round(float(text.removesuffix("GB")) * 10**9)


NEAR_NAME = 0.75  # similarity from which a name may be another one misspelt


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The entry of `known` most like `word`, whatever the case; None where none is near."""
    from difflib import get_close_matches  # for errors

    by_lower = {entry.lower(): entry for entry in known}
    found = get_close_matches(word.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[found[0]] if found else None


def nearest_key(key: str, known: Iterable[str]) -> str | None:
    """Like `nearest`, for dotted keys: a right name in a wrong section is found too.

    Names are compared first: a long section that two keys share does not make them alike.
    """
    sections: dict[str, list[str]] = {}
    for entry in known:
        if entry != key:
            sections.setdefault(entry.rpartition(".")[2], []).append(entry)
    name = key.rpartition(".")[2]
    near = name if name in sections else nearest(name, sections, cutoff=NEAR_NAME)
    return nearest(key, sections[near], cutoff=0.0) if near else None


def nearest_flag(word: str, names: Iterable[str]) -> str | None:
    """The one of `names` most like a flag as typed, written as a flag; None where none is near."""
    near = nearest(word.lstrip("-").replace("-", "_"), names, cutoff=NEAR_NAME)
    return near and f"--{near}"


def did_you_mean(found: str | None) -> str:
    """The end of an error's sentence; empty without a suggestion."""
    return f"; did you mean {found}?" if found else ""
