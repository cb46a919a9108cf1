"""A check, its finding, and a report of several findings."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import Literal

from lite_runner import progress
from lite_runner.errors import RunnerError
from lite_runner.records import dataclass
from lite_runner.system import memory

Status = Literal["ok", "warn", "fail"]

_NAME_WIDTH = 20


@dataclass(frozen=True)
class Finding:
    """The result of a check. `remedy` is a command or setting; "" where nothing is to be done."""

    status: Status
    found: str
    expected: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Check:
    """One thing to look at. What `look` raises is a failure like any other."""

    name: str
    look: Callable[[], Finding]

    def finding(self) -> Finding:
        """Run the check; any error becomes a finding. Raises KeyboardInterrupt only."""
        try:
            return self.look()
        except RunnerError as error:
            return Finding("fail", error.message, remedy=error.hint)
        except Exception as error:
            if (lacking := memory.shortage_error(error)) is not None:
                return Finding("fail", lacking.message, remedy=lacking.hint)
            return Finding("fail", f"this check itself failed: {type(error).__name__}: {error}")


def examine(checks: Iterable[Check]) -> Iterator[tuple[str, Finding]]:
    """The name and the finding of each check, one after the other."""
    for check in checks:
        progress.status(f"checking {check.name} ...")
        try:
            found = check.finding()
        finally:
            progress.status("")
        yield check.name, found


def as_text(name: str, finding: Finding) -> str:
    """A finding as lines: the status first, the remedy below."""
    expected = f", expected {finding.expected}" if finding.status != "ok" else ""
    first, *more = finding.found.splitlines() or [""]
    lines = [
        f"{finding.status:<5} {name:<{_NAME_WIDTH}} {first}",
        *(f"      {one}" for one in more),
    ]
    lines[-1] += expected if finding.expected else ""
    if finding.remedy:
        lines.append(f"      -> {finding.remedy}")
    return "\n".join(lines) + "\n"


def counts(findings: Iterable[Finding]) -> str:
    """The last line: how many there are of each status."""
    found = [finding.status for finding in findings]
    counts = [f"{found.count(status)} {status}" for status in ("ok", "warn", "fail")]
    return f"{len(found)} checks: {', '.join(counts)}\n"


def passed(findings: Iterable[Finding]) -> bool:
    """True where nothing fails; warnings are allowed."""
    return all(finding.status != "fail" for finding in findings)


def as_json(findings: Iterable[tuple[str, Finding]]) -> str:
    """One JSON document."""
    listed = list(findings)
    document = {
        "schema": 1,
        "checks": [{"name": name, **asdict(finding)} for name, finding in listed],
        "ok": passed(finding for _, finding in listed),
    }
    return json.dumps(document, ensure_ascii=False, indent=2) + "\n"
