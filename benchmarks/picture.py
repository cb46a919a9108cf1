"""Draws the figures of tables that benchmarks/bench.py wrote as JSON: a group of bars a file.

Only batch 1, and of the rows of one engine the first. Matplotlib (the extra `bench`) draws.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import FIGURES

from lite_runner.bench.charts import Line, Panel, draw
from lite_runner.bench.report import Spread

DRAWN = ("decode_tok_s", "prefill_tok_s", "first_token_s", "peak_rss_mib")


def family(engine: str) -> str:
    """An engine without its weights: `lite-runner (native)`, `llama.cpp`."""
    name, _, ways = engine.partition(" (")
    return f"{name} ({ways.rstrip(')').partition(',')[0]})" if ways else engine.split()[0]


def measured(file: Path) -> dict[str, list[dict[str, Any]]]:
    """The runs of each family, in the file's order."""
    runs = [run for run in json.loads(file.read_text("utf-8")) if run["batch"] == 1]
    first: dict[str, str] = {}
    for run in runs:
        first.setdefault(family(run["engine"]), run["engine"])
    return {
        name: [run for run in runs if run["engine"] == engine] for name, engine in first.items()
    }


def panels(files: Sequence[Path]) -> list[Panel]:
    """A panel a figure; a file `8-bits-128.json` is the group `8 bits`."""
    groups = {file.stem.rpartition("-")[0].replace("-", " "): measured(file) for file in files}
    names = dict.fromkeys(name for runs in groups.values() for name in runs)
    drawn = []
    for key in DRAWN:
        lines = [
            Line(
                name,
                [
                    (group, Spread.of([run[key] for run in runs[name]]))
                    for group, runs in groups.items()
                    if name in runs
                ],
            )
            for name in names
        ]
        title, _, unit = FIGURES[key].rpartition(", ")
        drawn.append(Panel(title, "", unit, lines))
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("svg", type=Path, help="the picture to write")
    parser.add_argument("tables", type=Path, nargs="+", help="files of bench.py --json")
    arguments = parser.parse_args()
    arguments.svg.write_bytes(draw(panels(arguments.tables)).svg)


if __name__ == "__main__":
    main()
