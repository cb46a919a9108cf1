#!/usr/bin/env python3
"""The figures of the package's structure: python scripts/house.py [KEY=VALUE ...]

Files executed are those of the second of two runs of predict with these keys, by default of the
model that is downloaded and packed once; all others are read off the sources.
"""

from __future__ import annotations

import ast
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "lite_runner"
USUAL = ("predict_data=The capital of France is", "max_new_tokens=4")
START = "lite_runner.run_modes.predict"
# Values of backend=, of infer.engine= and of the layouts of exported graphs.
STRINGS = {"native", "ms", "mslite", "mindformers"}
STRINGS |= {"lite", "lite-worker", "graph-cell", "resizable", "static_pair"}
# The variables of formats: of a checkpoint, an adapter, completions, arrays; and of packages.
FORMATS = {"form", "format", "formats", "output_format", "kind", "versions"}
_CLAUSES = ("What ", "Whether ", "Where ", "How ", "Who ")
_TRACER = """
import json, sys, threading
files, stack = {}, []
def trace(frame, event, argument):
    if event == "call":
        code = frame.f_code
        files.setdefault(code.co_filename, set()).add(code.co_name)
        made = type(frame.f_locals.get("self")).__name__ if code.co_name == "__init__" else ""
        while made == "NativeBackend" and frame.f_back is not None:
            frame = frame.f_back
            stack.append(frame.f_code.co_filename)
sys.setprofile(trace)
threading.setprofile(trace)
from lite_runner.app import main
status = main(sys.argv[2:])
sys.setprofile(None)
with open(sys.argv[1], "w") as file:
    json.dump([status, sorted(files), stack], file)
"""


def executed(arguments: Sequence[str], cwd: Path) -> tuple[list[str], list[str]]:
    """The files of the package of which a warm predict runs anything, their own body included; and
    those on the stack where the backend is made, from that of the run mode on."""
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "files.json"
        command = [sys.executable, "-c", _TRACER, str(told), "run_mode=predict", *arguments]
        for _ in range(2):  # the first packs the model
            subprocess.run(command, cwd=cwd, check=True, stdout=subprocess.DEVNULL)
        status, files, stack = json.loads(told.read_text(encoding="utf-8"))
    assert status == 0
    called = list(dict.fromkeys(reversed(_inside(stack))))
    return _inside(files), called[called.index("run_modes/predict.py") :]


def _inside(files: Sequence[str]) -> list[str]:
    """The files that are in the package."""
    return [str(Path(one).relative_to(PACKAGE)) for one in files if one.startswith(f"{PACKAGE}/")]


@cache
def paths() -> dict[str, Path]:
    """The file of each module of the package, by its name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def modules() -> dict[str, ast.Module]:
    """The tree of each module."""
    return {name: ast.parse(path.read_text("utf-8")) for name, path in paths().items()}


def lines_of(name: str) -> int:
    """Lines of a module's file."""
    return paths()[name].read_text(encoding="utf-8").count("\n")


def imported(name: str, *, in_functions: bool) -> set[str]:
    """The modules of the package that one imports, and the packages that they are in."""
    found = set()
    for node in _statements(modules()[name], in_functions):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for one in names:
            steps = one.split(".")
            found |= {".".join(steps[:end]) for end in range(1, len(steps) + 1)}
    return (found & modules().keys()) - {name}


def _statements(node: ast.AST, in_functions: bool) -> Iterator[ast.AST]:
    """The nodes below one that run, without imports for type checking."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if in_functions or not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield child
            yield from _statements(child, in_functions)


def closure(start: str, *, in_functions: bool) -> set[str]:
    """All that a module imports, directly or through others."""
    found, waiting = {start}, [start]
    while waiting:
        new = imported(waiting.pop(), in_functions=in_functions) - found
        found |= new
        waiting += new
    return found


# What a run's config is for: composing it, and the run itself.
OF_RUNS = {"api", "app", "config", "joined", "launch", "run_modes"}


def taking_config() -> list[str]:
    """Functions that take the config of a run, and fields that hold one, outside OF_RUNS."""
    bases: dict[str, set[str]] = {}
    for tree in modules().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                bases.setdefault(node.name, set()).update(map(ast.unparse, node.bases))
            elif isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("TypeVar("):
                bound = {
                    ast.unparse(one.value).strip("'")
                    for one in ast.walk(node.value)
                    if isinstance(one, ast.keyword)
                }
                bases.setdefault(ast.unparse(node.targets[0]), set()).update(bound)
    configs = {"RunConfig"}
    while more := {name for name, of in bases.items() if of & configs} - configs:
        configs |= more
    found = []
    for name, tree in modules().items():
        if name.split(".")[1:2] and name.split(".")[1] in OF_RUNS:
            continue
        for node in ast.walk(tree):
            annotated: list[tuple[str, ast.expr | None]] = []
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                annotated = [(node.name, one.annotation) for one in every]
            elif isinstance(node, ast.ClassDef):
                fields = (one for one in node.body if isinstance(one, ast.AnnAssign))
                annotated = [
                    (f"{node.name}.{ast.unparse(one.target)}", one.annotation) for one in fields
                ]
            for what, annotation in annotated:
                if annotation is not None and ast.unparse(annotation).strip("'\"") in configs:
                    found.append(f"{name}.{what}")
    return list(dict.fromkeys(found))


def compared() -> tuple[int, int]:
    """Comparisons with the names of backends, engines and layouts, and those with formats of files
    and of output that have such a name: mindformers, ms."""
    found = [0, 0]
    for tree in modules().values():
        for node in ast.walk(tree):
            if not isinstance(node, (ast.Compare, ast.MatchValue)):
                continue
            inner = list(ast.walk(node))
            texts = {one.value for one in inner if isinstance(one, ast.Constant)}
            names = {getattr(one, "id", getattr(one, "attr", "")) for one in inner}
            found[bool(names & FORMATS)] += bool(texts & STRINGS)
    return found[0], found[1]


def with_one_importer() -> list[str]:
    """Modules of at most 60 lines that one other imports, in functions too."""
    importers = Counter(used for name in modules() for used in imported(name, in_functions=True))
    return [
        name
        for name, count in importers.items()
        if count == 1 and lines_of(name) <= 60 and not paths()[name].stem.startswith("__")
    ]


def used_twice() -> list[str]:
    """Names of classes that several modules define."""
    names = Counter(
        node.name
        for tree in modules().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    return [name for name, count in names.items() if count > 1]


def tests() -> int:
    """Functions of tests."""
    return sum(
        isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    )


def items(root: Path) -> str:
    """Number of tests that pytest collects in a folder, or its failure."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTEST_ADDOPTS": ""}  # which may add lines to the output
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    last = done.stdout.strip().rpartition("\n")[2]
    failed = f"not counted, {shlex.join(command[1:])} ended with {done.returncode}: "
    return failed + last if done.returncode else last


# Of architectures/, what several of them share.
SHARED = {"experts", "fields", "llama_like", "naming", "next_token"}
SHARED |= {"positions", "quantization", "reference", "row_order", "settings", "spec"}


def families() -> list[int]:
    """Lines of each architecture's file."""
    inside = (name for name in modules() if name.startswith("lite_runner.architectures."))
    return [lines_of(name) for name in inside if name.rpartition(".")[2] not in SHARED]


def main() -> None:
    """Print all figures."""
    with tempfile.TemporaryDirectory() as folder:
        files, called = executed(sys.argv[1:] or USUAL, Path(folder))
    sizes = [lines_of(name) for name in modules()]
    told = [ast.get_docstring(tree) or "" for tree in modules().values()]
    clauses = sum(one.startswith(_CLAUSES) for one in told)
    print(f"files executed by a warm predict: {len(files)}")
    print(f"files from predict to NativeBackend(: {len(called)}: {' > '.join(called)}")
    for what, in_functions in (("at its import", False), ("and in functions", True)):
        every = closure(START, in_functions=in_functions)
        print(
            f"imported by predict, {what}: {len(every)} modules, {sum(map(lines_of, every))} lines"
        )
    print(f"functions and fields with a run's config, outside runs: {len(taking_config())}")
    names, formats = compared()
    print(f"comparisons with names of backends, engines, layouts: {names}; of formats: {formats}")
    print(f"{sum(sizes)} lines, {len(sizes)} modules, median {statistics.median(sizes):g}")
    print(f"families: {len(families())}, median {statistics.median(families()):g} lines")
    print(f"modules of at most 60 lines with one importer: {len(with_one_importer())}")
    print(f"class names used twice: {len(used_twice())}")
    print(f"docstrings of modules that are clauses: {clauses}")
    print(f"test functions: {tests()}; items: {items(ROOT)}")


if __name__ == "__main__":
    main()
