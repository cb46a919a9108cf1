"""Advice in errors and pages: keys, flags, make targets, files, extras of pip to type.

Of the package the advice is read from its source: the hint of every error, with the constants and
the functions of the module that it is made of.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from lite_runner.config.argv import FLAG_KEYS, FLAGS
from tests.frozen_keys import known_keys
from tests.paths import ROOT

# key=value, whose key may be dotted; not in the middle of a word, a path, a URL, a list or behind +
SETTING = re.compile(
    r"(?<![\w.\-\[{/?&%#+])([a-z_]\w*(?:\.\w+)*)=(?![=>])(\[[^\]]*\]|'[^']*'|[^\s,;:)'`]*)"
)
FLAG = re.compile(r"(?<![\w-])--([a-z][\w-]+)")
TARGET = re.compile(r"\bmake ([a-z][a-z0-9.-]*)")
FILE = re.compile(r"(?<![\w./])((?:scripts|docs|examples|tests|conf)/[\w./-]*\w)")
EXTRA = re.compile(r"([\w-]*lite-runner)\[(\w+)\]")
_ENGLISH = {
    "a",
    "anew",
    "it",
    "no",
    "one",
    "random",
    "room",
    "sense",
    "them",
}  # what one makes besides


@cache
def known() -> frozenset[str]:
    """Every dotted key of any run mode, every section and group."""
    known = known_keys()
    sections = {key[:i] for key in known for i, letter in enumerate(key) if letter == "."}
    return frozenset(known | sections)


@cache
def last_names() -> frozenset[str]:
    """The last name of every key, by which a sentence may call it."""
    return frozenset(key.rpartition(".")[2] for key in known())


@cache
def targets() -> frozenset[str]:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return frozenset(re.findall(r"^([a-z0-9.-]+):", makefile, re.MULTILINE))


@cache
def extras() -> frozenset[str]:
    """The package's extras: the names in brackets after it, as `name[extra]`."""
    text = (ROOT / "setup.cfg").read_text(encoding="utf-8")
    (name,) = re.findall(r"^name = (.*)$", text, re.MULTILINE)
    _, _, found = text.partition("[options.extras_require]\n")
    names = re.findall(r"^(\w+) =$", found.partition("\n[")[0], re.MULTILINE)
    return frozenset(f"{name}[{extra}]" for extra in names)


@cache
def flags() -> frozenset[str]:
    """The flags of run_lite.py and of all scripts, without dashes."""
    own = {"help", "version", "cfg", "info", "config-dir", "config-name", "config-path"}
    own |= {"multirun", "shell-completion"}
    scripts = [*(ROOT / "scripts").glob("*"), ROOT / "lite_runner/mindformers/__main__.py"]
    texts = (path.read_text(encoding="utf-8") for path in scripts if path.is_file())
    typed = {flag for text in texts for flag in re.findall(r"\"--([\w-]+)\"", text)}
    return frozenset(own | typed | {*FLAGS, *FLAG_KEYS})


def missing(text: str) -> list[str]:
    """The make targets, files and extras of a text that are not there."""
    wrong = [f"make {one}" for one in TARGET.findall(text) if one not in targets() | _ENGLISH]
    wrong += [one for one in FILE.findall(text) if not (ROOT / one).exists() and "GROUP" not in one]
    found = {f"{name}[{extra}]" for name, extra in EXTRA.findall(text)}
    return [*wrong, *sorted(found - extras())]


# -- The source of the package. -------------------------------------------------------------------


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def texts(node: ast.AST) -> Iterator[str]:
    """Every text in an expression; what an f-string fills in is {}."""
    inner = set()
    for one in ast.walk(node):
        if isinstance(one, ast.JoinedStr):
            inner |= {id(part) for part in one.values}
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else "{}" for part in one.values
            )
        elif isinstance(one, ast.Constant) and isinstance(one.value, str) and id(one) not in inner:
            yield one.value


def texts_of(path: Path) -> list[str]:
    """Every text of a module but its docstrings."""
    tree = tree_of(path)
    docstrings = {
        text
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        and (text := ast.get_docstring(node, clean=False)) is not None
    }
    return [text for text in texts(tree) if text not in docstrings]


def hints(path: Path) -> list[str]:
    """The texts that the hints of a module's errors are made of."""
    tree = tree_of(path)
    constants = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    parts: list[ast.AST] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _called(node).endswith(("Error", "EnvironmentFault")):
            parts += node.args[1:] + [one.value for one in node.keywords if one.arg == "hint"]
        elif isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Attribute) and target.attr == "hint" for target in node.targets
        ):
            parts.append(node.value)
    seen: set[str] = set()
    found: list[str] = []
    while parts:
        part = parts.pop()
        found += texts(part)
        for node in ast.walk(part):
            name = node.id if isinstance(node, ast.Name) else _called(node)
            if name not in seen and (name in constants or name in functions):
                seen.add(name)
                parts += [constants[name]] if name in constants else _returned(functions[name])
    return found


def _called(node: ast.AST) -> str:
    """The name of the function or class that a call is of, else ''."""
    if not isinstance(node, ast.Call):
        return ""
    function = node.func
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")


def _returned(function: ast.FunctionDef) -> list[ast.AST]:
    return [
        node.value for node in ast.walk(function) if isinstance(node, ast.Return) and node.value
    ]
