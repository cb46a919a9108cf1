"""The section `bench` of a run's config, and what of the rest its cells heed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from lite_runner.bench.grid import AXES, BackendName, Grid, Settings
from lite_runner.config.checks import strategy_faults
from lite_runner.config.fields import Fault, Range, fault, raise_faults
from lite_runner.config.ge import ge_faults
from lite_runner.config.offline_checks import offline_faults
from lite_runner.config.options import AdapterSlotOptions, ExportedOptions
from lite_runner.config.quantization import Quant
from lite_runner.config.quantization_checks import quantization_faults
from lite_runner.config.ranges import Count, Index
from lite_runner.records import dataclass

NewTokens = Annotated[int, Range(2)]  # the first comes with the prompt, the others are decode


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Of each axis one value, or a list of them; null: what the run says."""

    batch: Count | tuple[Count, ...]
    prompt: Count | tuple[Count, ...]
    new: NewTokens | tuple[NewTokens, ...]
    threads: Count | tuple[Count | None, ...] | None
    quant: Quant | tuple[Quant | None, ...] | None
    adapters: Index | tuple[Index, ...]
    backend: BackendName | tuple[BackendName | None, ...] | None
    warmup: Index
    repeat: Count
    charts: bool
    compare: str

    def __post_init__(self) -> None:
        # outputs/latest is this run once it has begun; it means the one before.
        if self.compare and (path := Path(self.compare).expanduser()).is_symlink():
            object.__setattr__(self, "compare", str(path.resolve()))

    def faults(self) -> Iterator[Fault]:
        """What the types do not say."""
        for axis in AXES:
            if getattr(self, axis) == ():
                yield fault(f"bench.{axis}", f"bench.{axis}: got [], expected at least one value")

    @property
    def grid(self) -> Grid:
        """Every axis with its values."""
        return Grid(**{axis: _several(getattr(self, axis)) for axis in AXES})


def _several(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


@dataclass(frozen=True, kw_only=True)
class CellOptions(ExportedOptions, AdapterSlotOptions):
    """What a cell heeds of the run's config: how a model is loaded and computed with."""

    computes_here: ClassVar[bool] = True
    on_ranks: ClassVar[bool] = False
    takes_parallel: ClassVar[bool] = False

    def of_cell(self, settings: Settings) -> CellOptions:
        """The config of one cell of the grid."""
        own = {field.name: getattr(self, field.name) for field in fields(CellOptions)}
        threads = self.context.threads if settings.threads is None else settings.threads
        quant = settings.quant or self.quant
        own |= {
            "backend": settings.backend or self.backend,
            "quant": quant,
            "quant_group": self.quant_group if quant == "a16w4" else None,
            "context": replace(self.context, threads=threads),
        }
        return CellOptions(**own)


def cell_faults(config: CellOptions) -> Iterator[Fault]:
    """What does not go together in a cell. With backend=ms the settings of exported models are for
    the others."""
    yield from quantization_faults(config)
    if config.backend != "ms":
        yield from offline_faults(config)


def check_cell(config: CellOptions) -> None:
    """Raises ConfigError with the `cell_faults`."""
    raise_faults(list(cell_faults(config)))


def grid_faults(options: BenchOptions, config: CellOptions) -> Iterator[Fault]:
    """What does not go together in a benchmark; what only some of them cannot do is their error."""
    yield from options.faults()
    yield from strategy_faults(config)
    yield from ge_faults(config)
    cells = [config.of_cell(settings) for settings in options.grid.cells()]
    found = [list(cell_faults(cell)) for cell in cells]
    if all(found):
        yield from itertools.chain.from_iterable(found)
    if all(cell.backend == "ms" for cell in cells):
        yield from offline_faults(config)
