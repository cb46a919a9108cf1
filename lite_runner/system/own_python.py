"""Re-executes in the checkout's .venv if this Python cannot run lite-runner.

Imported first, by any Python 3: this file, run_lite.py and lite_runner/__init__.py may not use
syntax newer than Python 3.6.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import List

OLDEST = (3, 10)
# Requirements of setup.cfg, as modules, without MindSpore, which a run may lack, and protobuf,
# part of gguf: finding its module would import its parent.
MODULES = (
    *("certifi", "filelock", "gguf", "hydra", "jinja2", "numpy"),
    *("omegaconf", "psutil", "safetensors", "sentencepiece", "tokenizers", "yaml"),
)
_ROOT = Path(__file__).resolve().parents[2]
_MARK = "LITE_RUNNER_OWN_PYTHON"  # given to the process that continues: it goes no further


def continue_in_own_python() -> None:
    """Re-execute this program in .venv if this Python cannot run it.

    Without a .venv, a Python that is too old exits with code 3.
    """
    came_from_here = os.environ.pop(_MARK, None) is not None
    reason = _unsupported()
    if came_from_here or not reason:
        return
    venv = _ROOT / ".venv"
    python = venv / "bin" / "python"
    if os.access(str(python), os.X_OK) and not (venv / ".unfinished").exists():
        if "verbosity=2" in sys.argv:
            print(f"note: {reason}; continuing in {venv}", file=sys.stderr, flush=True)
        os.environ[_MARK] = "1"
        os.execv(str(python), [str(python), *_program(), *sys.argv[1:]])
    if sys.version_info < OLDEST:
        hint = f"make run (in {_ROOT}) sets up .venv with Python 3.11"
        print(f"error: {reason}, expected 3.10 to 3.13\n  -> {hint}", file=sys.stderr)
        sys.exit(3)


def _unsupported() -> str:
    """The reason that this Python cannot run lite-runner; "" if it can."""
    if sys.version_info < OLDEST:
        return "{} is Python {}.{}".format(sys.executable, *sys.version_info[:2])
    absent = (name for name in MODULES if find_spec(name) is None)
    name = next(absent, None)
    return f"{sys.executable} has no {name}" if name else ""


def _program() -> List[str]:
    """The command line between the interpreter and the arguments."""
    spec = sys.modules["__main__"].__spec__
    return [sys.argv[0]] if spec is None else ["-m", spec.name]
