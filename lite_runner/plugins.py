"""Plugins: Python files and installed packages that register architectures of the user's own.

They are code, so a file is named on the command line (plugins=, or --register_path as MindFormers
calls it) and a package has an entry point; no yaml can name one, since it may come with a model.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from lite_runner.errors import ConfigError, EnvironmentFault
from lite_runner.system.environment import PLUGINS
from lite_runner.system.files import user_path

_registered: list[str] = []


def register_plugins(paths: Sequence[str] = ()) -> None:
    """Import what is installed as a plugin, then the Python files of `paths`, which call
    lite_runner.register. Raises EnvironmentFault, ConfigError where one fails."""
    _register_installed()
    for path in paths:
        register_from(path)


def _register_installed() -> None:
    from importlib.metadata import entry_points

    for point in entry_points(group=PLUGINS):
        try:
            point.load()
        except Exception as error:
            package = "a package" if point.dist is None else point.dist.name
            raise EnvironmentFault(
                f"the plugin {point.name} of {package} fails: {type(error).__name__}: {error}",
                "upgrade it, or uninstall it",
            ) from error


def register_from(path: str) -> None:
    """Run a Python file, or all those of a folder in order of name, except names that begin with _.

    The folder is where they find one another, as with run_mindformer. Raises ConfigError where
    there is none, or one of them fails.
    """
    if not path:  # it would be the current folder, whatever is there
        raise ConfigError("plugins: got an empty name, expected a folder of Python files, or one")
    place = user_path(path, "plugins").absolute()
    files = [place]
    if place.is_dir():
        files = sorted(file for file in place.glob("*.py") if not file.name.startswith("_"))
    if not files or not all(file.suffix == ".py" and file.is_file() for file in files):
        raise ConfigError(f"plugins: {path}: expected a folder of Python files, or one file")
    folder = str(files[0].parent)
    if folder not in sys.path:
        sys.path.append(folder)
    for file in files:
        _run(file)
    _registered.append(str(place))


def registered() -> list[str]:
    """The files given to `register_from`, by absolute path: for processes that this one starts."""
    return list(dict.fromkeys(_registered))


def _run(file: Path) -> None:
    """Import one file as the module of its name; one that is imported already stays."""
    there = sys.modules.get(file.stem)
    if there is not None:
        if getattr(there, "__file__", None) == str(file):
            return
        raise ConfigError(
            f"plugins: {file}: another module is called {file.stem}", "rename the file"
        )
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    try:
        spec.loader.exec_module(module)
    except ConfigError as error:
        raise ConfigError(f"plugins: {file}: {error.message}", error.hint) from error
    except Exception as error:
        del sys.modules[file.stem]
        raise ConfigError(f"plugins: {file}: {type(error).__name__}: {error}") from error
