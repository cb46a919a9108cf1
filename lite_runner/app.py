"""argv -> config -> launch -> exit code. Imports as little as each action needs."""

from __future__ import annotations

import gc
import io
import os
import select
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from lite_runner import __version__, progress
from lite_runner.errors import (
    EXIT_ENVIRONMENT,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_PIPE,
    EXIT_TERMINATED,
    ConfigError,
    RunnerError,
)
from lite_runner.system import memory
from lite_runner.system.signals import Terminated, handled

if TYPE_CHECKING:
    from lite_runner.config import Note
    from lite_runner.config.argv import CommandLine
    from lite_runner.config.schema import RunConfig
    from lite_runner.distributed.membership import Member

GRACE_S = 20.0  # for a job to end by itself, longer than stopping.STOP_S


def console(*, mindformer: bool = False) -> NoReturn:
    """The program `run-lite` and run_lite.py; `mindformer`: run_mindformer.py."""
    start_quickly()
    _open_closed_streams()
    # A terminal that lacks a character shows a question mark; the run goes on.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    code = main(mindformer=mindformer)
    try:
        sys.stderr.flush()
    except OSError:  # nobody reads it: Python would end with 120 where it flushes once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    sys.exit(code)


def _open_closed_streams() -> None:
    """Standard streams that were closed, as by `>&-`, lead to nothing: here and in processes that
    this one starts."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            handle = os.open(os.devnull, os.O_RDWR)  # the lowest free one: that of the stream
            os.set_inheritable(handle, True)
            setattr(sys, name, os.fdopen(handle, mode))


def start_quickly() -> None:
    """Of a process that is ours alone, before NumPy is imported."""
    # Imports make objects that stay; collecting garbage among them takes 6% of the start.
    gc.set_threshold(100_000)
    # NumPy's other threads would wait for their first product for 0.1 s of a processor's time.
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "16")  # 2^16 cycles


def main(argv: Sequence[str] | None = None, *, mindformer: bool = False) -> int:
    """Run one command line (default: this process's) and return its exit code."""
    args = sys.argv[1:] if argv is None else list(argv)
    return guarded(lambda: _dispatch(args, mindformer=mindformer))


def guarded(action: Callable[[], int]) -> int:
    """The exit code of `action`; errors go to standard error."""
    try:
        with handled():
            code = action()
            sys.stdout.flush()
            return code
    except RunnerError as error:
        progress.error(f"error: {error}")
        return error.exit_code
    except ModuleNotFoundError as error:
        progress.error(
            f"error: {error.name} is not installed in this Python ({sys.executable})\n"
            "  -> pip install . (in the folder of run_lite.py), or make run, which sets all up"
        )
        return EXIT_ENVIRONMENT
    except KeyboardInterrupt:
        progress.error("interrupted")
        return EXIT_INTERRUPTED
    except Terminated:
        progress.error("terminated")
        return EXIT_TERMINATED
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _reader_has_gone():
            # Python would complain once more when it flushes at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return EXIT_PIPE
        lacking = memory.shortage_error(error)
        if lacking is not None:
            progress.error(f"error: {lacking}")
            return lacking.exit_code
        progress.error(f"{type(error).__name__}: {error}", error)
        return EXIT_FAILED


def _reader_has_gone() -> bool:
    """True if standard output is a pipe whose reader has gone, as after `| head`."""
    poll = select.poll()
    poll.register(sys.stdout, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _dispatch(args: list[str], *, mindformer: bool) -> int:
    from lite_runner.config.argv import parse
    from lite_runner.run_modes import heads, resolve, schemas

    if args[:1] == ["verify"]:
        from lite_runner.verify import verify

        return verify(args[1:])
    if args[:1] == ["schema"]:
        args = ["--cfg", *args]
    # Without a flag no key is looked up: each key=value is a setting.
    line = parse(args, heads() if any(word.startswith("-") for word in args) else ())
    line.mindformer = mindformer
    if line.action == "help":
        from lite_runner.config.help import help_text

        print(help_text(line, schemas()))
    elif line.action == "version":
        print(f"lite-runner {__version__}")
    elif line.action == "completion":
        from lite_runner.config.help import complete

        complete(args)
    elif line.action == "cfg":
        if line.shown == "schema":
            from lite_runner.config.json_schema import schema_text

            print(schema_text(schemas()))
        else:
            from lite_runner.config.help import config_text

            print(config_text(line, schemas()), end="")
    elif line.action == "info":
        from lite_runner.config.help import info_text

        print(info_text(line, schemas()))
    elif line.action == "multirun":
        return _multirun(line)
    else:
        config, notes = resolve(line)
        return _run(config, notes, line.plugins)
    return 0


def _run(config: RunConfig, notes: Sequence[Note], plugins: Sequence[str] = ()) -> int:
    from lite_runner.config import bytes_of
    from lite_runner.config.parallel import SOCKET_VARIABLE, started_by_launcher
    from lite_runner.system import environment, user_cache

    began, member, code = time.time(), None, 0
    if started_by_launcher():
        from lite_runner.distributed.membership import membership

        if (member := membership()) is not None:
            config, notes = _of_member(config, notes, member)
    if plugins or environment.has_plugins():
        from lite_runner.plugins import register_plugins

        register_plugins(plugins)
    progress.configure(config.verbosity, config.log_format)
    if member is not None and _is_rank(config, member) and not config.dry_run:
        from lite_runner import joined

        joined.run(config, notes, member)
    elif member is None or member.prints:
        from lite_runner.launch import launch

        code = launch(config, notes, plugins)
    # The launcher of ranks limits the cache for them.
    if SOCKET_VARIABLE not in os.environ and config.leaves_folder and not config.dry_run:
        limit = config.context.cache_limit
        if removed := user_cache.trim(None if limit is None else bytes_of(limit), began):
            progress.note(
                f"removed from the cache, least recently used: {user_cache.listed(removed)};"
                f" context.cache_limit={limit or '(null: a quarter of the free disk)'}"
            )
    return code


def _of_member(
    config: RunConfig, notes: Sequence[Note], member: Member
) -> tuple[RunConfig, Sequence[Note]]:
    """The config and the notes of what this process starts or does as `member` of a job. Raises
    ConfigError where that is not possible."""
    from lite_runner.config import Note
    from lite_runner.distributed.membership import check_member
    from lite_runner.system import environment

    check_member(
        *(member, config.ranks, config.run_mode),
        on_ranks=config.on_ranks,
        use_parallel=config.use_parallel,
    )
    if member.is_machine:
        config = replace(config, parallel=member.parallel_here(config.parallel))
    elif _is_rank(config, member):
        return config, notes
    # Only now it is known how many ranks are on this machine.
    note = environment.threads_beyond(config.context.threads, config.processes_here)
    return config, [*notes, Note(note)] if note else notes


def _is_rank(config: RunConfig, member: Member) -> bool:
    """True where this process is a rank or the scheduler of ranks, and starts none."""
    return member.size > 1 and config.starts_ranks and not member.is_machine


def _multirun(line: CommandLine) -> int:
    """Every job in a process of its own: neither memory nor device state leaks to the next."""
    from lite_runner.distributed.membership import membership
    from lite_runner.sweep import run_sweep

    if (member := membership()) is not None and member.size > 1:
        raise ConfigError(
            f"--multirun: this process was started as {member.name}, and runs one job",
            "start the jobs one by one, or --multirun in one process",
        )
    return run_sweep(line, _job)


def _job(line: CommandLine, link: Path) -> int:
    """The exit code of a job of a sweep; `link` will lead to its run folder."""
    return run_apart(partial(_linked, line, link))


def _linked(line: CommandLine, link: Path) -> int:
    from lite_runner.output import RunFolder
    from lite_runner.run_modes import resolve

    config, notes = resolve(line)
    try:
        return _run(config, notes, line.plugins)
    finally:
        if RunFolder.newest is not None:
            link.unlink(missing_ok=True)  # of a sweep before into the same folder
            link.symlink_to(RunFolder.newest)


def run_apart(job: Callable[[], int]) -> int:
    """The exit code of a job, run in a new process."""
    import multiprocessing

    if multiprocessing.get_start_method() not in multiprocessing.get_all_start_methods():
        # A joblib worker has a start method of its own, which the new process would not know.
        multiprocessing.set_start_method("spawn", force=True)
    process = multiprocessing.get_context("spawn").Process(target=_exit_with, args=(job,))
    process.start()
    try:
        process.join()
    except KeyboardInterrupt:
        process.join(GRACE_S)  # Ctrl-C has reached the job as well, which keeps what it has
        raise
    finally:
        if process.is_alive():
            process.terminate()
            process.join(GRACE_S)
            process.kill()
            process.join()
    code = process.exitcode or 0
    return 128 - code if code < 0 else code  # as a shell says: killed by signal n is 128 + n


def _exit_with(job: Callable[[], int]) -> NoReturn:
    sys.exit(guarded(job))
