from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lite_runner.config import (
    Invalid,
    Scalar,
    annotation_of,
    describe,
    did_you_mean,
    free_mapping,
    leaves,
    nearest,
    nearest_flag,
    nearest_key,
    read,
    show,
)
from lite_runner.records import Range
from tests.each import each


@dataclass(frozen=True)
class Inner:
    size: Annotated[int, Range(1, 10)]
    note: str | None = None


@dataclass(frozen=True)
class Circle:
    type: Literal["circle"]
    radius: float


@dataclass(frozen=True)
class Square:
    type: Literal["square", "box"]
    side: float


@dataclass(frozen=True)
class Outer:
    inner: Inner
    shape: Circle | Square
    ids: int | tuple[int, ...] | None
    maybe: Inner | None


GOOD: dict[str, Any] = {
    "inner": {"size": 3},
    "shape": {"type": "box", "side": 2},
    "ids": [1, 2],
    "maybe": None,
}


def read_outer(**changes: Any) -> tuple[Any, list[str]]:
    found: list[Invalid] = []
    value = read({**GOOD, **changes}, Outer, "", found)
    return value, [fault.text for fault in found]


def test_a_section_with_variants_and_lists_is_read() -> None:
    value, faults = read_outer()
    assert faults == []
    assert value == Outer(Inner(3), Square("box", 2.0), (1, 2), None)
    assert isinstance(value.shape.side, float)


@each(
    ("changes", "expected"),
    [
        ({"inner": {"size": 11}}, "inner.size: got 11, expected an integer >= 1 and <= 10"),
        ({"inner": {"size": True}}, "inner.size: got true, expected an integer"),
        ({"inner": {"size": 2.0}}, "inner.size: got 2.0"),
        ({"inner": {"size": "3"}}, "inner.size: got '3'"),
        ({"inner": {}}, "inner.size: missing"),
        ({"inner": 5}, "inner: got 5, expected a section"),
        ({"inner": {"size": 1, "sise": 2}}, "inner.sise: no such key; did you mean inner.size?"),
        ({"shape": {"type": "sqare", "side": 1}}, "shape.type: got 'sqare'"),
        ({"shape": {"side": 1}}, "shape.type: got null, expected one of circle, square, box"),
        ({"shape": {"type": "circle", "radius": math.nan}}, "shape.radius: got nan"),
        ({"shape": {"type": "circle", "radius": 10**400}}, "shape.radius: got"),
        ({"ids": [1, "x"]}, "ids[1]: got 'x', expected an integer"),
        ({"ids": "x"}, "ids: got 'x'"),
        ({"ids": "None"}, "did you mean null?"),
        ({"maybe": {"size": 0}}, "maybe.size: got 0"),
    ],
)
def test_misfits_are_named_with_got_and_expected(changes: dict[str, Any], expected: str) -> None:
    value, faults = read_outer(**changes)
    assert value is None or changes
    assert any(text.startswith(expected) or expected in text for text in faults), faults


def test_all_errors_are_collected() -> None:
    _, faults = read_outer(inner={"size": 0, "x": 1}, ids="y", shape=3)
    assert len(faults) == 4


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=8,
    )
)
def test_any_data_is_read_or_refused_without_an_exception(value: Any) -> None:
    found: list[Invalid] = []
    result = read(value, Outer, "", found)
    assert (result is None) == bool(found)


def test_leaves_follow_the_variant_that_the_data_has() -> None:
    everything = leaves(Outer)
    assert {"shape.radius", "shape.side", "maybe", "maybe.size"} <= set(everything)
    here = leaves(Outer, GOOD)
    assert "shape.side" in here and "shape.radius" not in here
    assert "maybe" in here and "maybe.size" not in here


def test_descriptions_are_words() -> None:
    assert describe(int | tuple[int, ...] | None) == (
        "an integer or a list (an integer each) or null"
    )
    assert describe(Annotated[float, Range(0, above=True)]) == "a number > 0"
    assert show("x" * 200).endswith("...") and len(show("x" * 200)) == 80
    assert show(10**5000) == "a very long number"


@dataclass(frozen=True)
class Open:
    free: Mapping[str, Any] | None


def read_open(value: Any) -> tuple[Any, list[str]]:
    found: list[Invalid] = []
    section = read({"free": value}, Open, "", found)
    return section and section.free, [fault.text for fault in found]


def test_a_free_mapping_holds_scalars_under_any_names() -> None:
    value = {"a": {"b-c": 1, "d": {"e_1": "x", "f": None}}, "g": 2.5, "h": True}
    assert read_open(value) == (value, [])
    assert read_open(None) == (None, [])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3, "free: got 3, expected a section or null"),
        ({"a": {"b": [1]}}, "free.a.b: got [1], expected a string or an integer or a number or"),
        ({"a": {1: 2}}, "free.a: got the name 1, expected letters"),
        ({"a": {"b.c": 2}}, "free.a: got the name 'b.c', expected letters"),
        ({"a": math.nan}, "free.a: got nan"),
    ],
)
def test_a_free_mapping_holds_scalars_alone(value: Any, expected: str) -> None:
    found, texts = read_open(value)
    assert found is None and len(texts) == 1 and texts[0].startswith(expected), texts


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=8,
    )
)
def test_any_data_is_a_free_mapping_or_a_fault(value: Any) -> None:
    found, texts = read_open(value)
    assert (found == value) != bool(texts)


def test_a_key_inside_a_free_mapping_takes_a_scalar() -> None:
    known = leaves(Open)
    assert free_mapping("free.a.b", known) == "free"
    assert annotation_of("free.a.b", known) == Scalar
    assert free_mapping("free", known) is None and annotation_of("free", known) is known["free"]
    assert annotation_of("fre.a", known) is None


KEYS = ["temperature", "top_k", "context.device_target", "model.model_config.top_k"]


def test_nearest_ignores_case_and_gives_up_on_strangers() -> None:
    assert nearest("LEFT", ["none", "left"]) == "left"
    assert nearest("zzz", ["none", "left"]) is None


def test_a_key_is_found_in_another_section_too() -> None:
    assert nearest_key("temprature", KEYS) == "temperature"
    assert nearest_key("context.temperature", KEYS) == "temperature"
    assert nearest_key("device_target", KEYS) == "context.device_target"
    assert nearest_key("device_targt", KEYS) == "context.device_target"
    assert nearest_key("model.top_k", KEYS) == "model.model_config.top_k"
    assert nearest_key("quite_other", KEYS) is None


def test_the_typed_key_is_never_suggested() -> None:
    assert nearest_key("temperature", KEYS) is None
    assert nearest_key("model.temperature", KEYS) == "temperature"


def test_a_section_in_common_makes_no_key_near() -> None:
    keys = ["model.model_config.use_fused_rope", "model.model_config.do_sample"]
    assert nearest_key("model.model_config.use_kvcache_op", keys) is None
    assert nearest_key("model.model_config.do_smple", keys) == keys[1]


def test_near_flags() -> None:
    flags = ["profile", "predict_data", "help"]
    assert nearest_flag("--vocab_file", flags) is None
    assert nearest_flag("--predict-dat", flags) == "--predict_data"
    assert nearest_flag("-hlp", flags) == "--help"


def test_no_suggestion_gives_an_empty_text() -> None:
    assert did_you_mean(None) == ""
    assert did_you_mean("x") == "; did you mean x?"
