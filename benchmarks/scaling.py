"""Measures engines over batch and over context, and draws what it finds.

Engines are command templates as of benchmarks/bench.py, measured in turn. A context counts the
prompt and the few tokens generated at its end, so decode is that at a full context; prefill
between two contexts is what the time of the longer prompt has over that of the shorter.
Writes a JSON file, and an SVG drawn by matplotlib (the extra `bench`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import make_prompts, measure

from lite_runner.bench.charts import Line, Panel, draw
from lite_runner.bench.report import Spread

PROMPT_TOKENS = 128  # of each row, over batch
NEW_TOKENS = 16
BATCHES = (1, 2, 4, 8, 16, 32)
CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 8192)

Point = dict[str, Any]


def medians(
    engines: Sequence[str], batch: int, prompt_tokens: int, threads: int, rounds: int
) -> list[Point]:
    """One point an engine; the first round warms caches and is not counted."""
    runs: list[list[dict[str, Any]]] = [[] for _ in engines]
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.json"
        prompts.write_text(json.dumps(make_prompts(batch, prompt_tokens)))
        values = {"prompts": str(prompts), "new_tokens": str(NEW_TOKENS), "threads": str(threads)}
        for round_number in range(rounds + 1):
            for template, kept in zip(engines, runs, strict=True):
                result = measure(template, values)
                if round_number:
                    kept.append(result)
    points = []
    for kept in runs:
        figures = ("decode_tok_s", "prefill_tok_s", "peak_rss_mib")
        median = {key: statistics.median(run[key] for run in kept) for key in figures}
        sizes = {"batch": batch, "context": prompt_tokens + NEW_TOKENS}
        points.append({"engine": kept[0]["engine"], **sizes, **median})
        print(
            f"batch {batch}, context {sizes['context']}: {kept[0]['engine']} "
            f"{median['decode_tok_s']:.1f} tok/s",
            file=sys.stderr,
        )
    return points


def prefill_speeds(points: Sequence[Point]) -> list[tuple[float, float]]:
    """(context, tokens/s of the prompt's part since the context before) of growing contexts."""
    speeds = []
    tokens = seconds = 0.0
    for point in points:
        length = point["context"] - NEW_TOKENS
        taken = length / point["prefill_tok_s"]
        # Noise can make the longer prompt the faster one; such a point says nothing.
        if taken > seconds:
            speeds.append((point["context"], (length - tokens) / (taken - seconds)))
        tokens, seconds = length, taken
    return speeds


def panels(over_batch: Sequence[Point], over_context: Sequence[Point]) -> list[Panel]:
    names = list(dict.fromkeys(point["engine"] for point in (*over_batch, *over_context)))
    by_name = {
        name: (
            [point for point in over_batch if point["engine"] == name],
            [point for point in over_context if point["engine"] == name],
        )
        for name in names
    }
    speed, step, prefill, memory = [], [], [], []
    for name, (batches, contexts) in by_name.items():
        speed.append(line(name, [(p["batch"], p["decode_tok_s"]) for p in batches]))
        step.append(line(name, [(p["context"], 1000 / p["decode_tok_s"]) for p in contexts]))
        prefill.append(line(name, prefill_speeds(contexts)))
        memory.append(line(name, [(p["context"], p["peak_rss_mib"]) for p in contexts]))
    return [
        Panel("decode", "batch, rows", "tokens/s", speed),
        Panel("time per token", "context, tokens", "ms", step),
        Panel("prefill", "context, tokens", "tokens/s", prefill),
        Panel("peak memory", "context, tokens", "MiB", memory),
    ]


def line(name: str, medians: Sequence[tuple[float, float]]) -> Line:
    return Line(name, [(x, Spread.of([median])) for x, median in medians])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--engine", action="append", required=True, help="command template; may be repeated"
    )
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS, help="growing")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, required=True, help="write every point to this file")
    parser.add_argument("--svg", type=Path, required=True, help="draw them into this file")
    arguments = parser.parse_args()

    sizes = [("over_batch", batch, PROMPT_TOKENS) for batch in arguments.batches]
    sizes += [("over_context", 1, context - NEW_TOKENS) for context in arguments.contexts]
    found: dict[str, list[Point]] = {"over_batch": [], "over_context": []}
    for key, batch, prompt_tokens in sizes:
        found[key] += medians(
            arguments.engine, batch, prompt_tokens, arguments.threads, arguments.rounds
        )
        # All of it takes long: what is measured is kept, whatever happens to the rest.
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
        arguments.svg.write_bytes(draw(panels(**found)).svg)


if __name__ == "__main__":
    main()
