"""How processes ended, in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from lite_runner.distributed.how_ended import exit_text, last_lines, scheduler_text, tail


@pytest.mark.parametrize(
    ("code", "expected"),
    [(0, "exit code 0"), (3, "exit code 3"), (-9, "killed by SIGKILL"), (-77, "by signal 77")],
)
def test_an_exit_code_in_words(code: int, expected: str) -> None:
    assert expected in exit_text(code)


@pytest.mark.parametrize(
    ("code", "log", "expected"),
    [
        (-9, "timed out node", "the scheduler was ended by signal 9 (SIGKILL)"),
        (1, "The total number of timed out node is 1.", "the scheduler has lost a rank"),
        (None, "", "the scheduler has lost a rank"),
        (1, "", "the scheduler ended before its ranks were done: exit code 1"),
    ],
)
def test_why_a_scheduler_ended(code: int | None, log: str, expected: str) -> None:
    assert scheduler_text(code, log) == expected


def test_the_end_of_a_log_is_told(tmp_path: Path) -> None:
    """Its last lines, without those that are empty."""
    lines = [f"line {number}" for number in range(20)]
    assert last_lines("\n\n".join(lines)) == [f"    {line}" for line in lines[-8:]]
    assert last_lines("\nalone\n \n") == ["    alone"]
    log = tmp_path / "log"
    assert tail(log) == ""
    log.write_bytes(b"x" * 70_000 + b"\xff\nend")
    assert len(tail(log)) == 1 << 16 and tail(log).endswith("\ufffd\nend")
