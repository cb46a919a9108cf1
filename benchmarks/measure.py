"""Shared by the engines' processes: their arguments, and their one line of JSON.

Standard library only, so that every engine's environment can import it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn, SupportsInt


@dataclass(frozen=True)
class Measurement:
    """One process, one batch. Speeds are of a second pass, warm; the first token is cold."""

    engine: str
    batch: int
    prompt_tokens: int  # of one row
    new_tokens: int  # of one row
    first_token_s: float  # from the start of the process, imports and load included
    load_s: float  # without compiling; ours imports MindSpore in it
    prefill_tok_s: float  # all rows together, as is decode
    decode_tok_s: float
    peak_rss_mib: float
    disk_mib: float  # of the files that are loaded
    token_ids: list[list[int]]  # generated, a list a row

    @classmethod
    def of(
        cls,
        engine: str,
        prompts: Sequence[Sequence[int]],
        steps: Iterator[Iterable[SupportsInt]],
        *,
        first_token_s: float,
        load_s: float,
        files: Iterable[Path],
    ) -> Measurement:
        """Times the warm pass: `steps` reads the prompts, rows of equal length, in its first step,
        and each step gives the next token of every row. `files` are those that are loaded.
        """
        batch, length = len(prompts), len(prompts[0])
        started = time.perf_counter()
        tokens = [next(steps)]
        prefilled = time.perf_counter()
        tokens += steps
        decoded = time.perf_counter()
        return cls(
            engine=engine,
            batch=batch,
            prompt_tokens=length,
            new_tokens=len(tokens),
            first_token_s=first_token_s,
            load_s=load_s,
            prefill_tok_s=batch * length / (prefilled - started),
            decode_tok_s=batch * (len(tokens) - 1) / (decoded - prefilled),
            peak_rss_mib=peak_rss_mib(),
            disk_mib=_mebibytes(files),
            token_ids=[[int(token) for token in row] for row in zip(*tokens, strict=True)],
        )

    def print(self) -> None:
        print(json.dumps(asdict(self)), flush=True)


def engine_parser(doc: str) -> argparse.ArgumentParser:
    """The arguments that every engine has; `doc` is its module's, whose first line is shown."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument(
        "--prompts", type=_read_prompts, required=True, help="JSON file: a list of ids a row"
    )
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    return parser


def requantized(gguf: Path, made: Path, kind: str) -> Path:
    """The path of the model of `gguf` in another type, made for llama.cpp."""
    key = hashlib.sha256(str(gguf.resolve()).encode()).hexdigest()[:8]
    return made / f"{gguf.stem}-{key}-{kind}.gguf"


def restart() -> NoReturn:
    """Runs this command in a clean process, after one that made files, and ends as that does."""
    sys.exit(subprocess.run([sys.executable, *sys.argv]).returncode)


def seconds_since_start() -> float:
    """Age of this process in seconds, to 10 ms.

    Both clocks count from boot. psutil's create_time adds the boot time in whole seconds,
    which shifts the result by up to one.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def peak_rss_mib() -> float:
    """Largest resident set of this process so far, in MiB, file pages it mapped included, and that
    of the processes that it has started and that still run: an engine may be one.

    Not getrusage: its maximum survives exec, so a child would report its parent's.
    """
    children = [
        child
        for task in Path("/proc/self/task").iterdir()
        for child in (task / "children").read_text().split()
    ]
    return sum(_peak_mib(process) for process in ("self", *children))


def _mebibytes(files: Iterable[Path]) -> float:
    """Size on disk of files and of folders with all that is in them."""
    size = 0.0
    for path in files:
        size += _mebibytes(path.iterdir()) if path.is_dir() else path.stat().st_size / 2**20
    return size


def _read_prompts(file: str) -> list[list[int]]:
    prompts: list[list[int]] = json.loads(Path(file).read_text())
    return prompts


def _peak_mib(process: str) -> float:
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024
