"""lite_runner.records.dataclass against the standard library's."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import FrozenInstanceError, field
from functools import cached_property
from multiprocessing import get_context
from typing import Any, ClassVar

import pytest

from lite_runner import records
from tests.each import each


def both(**flags: bool) -> Callable[[Callable[[Any], type]], tuple[type, type]]:
    """The class that a function makes, by our decorator and by the standard one."""

    def classes(make: Callable[[Any], type]) -> tuple[type, type]:
        return make(records.dataclass(**flags)), make(dataclasses.dataclass(**flags))

    return classes


@both(frozen=True)
def FROZEN(decorate: Any) -> type:
    @decorate
    class Point:
        """A place."""

        x: int
        y: float = 1.5
        names: list[str] = field(default_factory=list, hash=False)
        note: str = field(default="", compare=False, repr=False)
        kind: ClassVar[str] = "flat"
        later: int = field(default=7, init=False)

        def __post_init__(self) -> None:
            object.__setattr__(self, "sum", self.x + self.y)

        @cached_property
        def twice(self) -> float:
            return 2 * self.x

    return Point


@both(kw_only=True)
def OPEN(decorate: Any) -> type:
    @decorate
    class Open:
        size: int
        items: dict[str, int] = field(default_factory=dict)

    return Open


def kept(one: Any) -> dict[str, Any]:
    return {item.name: getattr(one, item.name) for item in dataclasses.fields(one)}


@pytest.mark.parametrize(
    ("args", "given"),
    [((1,), {}), ((1, 2.5, ["a"], "b"), {}), ((), {"x": 3, "note": "c"}), ((4,), {"names": []})],
)
def test_an_instance_is_as_the_standard_one(args: tuple[Any, ...], given: dict[str, Any]) -> None:
    ours, standard = (record(*args, **given) for record in FROZEN)
    assert kept(ours) == kept(standard)
    assert repr(ours) == repr(standard)
    assert hash(ours) == hash(standard)
    assert ours.sum == standard.sum and ours.twice == standard.twice
    assert dataclasses.asdict(ours) == dataclasses.asdict(standard)


@each(
    ("args", "given"),
    [((), {}), ((1, 2, 3, 4, 5), {}), ((1,), {"x": 1}), ((1,), {"z": 2}), ((1,), {"later": 2})],
)
@each("record", FROZEN)
def test_wrong_arguments_are_refused(
    record: type, args: tuple[Any, ...], given: dict[str, Any]
) -> None:
    with pytest.raises(TypeError, match="Point"):
        record(*args, **given)


@pytest.mark.parametrize("record", OPEN)
def test_fields_by_name_alone(record: type) -> None:
    with pytest.raises(TypeError):
        record(1)
    one = record(size=1)
    one.size = 2
    assert one == record(size=2) and one != record(size=3)
    one.items["a"] = 1
    assert record(size=2).items == {}
    with pytest.raises(TypeError, match="unhashable"):
        hash(one)


@pytest.mark.parametrize("record", FROZEN)
def test_a_frozen_one_does_not_change(record: type) -> None:
    one: Any = record(1)
    for change in (lambda: setattr(one, "x", 2), lambda: delattr(one, "x")):
        with pytest.raises(FrozenInstanceError, match="'x'"):
            change()
    with pytest.raises(FrozenInstanceError):
        one.other = 1
    assert one == record(1) == dataclasses.replace(record(2), x=1)
    assert one != record(2) and one != (1, 1.5, [])


@pytest.mark.parametrize("record", FROZEN)
def test_a_subclass_keeps_the_fields_and_may_have_other_attributes(record: type) -> None:
    class Below(record):  # type: ignore[misc, valid-type]
        pass

    one = Below(1)
    one.other = 2
    assert one.other == 2
    with pytest.raises(FrozenInstanceError):
        one.x = 2
    assert one != record(1)


def test_fields_are_inherited_in_order() -> None:
    def derived(base: type, decorate: Any) -> type:
        class Space(base):  # type: ignore[misc, valid-type]
            """A point in space."""

            z: int = 0
            y: float = 2.0

        return decorate(Space)  # type: ignore[no-any-return]

    ours = derived(FROZEN[0], records.dataclass(frozen=True))
    standard = derived(FROZEN[1], dataclasses.dataclass(frozen=True))
    assert repr(ours(1, 2, [], "", 5)) == repr(standard(1, 2, [], "", 5))
    assert kept(ours(1)) == kept(standard(1))


def test_methods_of_the_class_stay() -> None:
    @records.dataclass(frozen=True)
    class Own:
        """With its own."""

        name: str

        def __repr__(self) -> str:
            return "own"

        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 5

    @records.dataclass(frozen=True, eq=False)
    class Same:
        """Compared by identity."""

        name: str

    assert repr(Own("a")) == "own" and Own("a") == Own("b") and hash(Own("a")) == 5
    assert Same("a") != Same("a") and len({Same("a"), Same("a")}) == 2


@records.dataclass(frozen=True)
class Sent:
    """A record that goes to another process."""

    name: str
    sizes: tuple[int, ...] = ()


def test_one_is_copied_and_sent() -> None:
    one = Sent("a", (1, 2))
    assert copy.deepcopy(one) == copy.copy(one) == one
    with get_context("spawn").Pool(1) as pool:
        assert pool.apply(repr, (one,)) == repr(one)
