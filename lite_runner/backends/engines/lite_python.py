"""The Python interpreter with MindSpore Lite: finding it, and running scripts with it.

The public mindspore-lite is built for CPython 3.7, and its libraries conflict with MindSpore's in
one process: so it has its own interpreter.
"""

from __future__ import annotations

import os
from pathlib import Path

from lite_runner.config.secret import without_keys
from lite_runner.errors import EnvironmentFault
from lite_runner.weights.source import cache_dir

VARIABLE = "LITE_RUNNER_LITE_PYTHON"
TAIL_LINES = 8
_CHECKOUT = Path(__file__).resolve().parents[3]


def find_lite_python() -> Path:
    """The interpreter with mindspore_lite; not started.

    $LITE_RUNNER_LITE_PYTHON, else .venv-lite of the checkout, else lite/ in the cache folder.
    Raises EnvironmentFault if there is none.
    """
    chosen = os.environ.get(VARIABLE)
    if chosen:
        path = Path(chosen).expanduser().absolute()
        if not _is_program(path):
            raise EnvironmentFault(
                f"{VARIABLE}={chosen}: not an executable",
                f"give the python of an environment with mindspore-lite, or unset {VARIABLE}",
            )
        return path
    cached = cache_dir() / "lite"
    places = [cached / "bin/python"]
    if (_CHECKOUT / "conf").is_dir():
        places.insert(0, _CHECKOUT / ".venv-lite/bin/python")
    for place in places:
        if _is_program(place):
            return place
    raise EnvironmentFault(
        f"no Python with MindSpore Lite: {' and '.join(map(str, places))} not found",
        "in a checkout: make lite; elsewhere, with a Python 3.7: python3.7 -m venv "
        f"{cached} && {cached}/bin/pip install mindspore-lite==2.0.0; or set {VARIABLE}",
    )


def lite_command(python: Path, script: str, *arguments: str) -> list[str]:
    """The command that runs `script`, a file of this folder, isolated from PYTHONPATH etc."""
    return [str(python), "-I", "-B", str(Path(__file__).with_name(script)), *arguments]


def lite_environment() -> dict[str, str]:
    """This process's environment without keys and MindSpore's additions to LD_LIBRARY_PATH."""
    environment = without_keys(os.environ)
    path = environment.pop("LD_LIBRARY_PATH", "")
    kept = [folder for folder in path.split(":") if folder and "/mindspore/lib" not in folder]
    if kept:
        environment["LD_LIBRARY_PATH"] = ":".join(kept)
    return environment


def quoted_tail(text: str) -> str:
    """The last lines of a Lite process's log, to append to a message; empty without output."""
    lines = [f"    {line.rstrip()[:300]}" for line in text.splitlines() if line.strip()]
    return "; it wrote:\n" + "\n".join(lines[-TAIL_LINES:]) if lines else ""


def _is_program(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)
