"""Arguments in Python's spelling."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from lite_runner.serving.tool_formats.python_call import read_arguments, write_arguments

READ: list[tuple[str, dict[str, Any]]] = [
    ("", {}),
    ("a=1", {"a": 1}),
    (" a = -1.5e3 ,\n b=True, c=None,)", {"a": -1500.0, "b": True, "c": None}),
    (
        "a='it\\'s', b=\"it's\", c='''x\n'y\"''', d=''",
        {"a": "it's", "b": "it's", "c": "x\n'y\"", "d": ""},
    ),
    ("a='\\u00fc\\n\\x41\\101 \\\\ \\d+', ü='東京 😀'", {"a": "ü\nAA \\ \\d+", "ü": "東京 😀"}),
    # JSON's spelling: what Python reads otherwise.
    ('a="\\/\\ud83d\\ude00", b=[true, false, null]', {"a": "/😀", "b": [True, False, None]}),
    ("a={'x': [1, {'y': ()}]}".replace("()", "[]"), {"a": {"x": [1, {"y": []}]}}),
    ("a=[1, 2,], b={'x': 1,}", {"a": [1, 2], "b": {"x": 1}}),
    ("a=')', b='tool_call(', c='a=1'", {"a": ")", "b": "tool_call(", "c": "a=1"}),
    ("from=1, True_=2", {"from": 1, "True_": 2}),
]


@pytest.mark.parametrize(("code", "expected"), READ)
def test_it_is_read(code: str, expected: dict[str, Any]) -> None:
    code = code.removesuffix(")")
    assert read_arguments(f"f({code}) rest", 2) == (expected, len(code) + 3)


@pytest.mark.parametrize(("_", "arguments"), READ)
def test_what_is_written_is_read(_: str, arguments: dict[str, Any]) -> None:
    written = write_arguments(arguments)
    assert read_arguments(f"{written})", 0) == (arguments, len(written) + 1)


@pytest.mark.parametrize(
    "code",
    [
        *("1", "'a'", "*a", "**{'a': 1}", "a", "a=", "a=b", "a=1 b=2", "a==1", "a:=1", "'a': 1"),
        *("a=1, a=2", "a={'x': 1, 'x': 2}", "a={'x'=1}", "a={x=1}", "a={1: 2}", "a={1, 2}"),
        *("a=(1, 2)", "a=f()", "a=f'{x}'", "a=b'x'", "a=r'x'", "a='x' 'y'", "a=1+1", "a=1j"),
        *("a=[1", "a=1]", "a=1}, {", "}, {'a': 1", "a=[1)]", "a=[,]", ",", "a=1,,", "a=[1,,]"),
        *("a='x\ny'", "a='x", "a='\\x4'", "a='\\N{no such}'", "a='\\ud800'", "a='\0'"),
        *("a=nan", "a=inf", "a=1e999", "a=007", "a=" + "9" * 100, "a=1_000", "a=0x1", "# a"),
        *("a=[x for x in y]", "a=lambda: 0", "a=__import__('os')", "a=1 if 1 else 2", "a=-'x'"),
        "a=" + "[" * 100 + "]" * 100,
    ],
)
def test_what_is_no_plain_call_is_none(code: str) -> None:
    assert read_arguments(f"{code})", 0) is None


@pytest.mark.parametrize(
    "code",
    [
        "a=" + "[" * 300_000,
        "a=" + "[" * 300_000 + "]" * 300_000 + ")",
        "a='" + "\\" * 300_001,
        "a=" + "'''" * 100_001,
        "a=" + "-1" * 300_000 + ")",
        "a=" + "9" * 300_000 + ")",
        " " * 300_000,
        ", ".join(f"a{number}='x'" for number in range(50_000)) + ", a1=1)",
    ],
    ids=lambda code: code[:10],
)
def test_what_is_hostile_takes_no_time(code: str) -> None:
    began = time.process_time()
    assert read_arguments(code, 0) is None
    assert time.process_time() - began < 2


def test_long_texts_are_read() -> None:
    text = "line 'one'\n\"two\" \\ü" * 20_000
    written = write_arguments({"text": text, "same": json.loads(json.dumps([text]))})
    found = read_arguments(f"{written})", 0)
    assert found is not None and found[0] == {"text": text, "same": [text]}
