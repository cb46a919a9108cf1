"""`dataclass` for what a start imports, and the paths and ranges of numbers in its fields.

A class takes 30 us to make, where the standard one takes 550.

The standard decorator writes the source of each method and compiles it: for the 190 classes of a
run, a quarter of the time until its model is read. Here the methods are closures over the fields.
An instance takes a microsecond longer; a class with slots, of which there are many instances, has
the standard one. `field`, `fields`, `replace` and `asdict` of dataclasses hold for both; no class
of one kind can build on a frozen class of the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

_Fields = tuple["dataclasses.Field[Any]", ...]


def _dataclass(
    cls: type | None = None,
    /,
    *,
    init: bool = True,
    repr: bool = True,
    eq: bool = True,
    frozen: bool = False,
    kw_only: bool = False,
) -> Any:
    """As dataclasses.dataclass, with these of its flags."""
    if cls is None:
        return partial(_dataclass, init=init, repr=repr, eq=eq, frozen=frozen, kw_only=kw_only)
    cls.__doc__ = cls.__doc__ or cls.__name__  # without one, the standard one spells a signature
    dataclasses.dataclass(init=False, repr=False, eq=False, kw_only=kw_only)(cls)
    fields = dataclasses.fields(cls)
    methods: dict[str, Any] = {}
    if init:
        methods["__init__"] = _init(cls, fields)
    if repr:
        methods["__repr__"] = _repr([one.name for one in fields if one.repr])
    if eq:
        methods["__eq__"] = _eq(_values([one.name for one in fields if one.compare]))
        methods["__hash__"] = _hash(fields) if frozen else None
    if frozen:
        methods |= _refusals(cls, {one.name for one in fields})
    own = vars(cls)
    for name, method in methods.items():
        # A class with an __eq__ of its own has a __hash__ of None, which stands for no method.
        if own.get(name) is None:
            setattr(cls, name, method)
    return cls


if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:
    dataclass = _dataclass


def _init(cls: type, fields: _Fields) -> Callable[..., None]:
    names = [one.name for one in fields if one.init]
    positional = [one.name for one in fields if one.init and not one.kw_only]
    defaults = {
        one.name: one.default
        for one in fields
        if one.init and one.default is not dataclasses.MISSING
    }
    makers = {
        one.name: one.default_factory
        for one in fields
        if one.default_factory is not dataclasses.MISSING
    }
    required = [name for name in names if name not in {**defaults, **makers}]
    known, needed = set(names), set(required)
    finish = getattr(cls, "__post_init__", None)

    def __init__(self: Any, *args: Any, **given: Any) -> None:
        values = {**dict(zip(positional, args, strict=False)), **given}
        if (
            len(values) < len(args) + len(given)  # too many, or one both ways
            or not known >= values.keys() >= needed
        ):
            raise TypeError(
                f"{cls.__name__}() takes {', '.join(names)}, and needs {', '.join(required)};"
                f" got {len(args)} values and {', '.join(given)}"
            )
        created = {name: make() for name, make in makers.items() if name not in values}
        # Not by setattr, which a frozen class refuses.
        vars(self).update({**defaults, **created, **values})
        if finish is not None:
            self.__post_init__()

    return __init__


def _repr(names: list[str]) -> Callable[[Any], str]:
    def __repr__(self: Any) -> str:
        values = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"{type(self).__qualname__}({values})"

    return __repr__


def _values(names: Iterable[str]) -> Callable[[Any], tuple[Any, ...]]:
    listed = tuple(names)
    return lambda one: tuple([getattr(one, name) for name in listed])


def _eq(values: Callable[[Any], tuple[Any, ...]]) -> Callable[[Any, object], bool]:
    def __eq__(self: Any, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return values(self) == values(other)

    return __eq__


def _hash(fields: _Fields) -> Callable[[Any], int]:
    counted = (one.compare if one.hash is None else one.hash for one in fields)
    values = _values(one.name for one, counts in zip(fields, counted, strict=True) if counts)

    def __hash__(self: Any) -> int:
        return hash(values(self))

    return __hash__


def _refusals(cls: type, names: set[str]) -> dict[str, Callable[..., None]]:
    """The methods of a frozen class that refuse its fields; a subclass may have other attributes
    that change."""

    def check(self: Any, name: str, doing: str) -> None:
        if type(self) is cls or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot {doing} field {name!r}")

    def __setattr__(self: Any, name: str, value: Any) -> None:
        check(self, name, "assign to")
        object.__setattr__(self, name, value)

    def __delattr__(self: Any, name: str) -> None:
        check(self, name, "delete")
        object.__delattr__(self, name)

    return {"__setattr__": __setattr__, "__delattr__": __delattr__}


@dataclass(frozen=True)
class Range:
    """The values a number may take; `above` excludes the lower bound itself."""

    low: float
    high: float | None = None
    above: bool = False

    def __contains__(self, value: float) -> bool:
        enough = value > self.low if self.above else value >= self.low
        return enough and (self.high is None or value <= self.high)

    def __str__(self) -> str:
        sign = ">" if self.above else ">="
        upper = "" if self.high is None else f" and <= {self.high}"
        return f"{sign} {self.low}{upper}"


@dataclass(frozen=True)
class PathText:
    """A text that names a file or folder, or for what is read a source elsewhere (hf://REPO)."""

    written: bool = False


@dataclass(frozen=True)
class Variants:
    """The dataclasses that a section may be, by its `type`; each is imported when one asks."""

    types: tuple[str, ...]
    load: Callable[[str], type]

    def __iter__(self) -> Iterator[type]:
        return map(self.load, self.types)


# The paths that settings take; the config of a run has them from the root.
InputPath = Annotated[str, PathText()]
OutputPath = Annotated[str, PathText(written=True)]
# The numbers that settings take.
Count = Annotated[int, Range(1)]
Index = Annotated[int, Range(0)]
Seed = Annotated[int, Range(0, 2**32 - 1)]
Positive = Annotated[float, Range(0, above=True)]
# Logits stay finite, multiplied or divided by it.
MIN_PENALTY, MAX_PENALTY = 0.01, 100.0
Penalty = Annotated[float, Range(MIN_PENALTY, MAX_PENALTY)]
CountPenalty = Annotated[float, Range(-2, 2)]  # OpenAI's range
NotNegative = Annotated[float, Range(0)]
Probability = Annotated[float, Range(0, 1)]
Fraction = Annotated[float, Range(0, 1, above=True)]
TopP = Fraction
TopLogprobs = Annotated[int, Range(0, 100)]
