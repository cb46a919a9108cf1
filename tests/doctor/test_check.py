"""Findings of checks that fail in any way, and their report."""

from __future__ import annotations

import json

import pytest

from lite_runner.doctor.check import Check, Finding, as_json, as_text, counts, examine, passed
from lite_runner.errors import ArtifactError

OK = Finding("ok", "12 GB", "more than 1 GB")
WARN = Finding("warn", "none", remedy="get one")
FAIL = Finding("fail", "numpy 2.0", "<2", 'pip install "numpy<2"')


def failing(error: BaseException) -> Check:
    def look() -> Finding:
        raise error

    return Check("broken", look)


def test_a_runner_error_is_a_failure_with_its_hint() -> None:
    found = failing(ArtifactError("no such file", "give one")).finding()
    assert found == Finding("fail", "no such file", remedy="give one")


def test_a_check_that_crashes_is_a_failure_that_names_the_exception() -> None:
    found = failing(ZeroDivisionError("by zero")).finding()
    assert found == Finding("fail", "this check itself failed: ZeroDivisionError: by zero")


def test_a_check_without_memory_says_so() -> None:
    found = failing(MemoryError()).finding()
    assert found.status == "fail"
    assert "not enough memory" in found.found


def test_ctrl_c_is_no_finding() -> None:
    with pytest.raises(KeyboardInterrupt):
        list(examine([failing(KeyboardInterrupt())]))


def test_one_that_crashes_leaves_the_others() -> None:
    checks = [failing(OSError("gone")), Check("fine", lambda: OK)]
    assert [(name, found.status) for name, found in examine(checks)] == [
        ("broken", "fail"),
        ("fine", "ok"),
    ]


def test_text_has_the_status_first_and_the_remedy_below() -> None:
    assert as_text("memory", OK) == "ok    memory               12 GB\n"
    assert as_text("numpy", FAIL) == (
        'fail  numpy                numpy 2.0, expected <2\n      -> pip install "numpy<2"\n'
    )
    assert as_text("a", Finding("warn", "one\ntwo", "three")) == (
        "warn  a                    one\n      two, expected three\n"
    )
    assert counts([OK, WARN, OK]) == "3 checks: 2 ok, 1 warn, 0 fail\n"


def test_json_is_one_document() -> None:
    assert json.loads(as_json([("memory", OK), ("lite", WARN)])) == {
        "schema": 1,
        "checks": [
            {
                "name": "memory",
                "status": "ok",
                "found": "12 GB",
                "expected": "more than 1 GB",
                "remedy": "",
            },
            {
                "name": "lite",
                "status": "warn",
                "found": "none",
                "expected": "",
                "remedy": "get one",
            },
        ],
        "ok": True,
    }
    assert json.loads(as_json([("numpy", FAIL)]))["ok"] is False


def test_only_a_failure_fails() -> None:
    assert passed([OK, WARN])
    assert not passed([OK, FAIL])
