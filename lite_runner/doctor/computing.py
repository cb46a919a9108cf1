"""What computes: MindSpore, our own operators and their compiler, MindSpore Lite."""

from __future__ import annotations

import platform

from lite_runner import native
from lite_runner.backends.engines import lite
from lite_runner.backends.engines.lite_python import find_lite_python
from lite_runner.backends.workers.python import isolated_code, worker_environment
from lite_runner.doctor import child
from lite_runner.doctor.check import Finding
from lite_runner.errors import EnvironmentFault
from lite_runner.native.compiler import compiler
from lite_runner.system import packages

IMPORT_S = 120.0  # seconds that importing MindSpore, or Lite, may take; from a cold disk it is slow
LOAD_S = 20.0  # for what is small
_LITE_VERSION = "import mindspore_lite as lite; print(lite.__version__)"


def mindspore() -> Finding:
    """Whether MindSpore imports and computes on the CPU."""
    if packages.installed("mindspore") is None:
        return Finding("fail", "not installed", remedy=packages.install_line(packages.unmet()))
    return Finding("ok", child.ask("mindspore", IMPORT_S))


def operators() -> Finding:
    """Whether our operators fit their sources and load, and which instructions they use. Runs do
    without them, slower and without quantized weights."""
    if (fault := native.unusable()) is not None:
        return Finding("warn", f"they {fault.why}: MindSpore's own serve", remedy=fault.remedy)
    instructions = child.ask("operators", LOAD_S)
    if instructions == "portable" and platform.machine() == "x86_64":
        found = "portable instructions: this processor has no avx2, they are slow"
        return Finding("warn", found, "avx2 or avx512", "run on a processor with avx2")
    return Finding("ok", f"built from the sources beside them, {instructions}")


def cxx() -> Finding:
    """The compiler that would build our operators; only an installation needs it."""
    try:
        command = compiler()
    except OSError as error:
        needed = native.unusable() is not None
        remedy = "install g++ or clang++, e.g. apt-get install g++; or set CXX"
        return Finding("warn" if needed else "ok", str(error), remedy=remedy if needed else "")
    ended = child.run([*command, "--version"], LOAD_S)
    if ended.code:
        return Finding("warn", f"{command[0]} does not run{ended.tail()}", remedy="set CXX")
    return Finding("ok", f"{command[0]}: {next(iter(ended.output.splitlines()), '')}")


def mindspore_lite() -> Finding:
    """MindSpore Lite, in this Python or in one of its own. Exported models run without it too."""
    if lite.available():
        return Finding("ok", f"{child.ask('lite', IMPORT_S)}, in this Python")
    try:
        python = find_lite_python()
    except EnvironmentFault as error:
        found = f"{error.message}; exported models run in MindSpore (engine=graph-cell)"
        return Finding("warn", found, remedy=error.hint)
    ended = child.run(isolated_code(python, _LITE_VERSION), IMPORT_S, worker_environment())
    if ended.code:
        return Finding("fail", f"{python} has no MindSpore Lite{ended.tail()}", remedy="make lite")
    return Finding("ok", f"MindSpore Lite {ended.output.strip()}, in a worker: {python}")
