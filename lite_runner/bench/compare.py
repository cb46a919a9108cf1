"""A run beside a former one: which cells belong together, and their ratios."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lite_runner.bench.grid import AXES, Settings
from lite_runner.bench.report import FIGURES, Cell, Comparison, Ratio, Report
from lite_runner.bench.spread import Spread
from lite_runner.errors import ConfigError
from lite_runner.records import dataclass
from lite_runner.system.json_file import parse_json

RESULT = "result.json"


@dataclass(frozen=True)
class Former:
    """A run that is compared with."""

    path: Path  # of its result.json
    model: str
    report: Report

    @property
    def settings(self) -> list[Settings]:
        return [cell.settings for cell in self.report.cells]


def read_former(run: str) -> Former:
    """The run of a folder, or of a result.json. Raises ConfigError where it is no benchmark."""
    path = Path(run).expanduser()
    path = path / RESULT if path.is_dir() else path
    expected = f"expected the folder of a run of run_mode=bench, or its {RESULT}"
    try:
        raw = parse_json(path.read_bytes())
        return Former(path.absolute(), raw["model"], Report.from_json(raw["bench"]))
    except OSError as error:
        raise ConfigError(f"bench.compare: {path}: {error.strerror}; {expected}") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"bench.compare: {path}: holds no benchmark; {expected}") from error


def counterparts(cells: Sequence[Settings], former: Sequence[Settings]) -> list[int | None]:
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


def check_comparable(cells: Sequence[Settings], former: Former) -> None:
    """Raise ConfigError where no cell has a counterpart in a former run."""
    if not any(index is not None for index in counterparts(cells, former.settings)):
        there = "; ".join(str(one) for one in former.settings[:5])
        more = " ..." if len(former.settings) > 5 else ""
        raise ConfigError(
            f"bench.compare: {former.path}: has none of these cells, only {there}{more}",
            "take the same bench.batch, bench.prompt, ... as there",
        )


def compared(cells: Sequence[Cell], former: Former) -> Comparison:
    """Every cell's figures over those of its counterpart."""
    found = counterparts([cell.settings for cell in cells], former.settings)
    ratios = tuple(
        None if index is None else _ratios(cell, former.report.cells[index])
        for cell, index in zip(cells, found, strict=True)
    )
    return Comparison(str(former.path), former.model, ratios)


def _key(settings: Settings, axes: Sequence[str]) -> tuple[object, ...]:
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
