"""The shape of the source: imports, lengths of files, and unused code.

No cap on imports or parameters: such caps were met by cutting modules into slices."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from lite_runner.architectures import KNOWN, ModelSettings, networks
from tests.paths import ROOT

PACKAGE = ROOT / "lite_runner"
MODULES = sorted(PACKAGE.rglob("*.py"))
PYTHON_FILES = [
    ROOT / "run_lite.py",
    ROOT / "run_mindformer.py",
    ROOT / "setup.py",
    *MODULES,
    *(
        path
        for name in ("benchmarks", "examples", "fuzz", "scripts", "tests")
        for path in (ROOT / name).rglob("*.py")
    ),
]

# What the parts of lite_runner may import of one another. Imports go one way, from the bottom of
# this table to its top; generation and run_modes have rules of their own besides.
# records, which is like a part of the language, everything may import.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "records": set(),
    "progress": {"errors"},
    "profile": set(),
    "profiler": {"progress", "recorder"},
    "recorder": {"profile"},
    "system": {"errors"},
    "plugins": {"errors", "system"},
    "architectures": {"errors"},
    "config": {"architectures", "errors", "progress", "system"},
    "weights": {"architectures", "config", "errors", "progress", "system"},
    "text": {"errors", "system", "weights"},
    "native": {*("architectures", "config", "errors", "profiler", "recorder", "system", "weights")},
    "networks": {"architectures", "config", "weights"},
    "mindir": {"architectures", "config", "errors", "networks", "system", "weights"},
    "sizing": {"architectures", "config", "errors", "system"},
    "model": {
        *("architectures", "config", "errors", "mindir", "progress", "sizing", "system", "text"),
        "weights",
    },
    "backends": {
        *("architectures", "config", "errors", "mindir", "model", "native", "networks"),
        *("profiler", "progress", "sizing", "system", "text", "weights"),
    },
    "distributed": {"backends", "config", "errors", "profiler", "progress", "system"},
    "generation": {"backends", "config", "errors", "profiler", "system"},
    "structured": {"errors", "generation", "system", "text"},
    "plan": {
        *("architectures", "backends", "config", "errors", "generation", "mindir"),
        *("model", "native", "plugins", "profiler", "progress", "sizing", "structured", "system"),
        *("text", "weights"),
    },
    "output": {
        *("architectures", "backends", "config", "errors", "generation", "model", "plan"),
        *("native", "plugins", "profiler", "progress", "sizing", "system", "text", "weights"),
    },
    "training": {
        *("architectures", "config", "errors", "native", "sizing", "system", "text", "weights")
    },
    "evaluation": {
        *("backends", "config", "errors", "generation", "output", "progress", "system", "text")
    },
    "serving": {
        *("backends", "config", "errors", "generation", "model", "plan", "plugins", "profile"),
        *("profiler", "progress", "structured", "system", "text"),
    },
    "chat": {*("backends", "config", "errors", "generation", "plan", "progress", "system", "text")},
    "bench": {
        *("architectures", "backends", "config", "errors", "evaluation", "generation", "model"),
        *("native", "output", "plan", "plugins", "profile", "profiler", "progress", "system"),
        "weights",
    },
    "doctor": {
        *("backends", "config", "distributed", "errors", "generation", "model", "native"),
        *("output", "plan", "progress", "sizing", "system", "weights"),
    },
    "run_modes": {
        *(
            "architectures",
            "backends",
            "bench",
            "chat",
            "config",
            "distributed",
            "doctor",
            "errors",
            "evaluation",
            "generation",
            "model",
        ),
        *("output", "plan", "plugins", "progress", "serving", "sizing", "system", "text"),
        *("training", "weights"),
    },
    "launch": {
        *("backends", "bench", "config", "distributed", "native", "output", "plan", "profile"),
        *("profiler", "progress", "recorder", "run_modes", "sizing", "system", "weights"),
    },
    "joined": {
        *("backends", "config", "distributed", "launch", "output", "plan", "profiler"),
        *("progress", "run_modes", "system"),
    },
    "api": {
        "run_modes",
        *("architectures", "backends", "config", "distributed", "errors", "evaluation"),
        *(
            "generation",
            "launch",
            "mindir",
            "model",
            "networks",
            "output",
            "plan",
            "progress",
            "system",
            "text",
            "weights",
        ),
    },
    "verify": {"config", "errors", "output", "progress", "system"},
    "sweep": {"bench", "config", "errors", "output", "run_modes", "system"},
    "app": {
        "run_modes",
        "output",
        "sweep",
        "verify",
        "config",
        "distributed",
        "errors",
        "joined",
        "launch",
        "plugins",
        "progress",
        "system",
    },
    "__main__": {"app", "backends", "distributed"},
    "mindformers": {"api", "app", "config", "errors", "system"},
}
GENERATION_SEES = {
    "lite_runner.backends.adapter_slots",
    "lite_runner.backends",
    "lite_runner.backends.block_pool",
    "lite_runner.config.generation",
    "lite_runner.errors",
    "lite_runner.profiler",
    "lite_runner.system.signals",
}
# MindSpore takes most of a second to import: only what computes or stores tensors may.
KNOWS_MINDSPORE = {"backends", "mindir", "networks", "weights"}
# Rooms of other parts that do: a model that is a Cell, its Parameters, a tokenizer's tensors.
CELLS = {"lite_runner.api.network", "lite_runner.api.loaded_model", "lite_runner.api.tokenizer"}
# tests/NAME holds the tests of these folders, and every other one those of lite_runner/NAME.
TESTED = {
    "benchmarks": ROOT / "benchmarks",
    "fuzz": ROOT / "fuzz",
    "scripts": ROOT / "scripts",
    "native": PACKAGE / "native/src",
}
# The tests of no single module: from the command line or across parts, and what others made.
END_TO_END = {
    ".": "architecture bad_input damaged_files deploy docs examples first_hour"
    " frozen_runs hints interrupted_writers left_behind package packaging read_only_cache"
    " real_mindformers real_mindformers_glm smollm2 stations",
    "api": "adapters memory",
    "architectures": "published_code",
    "ascend": "lite operators rank_environment rank_tables soc strategies",
    "backends": "growing parallel",
    "backends/lite": "static_pair",
    "backends/native": "prefix_lm ranks",
    "backends/mindformers": "export ranks real_group",
    "config": "defaults frozen_keys mindformers_keys mindformers_model mindformers_packages"
    " overlay rerun",
    "distributed": "end_to_end exported_ranks interrupt",
    "generation": "real_model",
    "mindformers": "documents statements",
    "mindir": "mindformers_graphs",
    "output": "real_mindformers",
    "plan": "backend",
    "native": "arm library sanitizers",
    "run_modes": "adapters blocks chatglm logprobs pretrained_folder strategy_files structured",
    "scripts": "rank_tables",
    "serving": "clients front_ends page schema soak",
    "system": "peaks",
    "weights": "combine_ckpt gguf_models",
}
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "marshal", "shelve", "joblib"}
UNSAFE_CALLS = {"eval", "exec", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load"}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {module_name(path) for path in MODULES}


def part_of(module: str) -> str:
    """`lite_runner.config` is of the part `config`."""
    return [*module.split("."), ""][1]


def imports(nodes: Iterable[ast.AST], package: str) -> Iterator[str]:
    """The modules that these nodes import; `from x import y` is x.y if a module."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{package}: relative import in line {node.lineno}"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in NAMES else str(node.module)


@cache
def tree_of(path: Path) -> ast.Module:
    """The tree of a file, to be read only."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file, an outer one before those inside it."""
    return tuple(ast.walk(tree_of(path)))


def nodes_without(node: ast.AST, *kinds: type[ast.AST]) -> Iterator[ast.AST]:
    """The nodes inside this one that are in none of `kinds`, nor in an `if` of type checking."""
    for child in ast.iter_child_nodes(node):
        checked = ast.walk(child.test) if isinstance(child, ast.If) else ()
        if isinstance(child, kinds) or any(
            isinstance(name, ast.Name) and name.id == "TYPE_CHECKING" for name in checked
        ):
            continue
        yield child
        yield from nodes_without(child, *kinds)


@cache
def imports_at_start(path: Path) -> set[str]:
    """The modules that a file imports at start: function bodies and type checking are left out."""
    nodes = nodes_without(tree_of(path), ast.FunctionDef, ast.AsyncFunctionDef, ast.expr)
    return set(imports(nodes, module_name(path)))


@cache
def imported_modules(path: Path) -> set[str]:
    """The other modules of lite_runner that this one imports, in functions too; imports for type
    checking do not count."""
    name = module_name(path)
    used = set(imports(nodes_without(tree_of(path), ast.expr), name))
    used -= {name, f"{PACKAGE.name}.records"}
    return {target for target in used if target.split(".")[0] == PACKAGE.name}


def over(paths: Sequence[Path]) -> Callable[[Callable[[Path], None]], Callable[[], None]]:
    """One test of all `paths`, which names every one that fails."""

    def decorate(check: Callable[[Path], None]) -> Callable[[], None]:
        def test() -> None:
            faults = []
            for path in paths:
                try:
                    check(path)
                except AssertionError as error:
                    faults.append(f"{relative(path)}: {error}")
            assert not faults, "\n".join(faults)

        test.__doc__ = check.__doc__
        return test

    return decorate


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@over(MODULES)
def test_the_standard_dataclass_is_for_slots(path: Path) -> None:
    """Its classes take 20 times as long to make, and every start makes two hundred."""
    text = path.read_text(encoding="utf-8")
    if module_name(path) != "lite_runner.records" and "slots=True" not in text:
        assert not re.search(r"^from dataclasses import .*\bdataclass\b", text, re.MULTILINE), (
            "from lite_runner.records import dataclass"
        )


@over(MODULES)
def test_imports_go_one_way(path: Path) -> None:
    name = module_name(path)
    part = part_of(name)
    if not part:  # lite_runner/__init__.py knows the API, and imports it only when it is used
        assert not [used for used in imports_at_start(path) if used.startswith("lite_runner")]
        return
    assert part in ALLOWED, f"lite_runner/{part} is new: say in ALLOWED what it may import"
    used = {target for target in imports(nodes_of(path), name) if target.startswith("lite_runner.")}
    wrong = {target for target in used if part_of(target) not in ALLOWED[part] | {part, "records"}}
    assert not wrong, f"{name} must not import {sorted(wrong)}"
    if part == "generation":
        outside = {target for target in used if part_of(target) not in {"generation", "records"}}
        assert outside <= GENERATION_SEES, f"{name} must not import {outside - GENERATION_SEES}"
    if part == "run_modes" and name != "lite_runner.run_modes":
        others = {target for target in used if target.startswith("lite_runner.run_modes.")}
        others -= {"lite_runner.run_modes._plan"}  # no run mode: a part of four
        if name == "lite_runner.run_modes.slora":  # predict with adapters
            others -= {"lite_runner.run_modes.predict"}
        assert not others, f"run modes never import each other: {name} imports {sorted(others)}"


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """The groups of nodes that each lead to one another: strongly connected components of more
    than one node (Tarjan)."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}  # index that a node leads back to, of those still on the path
    path: list[str] = []
    found: list[set[str]] = []

    def visit(node: str) -> None:
        index[node] = lowest[node] = len(index)
        path.append(node)
        for target in sorted(graph[node]):
            if target not in index:
                visit(target)
                lowest[node] = min(lowest[node], lowest[target])
            elif target in path:
                lowest[node] = min(lowest[node], index[target])
        if lowest[node] == index[node]:
            start = path.index(node)
            group = path[start:]
            del path[start:]
            if len(group) > 1:
                found.append(set(group))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def test_circles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"d"}, "f": {"a", "f"}}
    assert sorted(map(sorted, circles(graph))) == [["a", "b", "c"], ["d", "e"]]


def test_no_modules_import_each_other() -> None:
    """Not through others, nor inside functions either."""
    graph = {module_name(path): imported_modules(path) & NAMES for path in MODULES}
    assert not circles(graph), "move what both need to a module of its own"


# They read with json.loads what a process of ours, or a library, has just written.
OWN_JSON = {
    *("api.loaded_model", "api.context", "backends.workers.main", "backends.workers.process"),
    *("backends.lite.export.writer", "distributed.events", "system.own_process"),
    *(
        "output.completions",
        "output.comparison",
        "backends.mindformers.run",
        "joined",
        "profile",
        "system.files",
    ),
    "text.spelling",
    *("text.chat_templates", "text.template_worker", "text.tokenizer_cost"),
}


def test_files_of_json_have_one_reader() -> None:
    """system/files.py turns all that a file can hold into a value or one error."""
    reads = {
        module_name(path).removeprefix("lite_runner.")
        for path in MODULES
        if re.search(r"\bjson\.loads?\(", path.read_text(encoding="utf-8"))
    }
    assert reads == OWN_JSON, "use parse_json or read_json"


# The kinds of tokenizers in GGUF files are called as two of the architectures are.
TOKENIZER_KINDS = {"lite_runner.text.gguf"}


@over(MODULES)
def test_architecture_names_occur_only_in_their_own_file(path: Path) -> None:
    """Other code that depends on a model asks its description."""
    name = module_name(path)
    if part_of(name) == "architectures" or name in TOKENIZER_KINDS:
        return
    compared = (node for node in nodes_of(path) if isinstance(node, (ast.Compare, ast.Match)))
    words = {
        inner.value
        for node in compared
        for inner in ast.walk(node)
        if isinstance(inner, ast.Constant) and isinstance(inner.value, str)
    }
    assert not words & KNOWN.keys()


@over([path for path in MODULES if part_of(module_name(path)) == "config"])
def test_config_names_no_family(path: Path) -> None:
    """Not by a network nor by a config class of MindFormers."""
    kinds = (get_type_hints(one)["type"] for one in get_args(ModelSettings)[1])
    classes = {*networks(), *(name for kind in kinds for name in get_args(kind))} - {"auto"}
    words = set(re.findall(r"\w+", path.read_text(encoding="utf-8")))
    assert not words & classes, f"{sorted(words & classes)}: of lite_runner/architectures"


@over(MODULES)
def test_mindspore_is_imported_only_where_tensors_are(path: Path) -> None:
    name = module_name(path)
    roots = {target.split(".")[0] for target in imports(nodes_of(path), name)}
    if part_of(name) not in KNOWS_MINDSPORE and name not in CELLS:
        assert not roots & {"mindspore", "mindspore_lite"}


@pytest.mark.parametrize(
    "start",
    [
        "lite_runner.app",
        "lite_runner.config",
        "lite_runner.doctor.machine",
        "lite_runner.run_modes.doctor",
        "lite_runner.text",
    ],
)
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


@cache
def names_of(module: str) -> set[str]:
    """Names that a module of the package binds in any scope, and its submodules."""
    folder = PACKAGE.parent / module.replace(".", "/")
    package = (folder / "__init__.py").exists()
    found = {one.stem for one in folder.iterdir()} if package else set()
    for node in nodes_of(folder / "__init__.py" if package else folder.with_suffix(".py")):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).split(".")[0])
    return found


@over(sorted(set(PYTHON_FILES) - set(MODULES)))
def test_names_imported_from_the_package_exist(path: Path) -> None:
    """Of programs and tests, whose types are not checked."""
    missing = [
        f"{node.module}.{one.name}"
        for node in nodes_of(path)
        if isinstance(node, ast.ImportFrom) and re.match(r"lite_runner\b", node.module or "")
        for one in node.names
        if part_of(str(node.module))
        != "mindformers"  # whose names are made when they are asked for
        and one.name not in names_of(str(node.module))
    ]
    assert not missing


def test_names_imported_in_shell_exist() -> None:
    text = "".join(f.read_text() for f in (ROOT / "Makefile", *ROOT.glob("scripts/*.sh")))
    found = re.findall(r"from (lite_runner[\w.]*) import (\w+)", text)
    assert found and all(name in names_of(module) for module, name in found)


@over(PYTHON_FILES)
def test_nothing_runs_untrusted_input(path: Path) -> None:
    roots = {target.split(".")[0] for target in imports(nodes_of(path), path.stem)}
    assert not roots & UNSAFE_MODULES
    safe_loaders = {
        name.asname or name.name
        for node in nodes_of(path)
        if isinstance(node, ast.ImportFrom) and node.module == "yaml"
        for name in node.names
        if name.name in ("SafeLoader", "CSafeLoader")
    }
    for node in nodes_of(path):  # a class before those that build on it
        if isinstance(node, ast.ClassDef) and safe_loaders.intersection(map(dotted, node.bases)):
            safe_loaders.add(node.name)
    for node in nodes_of(path):
        if isinstance(node, ast.Call):
            where = f"{relative(path)}:{node.lineno}"
            called = dotted(node.func)
            if called == "yaml.load" and dotted(node.args[-1]) in safe_loaders:
                continue
            assert called not in UNSAFE_CALLS, where
            for keyword in node.keywords:
                unsafe = keyword.arg in {"shell", "allow_pickle"}
                assert not unsafe or ast.unparse(keyword.value) == "False", where


def dotted(node: ast.AST) -> str:
    """`a.b.c`; "" for other expressions."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


# A program that runs before the package can be imported.
SMALL_ROOMS = {"system.own_python"}


def test_no_module_is_a_slice_of_its_only_importer() -> None:
    importers: dict[str, set[str]] = {}
    for path in MODULES:
        for name in imported_modules(path) & NAMES:
            importers.setdefault(name, set()).add(module_name(path))
    small = {
        name.removeprefix("lite_runner.")
        for path in MODULES
        if path.name not in ("__init__.py", "__main__.py")
        and len(path.read_text("utf-8").splitlines()) < 60
        and len(importers.get(name := module_name(path), ())) == 1
    }
    assert small <= SMALL_ROOMS, f"merge into their importers: {sorted(small - SMALL_ROOMS)}"


# A part of a model's description is also the cell, or the struct of the C++ kernels, that computes
# it; the API has MindFormers' names; each run mode has its Config.
NAMED_TWICE = {
    *("Attention", "Norm", "LoraPair", "Config", "GenerationConfig", "Trainer"),
    *("Message", "Request"),
}


def test_a_class_name_has_one_meaning() -> None:
    places: dict[str, list[str]] = {}
    for path in MODULES:
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(module_name(path))
    twice = {name: where for name, where in places.items() if len(where) > 1}
    assert set(twice) <= NAMED_TWICE, {name: twice[name] for name in set(twice) - NAMED_TWICE}


@over(PYTHON_FILES)
def test_files_are_of_readable_length(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").count("\n")
    limit = 40 if path.parent == ROOT and path.name.startswith("run_") else 600
    assert lines <= limit, f"{lines} lines, at most {limit}: give a part of it a room of its own"


@over(sorted((ROOT / "conf").rglob("*.yaml")))
def test_every_yaml_is_commented(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    first = next(line for line in lines if not line.startswith("# @package"))
    assert first.startswith("# "), f"begins with {first!r}: say first what it is for"


def test_tests_mirror_the_package() -> None:
    """tests/PATH/test_X.py is of lite_runner/PATH/X, or one of END_TO_END."""
    alone = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        folder, name = path.parent.relative_to(ROOT / "tests"), path.stem.removeprefix("test_")
        places = [PACKAGE / folder, TESTED.get(str(folder), PACKAGE / folder)]
        if not any(one.stem.strip("_") == name for place in places for one in place.glob("*")):
            alone.append(f"{folder}/{name}")
    listed = [f"{folder}/{name}" for folder, names in END_TO_END.items() for name in names.split()]
    assert set(alone) == set(listed), set(alone) ^ set(listed)
