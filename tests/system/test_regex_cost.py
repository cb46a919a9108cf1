"""Patterns of real tokenizers are accepted, and none that may take forever."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lite_runner.system.regex_cost import check_cost
from tests.each import each

REAL = [
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r" ?[^(\s|[.,!?…。，、।۔،])]+",  # noqa: RUF001
    r"\s+$",
    r"\d{1,3}(?=(?:\d{3})*\b)",
    r"(?=(\d{3})+(?!\d))",
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$",
    r"[\p{Han}]+|[\p{Lu}\p{Lo}&&[^\p{Han}]]*[\p{Ll}\p{M}&&[^\p{Han}]]+(?i:'s|'t)?",
    r"<\|startoftext\|>|<\|endoftext\|>|'s|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
    r" {2,}",
    r"(a|a|aa)+",
    r"(?#a comment)(?<name>a)(?i)b|c",
]
TOO_MUCH = [
    *(r"(a|a|aa)+$", r"(a+)+$", r"(a*)*b", r"(?:a?){30}a{30}", "a?" * 30 + "a" * 30, r".*.*Z"),
    *(r"(a*)\1", r"(?<x>a|b\g<x>c)", r"((a|aa){1,9}b)+", r"(?=(a|aa)+$)", r"(?(a)b)", r"(?~a)"),
    *(r"(a|b|ab)*c", r"(?i)(a|aa)+$", "(" * 40 + ")" * 40, "(a", "a)", "[a", "a\\", "(?x)a"),
    *(r"((){1000}){1000}", r"\p{N}{1,3}+$", r"(a+|b)*c", r"x*y*z*$", "a" * 100_000),
    *(r"(?>(a|aa)+$)b", r"[^]a]*[[:alpha:]b]*$", r"(a*b|a)+c"),
]


@each("pattern", REAL)
def test_patterns_of_real_models(pattern: str) -> None:
    check_cost(pattern)


def test_patterns_that_cost_too_much_or_are_not_understood(subtests: pytest.Subtests) -> None:
    for pattern in TOO_MUCH:
        with subtests.test(pattern=pattern), pytest.raises(ValueError, match=r"."):
            check_cost(pattern)


@given(st.text(r"ab\\[]^(?:=!<>|)*+{1,3}$", max_size=40))
def test_any_text_is_taken_or_refused(pattern: str) -> None:
    try:
        check_cost(pattern)
    except ValueError as error:
        assert str(error)
