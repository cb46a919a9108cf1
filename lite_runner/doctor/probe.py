"""What a child process of the doctor answers: one question, one answer on standard output.

python probe.py QUESTION
"""

from __future__ import annotations

import os
import sys

from lite_runner.errors import RunnerError


def mindspore() -> str:
    """Import MindSpore and compute on the CPU."""
    return f"{_computes_on('CPU')}, computes on the CPU"


def ascend() -> str:
    """Compute on the first Ascend device."""
    from lite_runner.system import environment

    soc = environment.ascend_soc()
    _computes_on("Ascend")
    return f"{soc}, MindSpore computes on the first"


def operators() -> str:
    """Load our operators."""
    from lite_runner import native

    return native.instructions()


def lite() -> str:
    """Import MindSpore Lite."""
    from lite_runner.backends.engines.lite import version

    return version()


def _computes_on(device: str) -> str:
    """The version of the MindSpore that does."""
    from lite_runner.system import environment

    environment.import_mindspore()
    from lite_runner.backends.device import try_device

    return try_device(device)


def main() -> int:
    """Answer; an error of ours goes to standard output as well, its hint behind ->."""
    answer = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no answer
    questions = {"mindspore": mindspore, "ascend": ascend, "operators": operators, "lite": lite}
    code = 0
    try:
        text = questions[sys.argv[1]]()
    except RunnerError as error:
        code, text = error.exit_code, f"{error.message}\n-> {error.hint}"
    os.write(answer, text.encode())
    return code


if __name__ == "__main__":
    sys.exit(main())
