"""What a benchmark found: a section of result.json, plain data both ways."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from lite_runner.bench.grid import Settings
from lite_runner.bench.spread import Spread
from lite_runner.records import dataclass


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
    """What the process of a cell measured."""

    engine: str
    quant: str  # how the weights are held
    load_s: float  # imports of MindSpore included, compiling not
    compile_s: float
    load_peak_mib: float  # until the first repetition, warm-up included
    figures: Mapping[str, Spread]  # over repetitions, by the keys of FIGURES

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Measured:
        figures = {key: Spread.of(raw["figures"][key]["values"]) for key in FIGURES}
        return cls(**{**raw, "figures": figures})


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell of the grid: what was measured, or why nothing was."""

    settings: Settings
    measured: Measured | None = None
    error: str | None = None  # it failed
    left_out: str | None = None  # it makes no sense
    busy_cores: float = 0.0  # that other programs kept busy meanwhile, on average

    def shown(self, axis: str) -> str:
        """The value of an axis; of a quant that is left to the run how the weights are held."""
        value = getattr(self.settings, axis)
        if axis == "quant" and value is None and self.measured is not None:
            return self.measured.quant
        return "null" if value is None else str(value)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Cell:
        measured = raw["measured"] and Measured.from_json(raw["measured"])
        return cls(**{**raw, "settings": Settings(**raw["settings"]), "measured": measured})


@dataclass(frozen=True)
class Ratio:
    """A figure over the former one, of medians."""

    ratio: float
    low: float  # the least over the former largest
    high: float
    overlap: bool  # the ranges do: the difference may be chance


@dataclass(frozen=True)
class Comparison:
    """A run beside a former one."""

    run: str  # the former result.json
    model: str  # of the former run
    ratios: tuple[Mapping[str, Ratio] | None, ...]  # of each cell; None: it has no counterpart

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Comparison:
        ratios = tuple(
            found and {key: Ratio(**ratio) for key, ratio in found.items()}
            for found in raw["ratios"]
        )
        return cls(raw["run"], raw["model"], ratios)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where it was measured."""

    processor: str
    cores: int  # that this process may use
    memory_mib: int


@dataclass(frozen=True, kw_only=True)
class Report:
    """A benchmark, complete or as far as it got."""

    machine: Machine
    warmup: int  # repetitions that are not counted
    repeat: int
    cells: tuple[Cell, ...]
    comparison: Comparison | None = None
    interrupted: bool = False  # by Ctrl-C: the cells are those before

    @property
    def failed(self) -> int:
        """Cells with an error."""
        return sum(cell.error is not None for cell in self.cells)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Report:
        """Raises KeyError or TypeError for what `to_json` never gave."""
        return cls(
            machine=Machine(**raw["machine"]),
            warmup=raw["warmup"],
            repeat=raw["repeat"],
            cells=tuple(map(Cell.from_json, raw["cells"])),
            comparison=raw["comparison"] and Comparison.from_json(raw["comparison"]),
            interrupted=raw["interrupted"],
        )
