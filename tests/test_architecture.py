"""The shape of the source: who imports whom, how long files are, what is never called."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from lite_runner.architectures import KNOWN

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "lite_runner"
MODULES = sorted(PACKAGE.rglob("*.py"))
PYTHON_FILES = [
    ROOT / "run_lite.py",
    ROOT / "setup.py",
    *MODULES,
    *(
        path
        for name in ("benchmarks", "examples", "scripts", "tests")
        for path in (ROOT / name).rglob("*.py")
    ),
]

# What the parts of lite_runner may import of one another. Imports go one way, from the bottom of
# this table to its top; generation and run_modes have rules of their own besides.
ALLOWED: dict[str, set[str]] = {
    "code_digest": set(),
    "errors": set(),
    "own_python": set(),
    "small_file": set(),
    "memory": {"errors"},
    "progress": set(),
    "signals": set(),
    "interrupts": set(),
    "stopping": {"config"},
    "ascend_devices": {"errors"},
    "hccl": set(),
    "environment": {"ascend_devices", "errors", "interrupts", "memory", "signals"},
    "gguf_metadata": {"errors"},
    "registering": {"errors"},
    "report": {"config", "errors", "memory"},
    "events": {"errors"},
    "rank_table": {"errors"},
    "rank_table_file": {"errors", "rank_table", "small_file"},
    "architectures": {"errors"},
    "config": {"errors", "hccl", "memory", "progress", "rank_table_file", "small_file"},
    "text": {"errors", "gguf_metadata"},
    "weights": {"config", "errors", "gguf_metadata", "progress"},
    "kernels": {"config", "errors", "weights"},
    "models": {"config", "errors", "kernels", "weights"},
    "export": {"config", "errors", "kernels", "models", "weights"},
    "backends": {
        *("code_digest", "config", "environment", "errors", "export", "kernels", "memory"),
        *("models", "progress", "signals", "weights"),
    },
    "given_model": {"config", "environment", "errors", "export", "progress"},
    "model_files": {"config", "errors", "given_model", "progress", "text", "weights"},
    "adapters": {"config", "errors", "model_files", "weights"},
    "generation": {"backends", "config", "errors", "signals"},
    "verification": {
        *("backends", "config", "errors", "export", "kernels", "model_files", "progress"),
        "weights",
    },
    "artifact": {
        *("backends", "config", "environment", "errors", "export", "footprint", "model_files"),
        *("progress", "report", "text", "verification", "weights"),
    },
    "offline": {
        *("artifact", "backends", "code_digest", "config", "environment", "errors", "export"),
        *("kernels", "model_files", "progress", "report", "text", "weights"),
    },
    "shares": {"backends", "config", "generation", "report"},
    "online": {
        *("backends", "config", "environment", "errors", "kernels", "memory", "model_files"),
        *("models", "progress", "weights"),
    },
    "footprint": {"backends", "config", "errors", "model_files", "online", "weights"},
    "session": {
        *("adapters", "offline", "backends", "config", "errors", "footprint", "generation"),
        *("kernels", "model_files", "online", "progress", "text", "weights"),
    },
    "printer": {"config", "generation", "progress", "report", "session", "text"},
    "run_modes": {
        *("adapters", "artifact", "backends", "config", "environment", "errors", "generation"),
        *("footprint", "gguf_metadata", "offline", "printer", "session", "shares"),
        *("model_files", "progress", "report", "signals", "text", "weights"),
    },
    "worker": {"config", "errors", "progress", "report", "run_modes"},
    "rank": {
        *("backends", "config", "distributed", "environment", "errors", "events", "memory"),
        *("progress", "registering", "report", "signals", "stopping", "worker"),
    },
    "launcher": {
        *("ascend_devices", "config", "environment", "errors", "events", "hccl", "memory"),
        *("progress", "rank_table", "signals", "stopping"),
    },
    "distributed": {
        *("ascend_devices", "backends", "environment", "errors", "hccl", "launcher"),
        "rank_table_file",
    },
    "launch": {
        *("ascend_devices", "config", "environment", "errors", "launcher", "model_files"),
        *("online", "progress", "rank_table_file", "report", "session", "worker"),
    },
    "api": {
        *(
            "adapters",
            "backends",
            "config",
            "distributed",
            "environment",
            "errors",
            "export",
            "generation",
            "given_model",
            "hccl",
        ),
        *("launch", "model_files", "models", "progress", "session", "text", "weights"),
    },
    "joined": {
        *("backends", "config", "distributed", "environment", "errors", "launch", "memory"),
        *("progress", "rank", "report", "signals", "stopping", "worker"),
    },
    "app": {
        *("config", "distributed", "errors", "joined", "launch", "memory", "progress"),
        *("registering", "signals"),
    },
    "__main__": {"app"},
    "mindformers": {"api", "app", "config", "environment", "errors", "own_python"},
}
# What a model is, all may know that stand on its description.
for _part in list(ALLOWED)[list(ALLOWED).index("config") :]:
    ALLOWED[_part].add("architectures")
GENERATION_SEES = {
    "lite_runner.backends.base",
    "lite_runner.backends.likelihood",
    "lite_runner.config.generation",
    "lite_runner.errors",
    "lite_runner.signals",
}
# MindSpore takes most of a second to import: only what computes or stores tensors may.
KNOWS_MINDSPORE = {"backends", "export", "models", "weights"}
# Rooms of other parts that do: a model that is a Cell, its Parameters, a tokenizer's tensors.
CELLS = {"lite_runner.api.network", "lite_runner.api.parameters", "lite_runner.api.tensors"}
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "marshal", "shelve", "joblib"}
UNSAFE_CALLS = {"eval", "exec", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load"}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {module_name(path) for path in MODULES}


def part_of(module: str) -> str:
    """`lite_runner.config.model` is of the part `config`."""
    return [*module.split("."), ""][1]


def imports(tree: ast.AST, package: str) -> Iterator[str]:
    """The modules that the nodes below `tree` import; `from x import y` is x.y if a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{package}: relative import in line {node.lineno}"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in NAMES else str(node.module)


def imports_at_start(path: Path) -> set[str]:
    """What importing this file imports: function bodies and type checking are left out."""

    class Outer(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
            return None

        def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
            return None

        def visit_If(self, node: ast.If) -> ast.AST | None:
            if "TYPE_CHECKING" in ast.unparse(node.test):
                return None
            return self.generic_visit(node)

    return set(imports(Outer().visit(parse(path)), module_name(path)))


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_imports_go_one_way(path: Path) -> None:
    name = module_name(path)
    part = part_of(name)
    if not part:  # lite_runner/__init__.py knows the API, and imports it only when it is used
        assert not [used for used in imports_at_start(path) if used.startswith("lite_runner")]
        return
    assert part in ALLOWED, f"lite_runner/{part} is new: say in ALLOWED what it may import"
    used = {target for target in imports(parse(path), name) if target.startswith("lite_runner.")}
    wrong = {target for target in used if part_of(target) not in ALLOWED[part] | {part}}
    assert not wrong, f"{name} must not import {sorted(wrong)}"
    if part == "generation":
        outside = {target for target in used if part_of(target) != "generation"}
        assert outside <= GENERATION_SEES, f"{name} must not import {outside - GENERATION_SEES}"
    if part == "run_modes" and name != "lite_runner.run_modes":
        others = {target for target in used if target.startswith("lite_runner.run_modes.")}
        assert not others, f"run modes never import each other: {name} imports {sorted(others)}"


# The kinds of tokenizers in GGUF files are called as two of the architectures are.
TOKENIZER_KINDS = {"lite_runner.text.gguf"}


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_what_an_architecture_is_called_matters_only_to_itself(path: Path) -> None:
    """What else depends on a model asks its description."""
    name = module_name(path)
    if part_of(name) == "architectures" or name in TOKENIZER_KINDS:
        return
    compared = (
        node for node in ast.walk(parse(path)) if isinstance(node, (ast.Compare, ast.Match))
    )
    words = {
        inner.value
        for node in compared
        for inner in ast.walk(node)
        if isinstance(inner, ast.Constant) and isinstance(inner.value, str)
    }
    assert not words & KNOWN.keys()


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_mindspore_is_imported_only_where_tensors_are(path: Path) -> None:
    name = module_name(path)
    roots = {target.split(".")[0] for target in imports(parse(path), name)}
    if part_of(name) not in KNOWS_MINDSPORE and name not in CELLS:
        assert not roots & {"mindspore", "mindspore_lite"}


@pytest.mark.parametrize("start", ["lite_runner.app", "lite_runner.config", "lite_runner.text"])
def test_importing_it_never_imports_mindspore(start: str) -> None:
    paths = {module_name(path): path for path in MODULES}
    assert start in paths
    came_from = {start: start}
    waiting = [start]
    while waiting:
        name = waiting.pop()
        for target in imports_at_start(paths[name]):
            chain = f"{came_from[name]} -> {target}"
            assert target.split(".")[0] not in {"mindspore", "mindspore_lite"}, chain
            steps = target.split(".")  # importing a.b.c runs a, a.b and a.b.c
            for parent in (".".join(steps[:end]) for end in range(1, len(steps) + 1)):
                if parent in paths and parent not in came_from:
                    came_from[parent] = chain
                    waiting.append(parent)


@pytest.mark.parametrize("path", PYTHON_FILES, ids=relative)
def test_nothing_runs_untrusted_input(path: Path) -> None:
    tree = parse(path)
    roots = {target.split(".")[0] for target in imports(tree, path.stem)}
    assert not roots & UNSAFE_MODULES
    safe_loaders = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and "yaml.SafeLoader" in map(ast.unparse, node.bases)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            where = f"{relative(path)}:{node.lineno}"
            called = ast.unparse(node.func)
            if called == "yaml.load" and ast.unparse(node.args[-1]) in safe_loaders:
                continue
            assert called not in UNSAFE_CALLS, where
            for keyword in node.keywords:
                unsafe = keyword.arg in {"shell", "allow_pickle"}
                assert not unsafe or ast.unparse(keyword.value) == "False", where


@pytest.mark.parametrize("path", PYTHON_FILES, ids=relative)
def test_files_are_of_readable_length(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").count("\n")
    limit = 15 if path.name == "run_lite.py" else 600
    assert lines <= limit, f"{lines} lines, at most {limit}: give a part of it a room of its own"


@pytest.mark.parametrize("path", sorted((ROOT / "conf").rglob("*.yaml")), ids=relative)
def test_every_yaml_is_commented(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    first = next(line for line in lines if not line.startswith("# @package"))
    assert first.startswith("# "), f"begins with {first!r}: say first what it is for"
