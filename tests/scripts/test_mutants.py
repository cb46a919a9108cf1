"""Mutants: valid, different, the same wherever the code stands, and what their tests say."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from scripts import mutants
from scripts.mutants import baseline, mutants_of, run

SOURCE = '''
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import json


@decorated(frozen=True)
def chosen(values: Literal[1, 2], é: int) -> Literal[True]:
    """Not 1, nor True."""
    if not values and (len(values) < 3 or
                       é == 1):
        raise ValueError(f"{1 + 1}")
    return values + 1 if values is None else "a" + "b"
'''


def changed(path: str, source: str) -> list[tuple[str, str]]:
    found = list(mutants_of(Path(path), source))
    for mutant in found:
        data = source.encode()
        after = data[: mutant.start] + mutant.after.encode() + data[mutant.end :]
        assert ast.dump(ast.parse(after)) != ast.dump(ast.parse(data)), mutant
    return sorted((" ".join(one.before.split()), one.rank(1)) for one in found)


def test_code_alone_is_changed_and_moves_with_its_function() -> None:
    found = changed("a.py", SOURCE)
    assert [before for before, _ in found] == [
        *("1", "1", "3", "len(values) < 3", "len(values) < 3 or é == 1", "not values"),
        *("not values and (len(values) < 3 or é == 1)", 'raise ValueError(f"{1 + 1}")'),
        *("values + 1", 'values + 1 if values is None else "a" + "b"', "values is None", "é == 1"),
    ]
    assert changed("other/b.py", f"import os\n\n{SOURCE}") == found


def test_outcomes_of_tests(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "test_it.py").write_text("def test_it(): assert False")
    assert run(["test_it.py"], copy, 100) == "failed"
    assert run(["test_it.py"], copy, 0.01) == "hung"
    assert baseline(Path("test_it.py"), copy).failed == ["test_it.py::test_it"]


def test_tests_that_reach_a_mutant_are_known(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    (copy / "lite_runner").mkdir(parents=True)
    (copy / "lite_runner/__init__.py").touch()
    source = "def one(a):\n    if a and a > 5:\n        raise ValueError\n    return a + 7\n"
    (copy / "lite_runner/a.py").write_text(source)
    (copy / "test_a.py").write_text(
        "import pytest\nfrom lite_runner.a import one\n\n\n"
        "def test_0(): assert one(0) == 7\n\n\n"
        "def test_9():\n    with pytest.raises(ValueError):\n        one(9)\n\n\n"
        "def test_wrong():\n    one(9)\n"
    )
    chosen = list(mutants_of(Path("a.py"), source))
    zero, nine = ([f"test_a.py::test_{number}"] for number in (0, 9))
    found = mutants.reaching(chosen, "test_a.py", copy)
    assert {one.before: sorted(tests) for one, tests in zip(chosen, found, strict=True)} == {
        **{"a and a > 5": zero + nine, "a > 5": nine, "5": nine, "raise ValueError": nine},
        **{"a + 7": zero, "7": zero},
    }
    assert (copy / "lite_runner/a.py").read_text() == source
    assert sorted(one.name for one in (copy / "lite_runner").glob("*.py")) == [
        "__init__.py",
        "a.py",
    ]


def test_a_part_is_asked_where_the_tests_of_a_module_notice_nothing() -> None:
    part = Path("tests/generation")
    assert mutants.tests_of("generation/sampling.py") == [part / "test_sampling.py", part]
    assert mutants.tests_of("generation/row_order.py") == [part]
    assert mutants.tests_of("sweep.py") == [Path("tests/test_sweep.py")]


def test_a_module_without_tests_of_its_own_is_not_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would survive without a run."""
    monkeypatch.setattr("sys.argv", ["mutants.py", "errors.py", "--count", "1"])
    assert mutants.main() == 0
    *_, one, counted, left_out = capsys.readouterr().out.splitlines()
    assert one.startswith("1. lite_runner/errors.py:") and one.endswith(": no tests of its own")
    assert counted == "0 of 0 noticed, 0 by a hang"
    assert left_out == "1 not counted, of modules without tests of their own"
