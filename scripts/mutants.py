"""Mutation testing: faults put into the package one at a time, and which of them its tests notice.

    make mutants                             160 mutants, each against tests of its module and part
    make mutants ARGS="plan/ --count 20"     those of a part, or of a file
    make mutants ARGS="--map tests"          with those tests first, run once before, that reach it
    make mutants ARGS=--show                 what would be changed, without running anything

The list is drawn by a hash of seed, function and changed code, not by place: a function that moves
to another module takes its mutants along, so that lists before and after a change can be compared.
Nothing is changed here: a copy of the tracked files is. A mutant that makes the tests hang counts
as noticed. Tests that fail without a mutant are told, and left out. Modules beside the parts that
have no tests of their own, such as errors.py, are told and not counted.
"""

from __future__ import annotations

import argparse
import ast
import copy
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = "lite_runner/native/operators.so"  # built, so not tracked
SLOWER, SPARE_S = 5, 60  # a mutant hangs after so many times the tests' own time, and so much more
MOST_REACHING = 30  # tests that are asked by name, the quickest of those that reach a mutant
REACHING_S = 300
# Stands in the copy while tests are mapped. Processes that a test starts inherit its name.
PROBE = """
import os

told = set()


def reached(number):
    one = number, os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    if one not in told:
        told.add(one)
        with open({hits!r}, "a") as file:
            file.write("%d %s\\n" % one)
"""
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.Mult,
}


@dataclass(frozen=True)
class Mutant:
    path: str  # below lite_runner/
    line: int
    name: str  # of the function, "" outside
    before: str
    after: str
    start: int  # bytes of the file that `after` replaces
    end: int

    def rank(self, seed: int) -> str:
        text = f"{seed}\0{self.name}\0{self.before}\0{self.after}"
        return hashlib.sha256(text.encode()).hexdigest()

    def __str__(self) -> str:
        return f"lite_runner/{self.path}:{self.line}: {_line(self.before)} -> {_line(self.after)}"


def mutants_of(path: Path, source: str) -> Iterator[Mutant]:
    """Every mutant of a module."""
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for name, node in _nodes(ast.parse(source), ""):
        for changed in _changes(node):
            start = starts[node.lineno - 1] + node.col_offset
            end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
            before = source.encode()[start:end].decode()
            after = ast.unparse(changed) if changed is not None else "pass"
            if isinstance(node, ast.expr):
                after = f"({after})"
            yield Mutant(str(path), node.lineno, name, before, after, start, end)


def _nodes(node: ast.AST, name: str) -> Iterator[tuple[str, ast.expr | ast.stmt]]:
    """Nodes that may be changed, with the name of the function around them: neither types,
    decorators, imports for them, nor texts."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr):
                continue
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            inner = name
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = f"{name}.{child.name}".lstrip(".")
            if isinstance(child, ast.expr | ast.stmt):
                yield inner, child
            yield from _nodes(child, inner)


def _changes(node: ast.expr | ast.stmt) -> Iterator[ast.AST | None]:
    """`node` with one fault; None: without it."""
    changed = copy.deepcopy(node)
    match changed:
        case ast.Compare(ops=[operator]) if type(operator) in COMPARISONS:
            changed.ops = [COMPARISONS[type(operator)]()]
            yield changed
        case ast.BoolOp():
            changed.op = ast.Or() if isinstance(changed.op, ast.And) else ast.And()
            yield changed
        case ast.BinOp() if type(changed.op) in OPERATORS and not _text(changed):
            changed.op = OPERATORS[type(changed.op)]()
            yield changed
        case ast.UnaryOp(op=ast.Not()):
            yield changed.operand
        case ast.IfExp():
            changed.body, changed.orelse = changed.orelse, changed.body
            yield changed
        case ast.Constant(value=bool()):
            yield ast.Constant(not changed.value)
        case ast.Constant(value=int()):
            yield ast.Constant(changed.value + 1)
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Raise():
            yield None


def _text(node: ast.BinOp) -> bool:
    """True if it puts texts together, where another operator only raises TypeError."""
    return any(
        isinstance(one, ast.Constant | ast.JoinedStr) for one in (node.left, node.right)
    ) and ("'" in ast.unparse(node))


def _line(code: str) -> str:
    text = " ".join(code.split())
    return text if len(text) <= 70 else f"{text[:67]}..."


def tests_of(path: str) -> list[Path]:
    """The tests of a module, the cheap ones first: its own file, then the folder of its part."""
    module = Path(path)
    name = module.parent.name if module.stem == "__init__" else module.stem
    own = Path("tests") / module.parent / f"test_{name}.py"
    part = [own.parent] if module.parent.name else []  # of a module at the top: its own file alone
    return [one for one in (own, *part) if (ROOT / one).exists()]


@dataclass(frozen=True)
class Baseline:
    """A run of tests without a mutant."""

    seconds: float
    failed: list[str]  # left out of the runs with mutants


def baseline(tests: Path, folder: Path) -> Baseline:
    started = time.monotonic()
    run(["-rfE", str(tests)], folder, None)
    return Baseline(time.monotonic() - started, _failed(folder))


def _failed(folder: Path) -> list[str]:
    """The tests that failed in the last run; of names with spaces the beginning."""
    log = folder.with_suffix(".log").read_text(encoding="utf-8", errors="replace")
    return re.findall(r"^(?:FAILED|ERROR) (\S+)", log, re.MULTILINE)


def probed(source: bytes, mutants: Mapping[int, Mutant]) -> bytes:
    """A module that tells when it comes to the places of its mutants, by number. Patterns of
    `match` take no probe."""
    inserted: list[tuple[int, int, int, bytes]] = []
    for number, mutant in mutants.items():
        probe = f"__import__('lite_runner.probe').probe.reached({number})"
        if mutant.after == "pass":
            found = [(mutant.start, 1, -mutant.end, f"{probe}; ".encode())]
        else:  # the outer of two that begin together comes first
            found = [(mutant.start, 2, -mutant.end, f"({probe} or (".encode())]
            found.append((mutant.end, 0, 0, b"))"))
        with suppress(SyntaxError):
            compile(_with(source, found), mutant.path, "exec")
            inserted += found
    return _with(source, inserted)


def _with(source: bytes, inserted: list[tuple[int, int, int, bytes]]) -> bytes:
    for place, *_, text in sorted(inserted, reverse=True):
        source = source[:place] + text + source[place:]
    return source


def reaching(chosen: list[Mutant], tests: str, folder: Path) -> list[list[str]]:
    """Of each mutant the `tests` that come to its place and pass without it, the quickest first."""
    hits = folder.with_suffix(".hits")
    hits.touch()
    package = folder / "lite_runner"
    sources = {path: (package / path).read_bytes() for path in {one.path for one in chosen}}
    for path, source in sources.items():
        own = {number: one for number, one in enumerate(chosen) if one.path == path}
        (package / path).write_bytes(probed(source, own))
    probe = package / "probe.py"
    probe.write_text(PROBE.format(hits=str(hits)), encoding="utf-8")
    run(["-rfE", "--durations=0", "-n", "auto", "--dist", "loadfile", tests], folder, None)
    probe.unlink()
    for path, source in sources.items():
        (package / path).write_bytes(source)
    log = folder.with_suffix(".log").read_text(encoding="utf-8", errors="replace")
    print(log.rstrip().rpartition("\n")[2], flush=True)
    failed = tuple(_failed(folder))
    seconds: defaultdict[str, float] = defaultdict(float)
    for took, test in re.findall(r"^([\d.]+)s \w+ +(.*)$", log, re.MULTILINE):
        seconds[test] += float(took)
    found: list[list[str]] = [[] for _ in chosen]
    for line in hits.read_text(encoding="utf-8").splitlines():
        number, _, test = line.partition(" ")
        if test and not test.startswith(failed) and test not in found[int(number)]:
            found[int(number)].append(test)
    return [sorted(one, key=lambda test: seconds[test]) for one in found]


def run(arguments: list[str], folder: Path, timeout: float | None) -> str:
    """Outcome of the tests in the copy: "passed", "failed" or "hung". The log lies beside it, since
    tests may not write into it."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    # PYTHONPATH, so that what the tests start has the copy too; no bytecode: an older one of the
    # same second and size would be taken for the mutant's.
    environ = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    with (
        folder.with_suffix(".log").open("wb") as log,
        subprocess.Popen(
            command, cwd=folder, env=environ, stdout=log, stderr=log, start_new_session=True
        ) as process,
    ):
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            return "hung"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return "passed" if code == 0 else "failed"


def main() -> int:
    """1 where a mutant survives."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("part", nargs="?", default="", help="of lite_runner, as plan/ (all)")
    parser.add_argument("--count", type=int, default=160)
    parser.add_argument("--seed", type=int, default=33)
    parser.add_argument("--map", default="", metavar="TESTS", help="to run once, such as tests")
    parser.add_argument("--show", action="store_true", help="only list the mutants")
    parser.add_argument("--json", type=Path, help="a file for the outcomes")
    options = parser.parse_args()
    package = ROOT / "lite_runner"
    found = [
        mutant
        for path in sorted(package.rglob("*.py"))
        if str(path.relative_to(package)).startswith(options.part)
        for mutant in mutants_of(path.relative_to(package), path.read_text(encoding="utf-8"))
    ]
    chosen = sorted(found, key=lambda one: one.rank(options.seed))[: options.count]
    chosen.sort(key=lambda one: (one.path, one.line))
    print(f"{len(chosen)} of {len(found):,} mutants, seed {options.seed}", flush=True)
    if options.show:
        print(*chosen, sep="\n")
        return 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        outcomes = _outcomes(chosen, options.map, Path(folder).resolve() / "copy")
    counts = Counter(outcome for _, outcome in outcomes)
    noticed = counts["failed"] + counts["hung"]
    print(f"{noticed} of {noticed + counts['passed']} noticed, {counts['hung']} by a hang")
    if counts["untested"]:
        print(f"{counts['untested']} not counted, of modules without tests of their own")
    if options.json:
        rows = [{**asdict(mutant), "outcome": outcome} for mutant, outcome in outcomes]
        options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return 1 if counts["passed"] else 0


def _outcomes(chosen: list[Mutant], mapped: str, folder: Path) -> list[tuple[Mutant, str]]:
    """Outcome of the tests for each mutant; `mapped`: tests to be run once before, "" for none."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    names = [*tracked.stdout.decode().split("\0")[:-1], LIBRARY]
    for name in (name for name in names if (ROOT / name).is_file()):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    said = {"passed": "SURVIVES", "failed": "noticed by", "hung": "noticed, by a hang of"}
    baselines: dict[Path, Baseline] = {}
    reach = reaching(chosen, mapped, folder) if mapped else [[] for _ in chosen]
    outcomes = []
    for number, (mutant, reached) in enumerate(zip(chosen, reach, strict=True), 1):
        outcome, told = "untested", "no tests of its own"
        for name, arguments, limit in _asked(mutant, reached, baselines, folder):
            file = folder / "lite_runner" / mutant.path
            source = file.read_bytes()
            changed = source[: mutant.start] + mutant.after.encode() + source[mutant.end :]
            file.write_bytes(changed)
            outcome = run(["-x", "-rfE", *arguments], folder, limit)
            file.write_bytes(source)
            told = f"{said[outcome]} {name}"
            if outcome != "passed":
                told = f"{said[outcome]} {next(iter(_failed(folder)), name)}"
                break
        print(f"{number}. {mutant}: {told}", flush=True)
        outcomes.append((mutant, outcome))
    return outcomes


def _asked(
    mutant: Mutant, reached: list[str], baselines: dict[Path, Baseline], folder: Path
) -> Iterator[tuple[str, list[str], float]]:
    """Tests to ask one after the other: their name, pytest's arguments, and seconds to wait."""
    if reached:
        yield f"{len(reached)} tests that reach it", reached[:MOST_REACHING], REACHING_S
    for tests in tests_of(mutant.path):
        if tests not in baselines:
            baselines[tests] = found = baseline(tests, folder)
            for name in found.failed:
                print(f"left out, as it fails without a mutant: {name}", flush=True)
        one = baselines[tests]
        without = [f"--deselect={name}" for name in one.failed]
        yield str(tests), [*without, str(tests)], SLOWER * one.seconds + SPARE_S


if __name__ == "__main__":
    sys.exit(main())
