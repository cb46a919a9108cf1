"""Run an unchanged script written for MindFormers.

    python -m lite_runner.mindformers [--device_target CPU] SCRIPT.py ARGS

`import mindformers` in it means lite_runner.mindformers, and `import mindspore_gs` the quantization
of its models. All else is as with `python SCRIPT.py`.
Python processes that the script starts are not run this way, unless it starts them so.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any, NoReturn

from lite_runner.system.own_python import continue_in_own_python

if __name__ == "__main__":
    continue_in_own_python()

import lite_runner
from lite_runner import app
from lite_runner.api.context import DEVICE_VARIABLE
from lite_runner.errors import ConfigError
from lite_runner.mindformers import tree
from lite_runner.system import environment

MODULE = "lite_runner.mindformers"
# MindFormers' own scripts, and ours that take the same flags if the file is missing.
SCRIPTS = {
    "convert_weight.py",
    "export.py",
    "generate_custom.py",
    "hccl_tools.py",
    "make_mindrecord.py",
    "merge_hccl.py",
    "run_infer_main.py",
    "transform_checkpoint.py",
}
RUN_MINDFORMER = {"run_mindformer.py", "run_mindformers.py"}


def parser() -> argparse.ArgumentParser:
    """The parser of flags before the script, and the rest."""
    flags = argparse.ArgumentParser(
        prog=f"python -m {MODULE}",
        description="Run a script written for MindFormers: `import mindformers` means lite_runner.",
        epilog=f"Where there is no such file, ours: {', '.join(sorted(RUN_MINDFORMER | SCRIPTS))}.",
    )
    flags.add_argument(
        "--device_target",
        choices=("CPU", "Ascend"),
        help="the device to use, whatever the script says",
    )
    flags.add_argument("script", metavar="SCRIPT.py")
    flags.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER)
    return flags


def find(script: str) -> Path:
    """The file to run. Raises ConfigError where there is none."""
    path = Path(script)
    if path.exists():
        return path
    root = Path(lite_runner.__file__).parent.parent
    for ours in (root / "scripts" / path.name, root / "examples" / path.name):
        if path.name in SCRIPTS and ours.is_file():
            return ours
    raise ConfigError(f"{script}: no such file", f"python -m {MODULE} SCRIPT.py ARGS")


class _Script(SourceFileLoader):
    def set_data(self, path: str, data: object, *, _mode: int = 0) -> None:
        """Leave no __pycache__ beside the script."""


def run(script: str, path: Path, arguments: list[str]) -> None:
    """Run the file `path`, typed as `script`, as `python SCRIPT.py` does, in this process."""
    tree.alias_mindformers(lite_runner.mindformers)
    tree.alias_golden_stick()
    file = str(path.absolute())
    sys.argv = [script, *arguments]
    sys.path[0] = str(path.resolve().parent)  # replaces the current folder, where -m looked
    loader = _Script("__main__", file)
    module = module_from_spec(ModuleSpec("__main__", loader, origin=file))
    module.__file__, module.__package__, module.__spec__ = file, None, None
    sys.modules["__main__"] = module
    try:
        loader.exec_module(module)
    except Exception as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != file:
            trace = trace.tb_next  # frames of this module and of Python's import
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        if "Ascend" in str(error) and not environment.ascend_devices():
            hint = "python -m lite_runner.mindformers --device_target CPU SCRIPT.py"
            print(f"  -> {hint} runs it on the processor", file=sys.stderr)
        sys.exit(1)


def force_device(device: str) -> None:
    """Make models, and MindSpore itself, use `device` where the script says another.

    It holds for processes that this one starts too, but for what they tell MindSpore themselves.
    Raises EnvironmentFault where MindSpore is broken.
    """
    os.environ[DEVICE_VARIABLE] = device
    environment.import_mindspore()
    mindspore: Any = sys.modules["mindspore"]
    set_context, set_device = mindspore.set_context, mindspore.set_device

    def context_of(**settings: Any) -> None:
        if "device_target" in settings:
            settings["device_target"] = device
        set_context(**settings)

    def device_of(device_target: str, device_id: int | None = None) -> None:
        set_device(device, device_id)

    mindspore.set_context = mindspore.context.set_context = context_of
    mindspore.set_device = device_of


def main() -> NoReturn:
    """Run the script of the command line; exits with its status."""
    flags = parser().parse_args()
    if Path(flags.script).name in RUN_MINDFORMER and not Path(flags.script).exists():
        given = ["--device_target", flags.device_target] if flags.device_target else []
        sys.argv[1:] = [*given, *flags.arguments]
        app.console(mindformer=True)

    def prepare() -> int:
        flags.path = find(flags.script)
        if flags.device_target:
            force_device(flags.device_target)
        return 0

    code = app.guarded(prepare)
    if code:
        sys.exit(code)
    run(flags.script, flags.path, flags.arguments)
    sys.exit()


if __name__ == "__main__":
    main()
