"""What is read without Hydra's parser is what that reads."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from lite_runner.config import grammar

NUMBERS = st.from_regex(r"-?[0-9]{1,20}(\.[0-9]{0,20})?", fullmatch=True)


@given(NUMBERS)
@example("-0")
@example("-0.0")
@example("007")
@example("0.30000000000000004")
@example("true")
@example("True")
@example("null")
@example("1e3")
@example(" 5")
def test_plain_values_are_those_of_hydra(text: str) -> None:
    expected = grammar._parse(text).value()
    found = grammar.value_of(text, float)
    assert (type(found), repr(found)) == (type(expected), repr(expected))
