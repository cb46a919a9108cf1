"""Run what statements.yaml has to type, in one process: `python run_statements.py JOBS.json`.

JOBS.json lists [number, words or code]. Beside it, JOBS.out.json gets of each number the exit code
and what was printed.
"""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import shlex
import sys
import traceback
from pathlib import Path

import lite_runner.mindformers
from lite_runner import app
from lite_runner.backends.lite.export import writer
from lite_runner.errors import RunnerError
from lite_runner.mindformers import tree
from lite_runner.mindformers.__main__ import RUN_MINDFORMER, find
from tests.paths import ROOT


def do(words: list[str]) -> int:
    """The exit code of `python *words` in a checkout."""
    script, *arguments = words
    if script == "files.py":  # that what was run before has written them
        return 0 if all(Path(name).is_file() for name in arguments) else 1
    if script in RUN_MINDFORMER | {"run_lite.py"}:
        path = ROOT / ("run_lite.py" if script == "run_lite.py" else "run_mindformer.py")
    else:
        found = []
        if code := app.guarded(lambda: found.append(find(script)) or 0):
            return code
        path = found[0]
    sys.argv = [script, *arguments]
    runpy.run_path(str(path), run_name="__main__")
    return 0


def ran(typed: str, code: str) -> tuple[int, str]:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            if code:
                Path("snippet.py").write_text(code, encoding="utf-8")
                runpy.run_path("snippet.py", run_name="__main__")
                return 0, output.getvalue()
            return do(shlex.split(typed)), output.getvalue()
        except SystemExit as ended:
            return int(ended.code or 0), output.getvalue()
        except RunnerError as error:
            return error.exit_code, f"{output.getvalue()}{error}"
        except Exception:
            return 1, output.getvalue() + traceback.format_exc()


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    tree.alias_mindformers(lite_runner.mindformers)
    writer.verify = lambda *_, **__: None  # that compiles what is exported once more
    jobs = Path(sys.argv[1])
    done = {number: ran(*one) for number, one in json.loads(jobs.read_text()).items()}
    jobs.with_suffix(".out.json").write_text(json.dumps(done))
