"""What the process of a cell is told: plain data both ways."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from lite_runner.bench.grid import Settings
from lite_runner.bench.options import BenchOptions, CellOptions
from lite_runner.plugins import registered
from lite_runner.records import dataclass


@dataclass(frozen=True, kw_only=True)
class CellJob:
    """One cell of a run."""

    config: Mapping[str, Any]  # of CellOptions, as plain data
    plugins: tuple[str, ...]
    settings: Settings
    warmup: int  # repetitions that are not counted
    repeat: int

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> CellJob:
        settings = Settings(**raw["settings"])
        return cls(**{**raw, "plugins": tuple(raw["plugins"]), "settings": settings})

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def jobs_of(options: BenchOptions, config: CellOptions) -> list[CellJob]:
    """A job for each cell of the grid, in its order."""
    return [
        CellJob(
            config=config.of_cell(settings).to_dict(),
            plugins=tuple(registered()),
            settings=settings,
            warmup=options.warmup,
            repeat=options.repeat,
        )
        for settings in options.grid.cells()
    ]
