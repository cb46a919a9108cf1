"""The Python that has MindSpore Lite: where it is, and how a script is started with it.

The public mindspore-lite is made for CPython 3.7, and its libraries do not live beside those of
MindSpore in one process; so it has an interpreter of its own.
"""

from __future__ import annotations

import os
from pathlib import Path

from lite_runner.errors import EnvironmentFault
from lite_runner.weights.source import cache_dir

VARIABLE = "LITE_RUNNER_LITE_PYTHON"
TAIL_LINES = 8
_CHECKOUT = Path(__file__).resolve().parents[3]


def find_lite_python() -> Path:
    """The interpreter that has mindspore_lite; looked at, not started.

    $LITE_RUNNER_LITE_PYTHON, else .venv-lite of the checkout, else lite/ in the cache folder.
    Raises EnvironmentFault where there is none.
    """
    chosen = os.environ.get(VARIABLE)
    if chosen:
        path = Path(chosen).expanduser().absolute()
        if not _is_program(path):
            raise EnvironmentFault(
                f"{VARIABLE}={chosen}: not a program that can be run",
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
    """The command that runs `script`, a file of this folder, undisturbed by PYTHONPATH and such."""
    return [str(python), "-I", "-B", str(Path(__file__).with_name(script)), *arguments]


def lite_environment() -> dict[str, str]:
    """This process's environment without the library path that importing MindSpore puts there."""
    environment = dict(os.environ)
    path = environment.pop("LD_LIBRARY_PATH", "")
    kept = [folder for folder in path.split(":") if folder and "/mindspore/lib" not in folder]
    if kept:
        environment["LD_LIBRARY_PATH"] = ":".join(kept)
    return environment


def quoted_tail(text: str) -> str:
    """What goes behind a message: the last lines a Lite process wrote; nothing if it was silent."""
    lines = [f"    {line.rstrip()[:300]}" for line in text.splitlines() if line.strip()]
    return "; it wrote:\n" + "\n".join(lines[-TAIL_LINES:]) if lines else ""


def _is_program(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)
