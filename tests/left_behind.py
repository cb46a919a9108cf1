"""Check that the tests leave the checkout as it was."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from tests.paths import ROOT

# What people edit while tests run; a test that writes such files writes others beside them.
EDITED = frozenset({".py", ".sh", ".md", ".cc", ".h", ".inl", ".yaml", ".toml", ".cfg"})
# What makes tools faster, or is set up for them.
CACHES = {".git", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis"}
ENVIRONMENTS = (".venv", ".python")  # how their names begin

# path -> time of the last change in ns, size, SHA-256 or ""; a link's target; "" for a folder
State = dict[str, tuple[int, int, str] | str]
BEFORE: pytest.StashKey[State] = pytest.StashKey()
DOWNLOADS: pytest.StashKey[State] = pytest.StashKey()  # of the user's cache
CHANGED: pytest.StashKey[list[str]] = pytest.StashKey()


def checkout() -> State:
    """The checkout, which tests must not change."""
    return files(ROOT, EDITED)


def files(root: Path, but: frozenset[str] = frozenset(), *, contents: bool = False) -> State:
    """All files, links and folders below `root` but those of tools, and files that end in `but`;
    with `contents` their SHA-256 too."""
    found: State = {}
    for folder, folders, names in os.walk(root):
        folders[:] = [
            name for name in folders if name not in CACHES and not name.startswith(ENVIRONMENTS)
        ]
        for path in (Path(folder, name) for name in [*folders, *names]):
            name = str(path.relative_to(root))
            if path.is_symlink():
                found[name] = str(path.readlink())
            elif path.is_file() and path.suffix not in but:
                about = path.stat()
                digest = hashlib.sha256(path.read_bytes()).hexdigest() if contents else ""
                found[name] = (about.st_mtime_ns, about.st_size, digest)
            elif path.is_dir():
                found[name] = ""
    return found


def changes(before: State, after: State) -> list[str]:
    """One line for each path that is new, changed or gone."""
    return [
        f"{'new' if path not in before else 'gone' if path not in after else 'changed'}: {path}"
        for path in sorted(before.keys() | after.keys())
        if before.get(path) != after.get(path)
    ]
