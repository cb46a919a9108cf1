"""The report of a benchmark: figures and their spread, ratios to a former run, Markdown tables.

A report is a section of result.json, plain data both ways.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lite_runner.bench.options import AXES, SIZES, CellSettings, from_plain, shared, varying
from lite_runner.errors import ConfigError
from lite_runner.records import dataclass
from lite_runner.system.files import parse_json

RESULT = "result.json"
BUSY = 0.1  # cores used by other programs from which figures are doubtful


@dataclass(frozen=True)
class Spread:
    """Repetitions of one figure, in its unit."""

    median: float
    q1: float
    q3: float
    min: float
    max: float
    values: tuple[float, ...]  # in the order of measurement

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        median, q1, q3 = (percentile(values, percent) for percent in (50, 25, 75))
        return cls(median, q1, q3, min(values), max(values), tuple(values))

    @property
    def half_range(self) -> float:
        return (self.max - self.min) / 2

    def overlaps(self, other: Spread) -> bool:
        """True if the ranges overlap."""
        return self.min <= other.max and other.min <= self.max


def percentile(values: Sequence[float], percent: float) -> float:
    """A percentile, linearly interpolated."""
    ordered = sorted(values)
    place = percent / 100 * (len(ordered) - 1)
    below, above = ordered[math.floor(place)], ordered[math.ceil(place)]
    return below + (above - below) * (place - math.floor(place))


def number(value: float) -> str:
    """A figure as tables show it: 2957, 71.7, 4.72."""
    digits = 0 if abs(value) >= 200 else 1 if abs(value) >= 10 else 2
    return f"{value:.{digits}f}"


@dataclass(frozen=True)
class Figure:
    """One thing that is measured."""

    name: str
    unit: str
    more_is_better: bool = False


# Of one repetition each, by their keys in result.json. A prompt's last step gives the first token,
# and counts as prefill; the percentiles are over the other steps, each of which gives every row a
# token.
FIGURES = {
    "prefill_tok_s": Figure("prefill", "tokens/s", more_is_better=True),
    "decode_tok_s": Figure("decode", "tokens/s", more_is_better=True),
    "first_token_ms": Figure("time to first token", "ms"),
    "token_ms_p50": Figure("token time p50", "ms"),
    "token_ms_p95": Figure("token time p95", "ms"),
    "token_ms_p99": Figure("token time p99", "ms"),
    "peak_mib": Figure("peak memory", "MiB"),
}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Figures that the process of a cell measured."""

    engine: str
    quant: str  # quantization of the weights in memory
    load_s: float  # including MindSpore's import, without compiling
    compile_s: float
    load_peak_mib: float  # until the first repetition, warm-up included
    figures: Mapping[str, Spread]  # over repetitions, by the keys of FIGURES


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell of the grid: its measurements, or the reason why there are none."""

    settings: CellSettings
    measured: Measured | None = None
    error: str | None = None  # it failed
    left_out: str | None = None  # it makes no sense
    busy_cores: float = 0.0  # used by other programs meanwhile, on average
    profile: Mapping[str, Any] | None = None  # of the repetitions and warm-up, with profile=true

    def shown(self, axis: str) -> str:
        """The value of an axis; of a quant that is left to the run how the weights are held."""
        value = getattr(self.settings, axis)
        if axis == "quant" and value is None and self.measured is not None:
            return self.measured.quant
        return "null" if value is None else str(value)


@dataclass(frozen=True)
class Ratio:
    """The ratio of a figure to the former one, by medians."""

    ratio: float
    low: float  # the least over the largest former value
    high: float
    overlap: bool  # the ranges overlap: the difference may be chance


@dataclass(frozen=True)
class Comparison:
    """A run beside a former one."""

    run: str  # the former result.json
    model: str  # of the former run
    ratios: tuple[Mapping[str, Ratio] | None, ...]  # of each cell; None: it has no counterpart


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine of the measurement."""

    processor: str
    cores: int  # that this process may use
    memory_mib: int


@dataclass(frozen=True, kw_only=True)
class Report:
    """A benchmark, complete or interrupted."""

    machine: Machine
    warmup: int  # repetitions that are not counted
    repeat: int
    cells: tuple[Cell, ...]
    comparison: Comparison | None = None
    interrupted: bool = False  # by Ctrl-C; later cells are missing

    @property
    def failed(self) -> int:
        """Cells with an error."""
        return sum(cell.error is not None for cell in self.cells)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Former:
    """A run that is compared with."""

    path: Path  # of its result.json
    model: str
    report: Report

    @property
    def settings(self) -> list[CellSettings]:
        return [cell.settings for cell in self.report.cells]


def read_former(run: str) -> Former:
    """The run of a folder or a result.json. Raises ConfigError unless it is a benchmark."""
    path = Path(run).expanduser()
    path = path / RESULT if path.is_dir() else path
    expected = f"expected the folder of a run of run_mode=bench, or its {RESULT}"
    try:
        raw = parse_json(path.read_bytes())
        return Former(path.absolute(), raw["model"], from_plain(Report, raw["bench"]))
    except OSError as error:
        raise ConfigError(f"bench.compare: {path}: {error.strerror}; {expected}") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"bench.compare: {path}: holds no benchmark; {expected}") from error


def counterparts(cells: Sequence[CellSettings], former: Sequence[CellSettings]) -> list[int | None]:
    """Of each cell the index of the former one with the same settings, None where there is none.

    What has one value throughout each of the runs may differ between them: that is what they are
    compared for.
    """
    axes = [
        axis
        for axis in AXES
        if len({getattr(one, axis) for one in cells}) > 1
        or len({getattr(one, axis) for one in former}) > 1
    ]
    places = {_key(one, axes): index for index, one in reversed(list(enumerate(former)))}
    return [places.get(_key(one, axes)) for one in cells]


def check_comparable(cells: Sequence[CellSettings], former: Former) -> None:
    """Raise ConfigError if no cell has a counterpart in the former run."""
    if not any(index is not None for index in counterparts(cells, former.settings)):
        there = "; ".join(str(one) for one in former.settings[:5])
        more = " ..." if len(former.settings) > 5 else ""
        raise ConfigError(
            f"bench.compare: {former.path}: has none of these cells, only {there}{more}",
            "take the same bench.batch, bench.prompt, ... as there",
        )


def compared(cells: Sequence[Cell], former: Former) -> Comparison:
    """The ratios of every cell's figures to its counterpart's."""
    found = counterparts([cell.settings for cell in cells], former.settings)
    ratios = tuple(
        None if index is None else _ratios(cell, former.report.cells[index])
        for cell, index in zip(cells, found, strict=True)
    )
    return Comparison(str(former.path), former.model, ratios)


def _key(settings: CellSettings, axes: Sequence[str]) -> tuple[object, ...]:
    return tuple(getattr(settings, axis) for axis in axes)


def _ratios(cell: Cell, former: Cell) -> dict[str, Ratio] | None:
    if cell.measured is None or former.measured is None:
        return None
    now, then = cell.measured.figures, former.measured.figures
    return {key: _ratio(now[key], then[key]) for key in FIGURES}


def _ratio(now: Spread, then: Spread) -> Ratio:
    return Ratio(
        now.median / then.median, now.min / then.max, now.max / then.min, now.overlaps(then)
    )


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """A Markdown table without a newline at its end; behind the first `left` columns all are
    aligned right."""
    widths = [max(3, *(len(row[i]) for row in (head, *rows))) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        padded = (
            text.ljust(width) if i < left else text.rjust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        return f"| {' | '.join(padded)} |"

    rule = ("-" * width + ("-" if i < left else ":") for i, width in enumerate(widths))
    return "\n".join([line(head), f"|-{'|-'.join(rule)}|", *map(line, rows)])


def with_spread(spread: Spread) -> str:
    """The median, and half of the range in percent of it, e.g. `71.7 ±1%`."""
    if len(spread.values) < 2 or not spread.median:
        return number(spread.median)
    return f"{number(spread.median)} ±{100 * spread.half_range / spread.median:.0f}%"


def table(report: Report) -> str:
    """A row per cell, a column per figure; in brackets the ratio to the former run."""
    settings = [cell.settings for cell in report.cells]
    axes = [axis for axis in varying(settings) if axis not in SIZES]
    engines = len({cell.measured.engine for cell in report.cells if cell.measured}) > 1
    units = (f"{figure.name}, {figure.unit}" for figure in FIGURES.values())
    head = [*axes, *(["engine"] if engines else []), *SIZES, *units]
    ratios = [None] * len(settings) if report.comparison is None else report.comparison.ratios
    reasons, rows = _reasons(report), []
    for cell, ratio in zip(report.cells, ratios, strict=True):
        row = [cell.shown(axis) for axis in axes]
        if engines:
            row.append(cell.measured.engine if cell.measured else "")
        row += [cell.shown(axis) for axis in SIZES]
        if cell.measured is None:
            place = reasons.index(_reason(cell)) + 1
            outcome = f"{'failed' if cell.error else 'left out'} ({place})"
            row += [outcome, *[""] * (len(FIGURES) - 1)]
        else:
            row += _figures(cell, ratio)
        rows.append(row)
    return markdown(head, rows, left=len(axes) + engines)


def document(report: Report, model: str) -> str:
    """All of bench.md: the table, the machine and the versions."""
    machine = report.machine
    memory = f"{machine.memory_mib / 1024:.0f} GiB"
    lines = [
        f"# {model}",
        "",
        f"{machine.processor}, {machine.cores} cores, {memory}. {_in_common(report)}",
        "",
        table(report),
        "",
        *_notes(report),
    ]
    return "\n".join(lines) + "\n"


def _figures(cell: Cell, ratios: Mapping[str, Ratio] | None) -> list[str]:
    assert cell.measured is not None
    found = []
    for key in FIGURES:
        text = with_spread(cell.measured.figures[key])
        if ratios is not None:
            text += f" ({'~' if ratios[key].overlap else ''}{ratios[key].ratio:.2f})"
        found.append(text)
    return found


def _in_common(report: Report) -> str:
    """The settings common to all cells, without those in columns."""
    measured = [cell.measured for cell in report.cells if cell.measured is not None]
    common = [
        f"{axis} {value}"
        for axis, value in shared([cell.settings for cell in report.cells]).items()
        if axis not in (*SIZES, "quant") and value != 0
    ]
    for name, values in (
        ("quant", {one.quant for one in measured}),
        ("engine", {one.engine for one in measured}),
    ):
        common += [f"{name} {value}" for value in values if len(values) == 1]
    common = [f"{'; '.join(common)}."] if common else []
    times = "repetition" if report.repeat == 1 else "repetitions"
    counted = f"{report.repeat} {times} after {report.warmup} that are not counted."
    return " ".join([*common, counted])


def _notes(report: Report) -> list[str]:
    notes = []
    if report.repeat > 1:
        notes.append("Medians; ± is half of the range over repetitions.")
    if report.comparison is not None:
        notes.append(
            f"In brackets: the ratio to {report.comparison.model} in"
            f" {Path(report.comparison.run).parent}, with ~ where the ranges overlap."
        )
    busy = [cell.busy_cores for cell in report.cells if cell.busy_cores > BUSY]
    if busy:
        cells = "1 cell" if len(busy) == 1 else f"{len(busy)} cells"
        notes.append(
            f"Doubtful: other programs kept up to {max(busy):.1f} cores busy during {cells}."
        )
    text = [" ".join(notes)] if notes else []
    listed = [f"{place}. {reason}" for place, reason in enumerate(_reasons(report), 1)]
    return [*text, *(["", *listed] if listed else [])]


def _reasons(report: Report) -> list[str]:
    """Reasons for cells without figures, each once."""
    return list(dict.fromkeys(_reason(cell) for cell in report.cells if cell.measured is None))


def _reason(cell: Cell) -> str:
    return " ".join((cell.error or cell.left_out or "").split())
