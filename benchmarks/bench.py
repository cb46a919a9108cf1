"""Runs ours and a peer in turn, a process a measurement, and prints medians and ratios.

Both are command templates; {prompts}, {new_tokens} and {threads} are filled in. {prompts} is a
JSON file of token ids, a list a row. A command prints one line of JSON, measure.Measurement, as
the last line of its standard output. The first run of each is not counted: it warms the file
cache, and for ours the compile cache.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
REFERENCE = HERE.parent / "tests" / "fixtures" / "reference" / "smollm2_135m.json"
OURS = f"{shlex.quote(sys.executable)} {shlex.quote(str(HERE / 'ours.py'))}" + (
    " --prompts {prompts} --new-tokens {new_tokens} --threads {threads}"
)
STRIDE = 16  # tokens between the starts of two rows' prompts

# key, label, whether more is better
FIGURES = [
    ("decode_tok_s", "decode, tok/s", True),
    ("prefill_tok_s", "prefill, tok/s", True),
    ("first_token_s", "process start to first token, s", False),
    ("peak_rss_mib", "peak memory, MiB", False),
]


def make_prompts(batch: int, length: int) -> list[list[int]]:
    """Token ids [batch, length] of English text; every row starts elsewhere in it."""
    text = json.loads(REFERENCE.read_text("utf-8"))["perplexity"]["token_ids"]
    needed = (batch - 1) * STRIDE + length
    text = text * (needed // len(text) + 1)
    return [text[row * STRIDE : row * STRIDE + length] for row in range(batch)]


def measure(template: str, values: dict[str, str]) -> dict[str, Any]:
    """Run one command and read its last line; its error output is shown if it fails."""
    # Split before filling in, so that a value may hold spaces.
    command = [part.format(**values) for part in shlex.split(template)]
    threads = {"OMP_NUM_THREADS": values["threads"]}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | threads)
    if done.returncode:
        sys.exit(f"{shlex.join(command)} ended in {done.returncode}:\n{done.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def foreign_seconds() -> float:
    """CPU seconds since boot that were neither idle nor spent by us and our children."""
    ticks = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    busy = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")  # less idle and iowait
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return busy - sum(usage.ru_utime + usage.ru_stime for usage in usages)


def agreement(ours: list[list[int]], peer: list[list[int]]) -> str:
    """Whether two sets of generated ids are equal, and if not, where they part."""
    for row, (a, b) in enumerate(zip(ours, peer, strict=True)):
        if a != b:
            pairs = zip(a, b, strict=False)
            step = next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))
            return f"differ first in row {row} at token {step}"
    return "equal"


def table(batch: int, ours: list[dict[str, Any]], peer: list[dict[str, Any]]) -> str:
    """Medians of one batch size as Markdown rows."""
    lines = []
    for key, label, more_is_better in FIGURES:
        a, b = (statistics.median(run[key] for run in runs) for runs in (ours, peer))
        digits = 0 if a >= 200 else 1 if a >= 10 else 2
        direction = "" if more_is_better else " (less is better)"
        cells = f"{a:.{digits}f} | {b:.{digits}f} | {a / b:.2f}{direction}"
        lines.append(f"| {batch} | {label} | {cells} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--ours", default=OURS, help="command template (default: benchmarks/ours.py)"
    )
    parser.add_argument("--peer", required=True, help="command template")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write every measurement to this file")
    arguments = parser.parse_args()

    load = os.getloadavg()[0]
    if load > 0.5:
        print(f"warning: load average {load:.1f}, this machine is busy", file=sys.stderr)

    started, foreign = time.monotonic(), foreign_seconds()
    everything: list[dict[str, Any]] = []
    rows, notes = [], []
    names: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for batch in arguments.batches:
            prompts = Path(folder) / f"prompts_{batch}.json"
            prompts.write_text(json.dumps(make_prompts(batch, arguments.prompt_tokens)))
            values = {
                "prompts": str(prompts),
                "new_tokens": str(arguments.new_tokens),
                "threads": str(arguments.threads),
            }
            sides: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
            for round_number in range(arguments.rounds + 1):
                for template, runs in zip((arguments.ours, arguments.peer), sides, strict=True):
                    result = measure(template, values)
                    if round_number:
                        runs.append(result)
                    print(
                        f"batch {batch}, round {round_number}/{arguments.rounds}: "
                        f"{result['engine']} {result['decode_tok_s']:.1f} tok/s",
                        file=sys.stderr,
                    )
            names = [runs[0]["engine"] for runs in sides]
            rows.append(table(batch, *sides))
            verdict = agreement(sides[0][0]["token_ids"], sides[1][0]["token_ids"])
            notes.append(f"batch {batch}: generated ids {verdict}")
            everything += sides[0] + sides[1]

    print(f"| batch | | {names[0]} | {names[1]} | ratio |\n|---|---|---|---|---|")
    print("\n".join(rows))
    print(
        f"\nMedians of {arguments.rounds}; {arguments.prompt_tokens} prompt + "
        f"{arguments.new_tokens} new tokens, {arguments.threads} threads; {'; '.join(notes)}."
    )
    others = (foreign_seconds() - foreign) / (time.monotonic() - started)
    if others > 0.1:
        print(f"Not to be trusted: other work kept {others:.1f} cores busy meanwhile.")
    if arguments.json:
        arguments.json.write_text(json.dumps(everything, indent=1) + "\n")


if __name__ == "__main__":
    main()
