"""The Python interpreter of a worker: finding it, and running stand-alone scripts with it."""

from __future__ import annotations

import os
from pathlib import Path

from lite_runner.errors import EnvironmentFault
from lite_runner.records import dataclass
from lite_runner.system.environment import RANK_VARIABLES
from lite_runner.system.files import cache_dir
from lite_runner.system.secret import without_keys

TAIL_LINES = 8
_CHECKOUT = Path(__file__).resolve().parents[3]
_MAIN = Path(__file__).with_name("main.py")


@dataclass(frozen=True)
class WorkerPython:
    """The interpreter of a product, and how it is set up."""

    product: str  # for messages
    variable: str  # of the environment, which names an interpreter
    folder: str  # its environment in a checkout, as `target` makes it
    cached: str  # and in the cache folder
    target: str  # of make
    elsewhere: str  # command to create it without a checkout; {cached} is the folder in the cache

    @property
    def remedy(self) -> str:
        """The command that makes it in a checkout."""
        return f"make {self.target}"

    def find(self) -> Path:
        """The interpreter; not started.

        That of the variable, else that of the checkout, else that in the cache folder. Raises
        EnvironmentFault if there is none.
        """
        chosen = os.environ.get(self.variable)
        if chosen:
            path = Path(chosen).expanduser().absolute()
            if not _is_program(path):
                raise EnvironmentFault(
                    f"{self.variable}={chosen}: not an executable",
                    f"give the python of an environment with {self.product}, or unset "
                    f"{self.variable}",
                )
            return path
        cached = cache_dir() / self.cached
        places = [cached / "bin/python"]
        if (_CHECKOUT / "conf").is_dir():
            own = _CHECKOUT / self.folder
            if (own / ".unfinished").exists():  # stands while scripts/setup.sh installs
                raise EnvironmentFault(
                    f"no Python with {self.product}: {own} is not set up to the end",
                    f"wait until the set-up has ended, or: {self.remedy}",
                )
            places.insert(0, own / "bin/python")
        for place in places:
            if _is_program(place):
                return place
        raise EnvironmentFault(
            f"no Python with {self.product}: {' and '.join(map(str, places))} not found",
            f"in a checkout: {self.remedy}; elsewhere, {self.elsewhere.format(cached=cached)}; or "
            f"set {self.variable}",
        )


def isolated(python: Path, script: Path, *arguments: str) -> list[str]:
    """The command that runs `script`, isolated from PYTHONPATH etc."""
    return [str(python), "-I", "-B", str(script), *arguments]


def isolated_code(python: Path, code: str) -> list[str]:
    """The command that runs `code`, isolated in the same way."""
    return [str(python), "-I", "-B", "-c", code]


def worker_command(python: Path, script: Path) -> list[str]:
    """The command of a worker process whose requests `script` handles: see main.py."""
    return isolated(python, _MAIN, str(script))


def worker_environment() -> dict[str, str]:
    """This process's environment without keys and MindSpore's additions to LD_LIBRARY_PATH; a
    worker of a rank is none itself."""
    own = without_keys(os.environ)
    environment = {name: value for name, value in own.items() if name not in RANK_VARIABLES}
    path = environment.pop("LD_LIBRARY_PATH", "")
    kept = [folder for folder in path.split(":") if folder and "/mindspore/lib" not in folder]
    if kept:
        environment["LD_LIBRARY_PATH"] = ":".join(kept)
    return environment


def quoted_tail(text: str) -> str:
    """The last lines of a worker's log, to append to a message; empty without output."""
    lines = [f"    {line.rstrip()[:300]}" for line in text.splitlines() if line.strip()]
    return "; it wrote:\n" + "\n".join(lines[-TAIL_LINES:]) if lines else ""


def _is_program(path: Path) -> bool:
    return os.access(path, os.X_OK) and path.is_file()
