"""--register_path: Python files of the user's, run so that they register models of their own.

It runs code, so it is taken from the command line only: a yaml may come with a model.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from lite_runner.errors import ConfigError


def register_from(path: str) -> None:
    """Run a Python file, or every one of a folder that does not begin with _, by name.

    They call lite_runner.register. The folder is where they find one another, as with
    run_mindformer. Raises ConfigError where there is none, or one of them fails.
    """
    place = Path(path).expanduser().absolute()
    files = [place]
    if place.is_dir():
        files = sorted(file for file in place.glob("*.py") if not file.name.startswith("_"))
    if not files or not all(file.suffix == ".py" and file.is_file() for file in files):
        raise ConfigError(f"register_path: {path}: expected a folder of Python files, or one file")
    folder = str(files[0].parent)
    if folder not in sys.path:
        sys.path.append(folder)
    for file in files:
        _run(file)


def _run(file: Path) -> None:
    """Import one file as the module of its name; one that is imported already stays."""
    there = sys.modules.get(file.stem)
    if there is not None:
        if getattr(there, "__file__", None) == str(file):
            return
        raise ConfigError(
            f"register_path: {file}: another module is called {file.stem}", "rename the file"
        )
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    try:
        spec.loader.exec_module(module)
    except ConfigError as error:
        raise ConfigError(f"register_path: {file}: {error.message}", error.hint) from error
    except Exception as error:
        del sys.modules[file.stem]
        raise ConfigError(f"register_path: {file}: {type(error).__name__}: {error}") from error
