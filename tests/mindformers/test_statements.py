"""Statements of the five documents and the design: tests/fixtures/statements.yaml.

Each of the 198 has an outcome. What can be tried in seconds is typed here, all in one process;
others name the test that tries them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import yaml

from tests.mindformers.test_documents import LLAMA_YAML, lay_out
from tests.paths import ROOT

TESTS = ROOT / "tests"
STATEMENTS: dict[int, dict[str, Any]] = yaml.safe_load(
    (TESTS / "fixtures/statements.yaml").read_text(encoding="utf-8")
)
TYPED = {n: one for n, one in STATEMENTS.items() if "type" in one or "code" in one}


def test_each_has_an_outcome_and_says_how_it_is_tried() -> None:
    assert [*STATEMENTS] == [*range(1, 199)]
    for number, one in STATEMENTS.items():
        ways = {"type", "code", "test"} & one.keys()
        assert one["outcome"] in "WCFN" and one["what"], number
        assert len(ways) == 1 or (one["outcome"] in "FN" and not ways), number
        assert ("change" in one) is (one["outcome"] == "C"), number
        assert one.keys() <= {"what", "outcome", "change", "says", "exit", *ways}, number


def test_the_tests_that_are_named_are_there() -> None:
    for number, one in STATEMENTS.items():
        if "test" in one:
            file, _, name = one["test"].partition("::")
            assert f"def {name}(" in (TESTS / file).read_text(encoding="utf-8"), (number, name)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[int, str]]:
    """Exit code and output of all that is typed, in one folder, in their order."""
    folder = tmp_path_factory.mktemp("statements")
    lay_out(folder)
    (folder / "export.yaml").write_text(LLAMA_YAML + "run_mode: export\n", encoding="utf-8")
    (folder / "text.txt").write_text("The sea was calm, and the lamp was lit.\n" * 8)
    (folder / "belle.jinja").write_text("Human: {{ messages[-1].content }} \n\nAssistant:")
    jobs = folder / "jobs.json"
    jobs.write_text(json.dumps({n: [o.get("type"), o.get("code")] for n, o in TYPED.items()}))
    done = subprocess.run(
        [sys.executable, "-m", "tests.mindformers.run_statements", str(jobs)],
        cwd=folder,
        env={
            **os.environ,
            "GLOG_v": "3",
            "HF_HUB_OFFLINE": "1",
            "LITE_RUNNER_CACHE": str(folder / "cache"),
            "PYTHONPATH": str(ROOT),
        },
        capture_output=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(jobs.with_suffix(".out.json").read_text())
    return {int(number): (code, output) for number, (code, output) in found.items()}


def test_outcomes_of_statements(results: dict[int, tuple[int, str]]) -> None:
    wrong = []
    for number, one in TYPED.items():
        code, output = results[number]
        matches = one.get("says", "") in output
        if one["outcome"] == "F" and code == 0:
            wrong.append(f"{number} {one['what']}: works now: outcome: W")
        elif not matches or (one["outcome"] != "F" and code != one.get("exit", 0)):
            wrong.append(f"{number} {one['what']}: exit code {code}\n{output[-1500:]}")
        elif "Traceback" in output and "SystemExit" not in output and "type" in one:
            wrong.append(f"{number} {one['what']}: a traceback\n{output[-1500:]}")
    assert not wrong, "\n".join(wrong)
