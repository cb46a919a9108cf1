"""What the process of a cell is told: plain data both ways, and nothing that is slow to import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lite_runner.bench.grid import Settings


@dataclass(frozen=True, kw_only=True)
class CellJob:
    """One cell of a run."""

    arguments: tuple[str, ...]  # the run's command line, less what the cell sets
    settings: Settings
    warmup: int  # repetitions that are not counted
    repeat: int

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> CellJob:
        settings = Settings(**raw["settings"])
        return cls(**{**raw, "arguments": tuple(raw["arguments"]), "settings": settings})

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
