"""Runs ours and its peers in turn, a process a measurement, and prints medians and ratios.

All are command templates; {prompts}, {new_tokens} and {threads} are filled in. {prompts} is a
JSON file of token ids, a list a row. A command prints one line of JSON, measure.Measurement, as
the last line of its standard output. The first run of each is not counted: it warms the file
cache, and for ours the compile cache. A peer that fails is left out, and named.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lite_runner.bench.bench import Others
from lite_runner.bench.report import BUSY, markdown, number

HERE = Path(__file__).parent
REFERENCE = HERE.parent / "tests" / "fixtures" / "reference" / "smollm2_135m.json"
OURS = f"{shlex.quote(sys.executable)} {shlex.quote(str(HERE / 'ours.py'))}" + (
    " --prompts {prompts} --new-tokens {new_tokens} --threads {threads}"
)
VOCABULARY = 49_152  # of SmolLM2, whose token ids the text has
STRIDE = 16  # tokens between the starts of two rows' prompts

FIGURES = {
    "decode_tok_s": "decode, tokens/s",
    "prefill_tok_s": "prefill, tokens/s",
    "first_token_s": "process start to first token, s",
    "load_s": "load, s",
    "peak_rss_mib": "peak memory, MiB",
    "disk_mib": "on disk, MiB",
}


def make_prompts(batch: int, length: int, vocabulary: int = VOCABULARY) -> list[list[int]]:
    """Token ids [batch, length] of English text; every row starts elsewhere in it. Those beyond the
    model's `vocabulary` become others."""
    text = json.loads(REFERENCE.read_text("utf-8"))["perplexity"]["token_ids"]
    needed = (batch - 1) * STRIDE + length
    text = [token % vocabulary for token in text]
    text = text * (needed // len(text) + 1)
    return [text[row * STRIDE : row * STRIDE + length] for row in range(batch)]


class CommandFailed(Exception):
    """A command did not print its measurement: how it ended, and its error output."""


def measure(template: str, values: dict[str, str]) -> dict[str, Any]:
    """Run one command and read its last line. Raises CommandFailed."""
    # Split before filling in, so that a value may hold spaces.
    command = [part.format(**values) for part in shlex.split(template)]
    threads = {"OMP_NUM_THREADS": values["threads"]}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | threads)
    if code := done.returncode:
        ended = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        raise CommandFailed(f"{shlex.join(command)} ended {ended}\n{done.stderr[-4000:]}".strip())
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def measure_round(
    templates: Sequence[str], values: dict[str, str], failed: dict[int, str]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Measure each command that has not `failed`, and yield its place too; the first, ours, ends
    the program if it fails."""
    for place, template in enumerate(templates):
        if place in failed:
            continue
        try:
            result = measure(template, values)
        except CommandFailed as failure:
            if place == 0:
                sys.exit(str(failure))
            print(f"left out: {failure}", file=sys.stderr)
            failed[place] = str(failure).splitlines()[0]
        else:
            yield place, result


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """So many processes that want a core for themselves."""
    command = [sys.executable, "-c", "while True: pass"]
    busy = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def memory_gb_s(threads: int) -> float:
    """Memory bandwidth of this machine, as benchmarks/bandwidth.py measures it."""
    command = [sys.executable, str(HERE / "bandwidth.py"), "--threads", str(threads)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def agreement(ours: list[list[int]], peer: list[list[int]]) -> str:
    """A line on two sets of generated ids: equal, or the first difference."""
    for row, (a, b) in enumerate(zip(ours, peer, strict=True)):
        if a != b:
            pairs = zip(a, b, strict=False)
            step = next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))
            return f"differ first in row {row} at token {step}"
    return "equal"


def rows_of(batch: int, engines: Sequence[list[dict[str, Any]]]) -> list[list[str]]:
    """Medians of one batch size, a row an engine; ours is the first."""
    rows = []
    medians = [
        {key: statistics.median(run[key] for run in runs) for key in FIGURES} for runs in engines
    ]
    for runs, median in zip(engines, medians, strict=True):
        row = [str(batch), runs[0]["engine"]]
        for key, value in median.items():
            ratio = "" if median is medians[0] else f" ({medians[0][key] / value:.2f})"
            row.append(f"{number(value)}{ratio}")
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--ours", default=OURS, help="command template (default: benchmarks/ours.py)"
    )
    parser.add_argument(
        "--peer", action="append", required=True, help="command template; may be repeated"
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY, help="the model's size")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--neighbours", type=int, default=0, help="processes that keep a core busy meanwhile"
    )
    parser.add_argument("--json", type=Path, help="write every measurement to this file")
    arguments = parser.parse_args()

    load = os.getloadavg()[0]
    if load > 0.5:
        print(f"warning: load average {load:.1f}, this machine is busy", file=sys.stderr)

    others = Others()
    everything: list[dict[str, Any]] = []
    rows: list[list[str]] = []
    notes = []
    failed: dict[int, str] = {}  # how a command ended, by its place
    templates = [arguments.ours, *arguments.peer]
    with tempfile.TemporaryDirectory() as folder, neighbours(arguments.neighbours):
        for batch in arguments.batches:
            prompts = Path(folder) / f"prompts_{batch}.json"
            made = make_prompts(batch, arguments.prompt_tokens, arguments.vocabulary)
            prompts.write_text(json.dumps(made))
            values = {
                "prompts": str(prompts),
                "new_tokens": str(arguments.new_tokens),
                "threads": str(arguments.threads),
            }
            measured: list[list[dict[str, Any]]] = [[] for _ in templates]
            for round_number in range(arguments.rounds + 1):
                for place, result in measure_round(templates, values, failed):
                    if round_number:
                        measured[place].append(result)
                    print(
                        f"batch {batch}, round {round_number}/{arguments.rounds}: "
                        f"{result['engine']} {result['decode_tok_s']:.1f} tok/s",
                        file=sys.stderr,
                    )
            engines = [runs for place, runs in enumerate(measured) if place not in failed]
            rows += rows_of(batch, engines)
            for peer in engines[1:]:
                verdict = agreement(engines[0][0]["token_ids"], peer[0]["token_ids"])
                notes.append(f"{peer[0]['engine']} at batch {batch}: {verdict}")
            everything += [run for runs in engines for run in runs]

    memory = memory_gb_s(arguments.threads)
    compared = f"Generated ids against the first's: {'; '.join(notes)}. " if notes else ""
    print(markdown(["batch", "engine", *FIGURES.values()], rows, left=2))
    print(
        f"\nMedians of {arguments.rounds}; {arguments.prompt_tokens} prompt + "
        f"{arguments.new_tokens} new tokens, {arguments.threads} threads. In brackets: what the "
        f"first engine has over this one. {compared}"
        f"These threads read memory at {memory:.1f} GB/s."
    )
    for ended in failed.values():
        print(f"Left out: {ended}.")
    if arguments.neighbours:
        print(f"{arguments.neighbours} busy processes ran beside all of them.")
    elif (busy := others.busy_cores()) > BUSY:
        print(f"Not to be trusted: other work kept {busy:.1f} cores busy meanwhile.")
    if arguments.json:
        arguments.json.write_text(json.dumps(everything, indent=1) + "\n")


if __name__ == "__main__":
    main()
