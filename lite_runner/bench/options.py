"""The section `bench` of a config: its grid of cells, and the job of each cell."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from lite_runner.architectures.quantization import Quant
from lite_runner.config import Invalid, invalid, read
from lite_runner.config.checks import offline_errors, quantization_errors
from lite_runner.config.schema import AdapterSlotOptions, ExportedOptions
from lite_runner.records import Count, Index, InputPath, Range, dataclass

Plain = TypeVar("Plain")
BackendName = Literal["native", "ms", "mslite"]
SIZES = ("batch", "prompt", "new")  # always shown
NewTokens = Annotated[int, Range(2)]  # the first comes with the prompt, the others are decode


@dataclass(frozen=True, kw_only=True)
class CellSettings:
    """The settings of one cell; None: as in the run."""

    backend: BackendName | None
    quant: Quant | None
    threads: int | None  # CPU threads
    adapters: int  # distinct adapters in the batch, in turn; 0: the base model
    prompt: int  # tokens of each row
    new: int  # tokens generated for each row, at least 2
    batch: int  # rows

    @property
    def length(self) -> int:
        """Tokens of a row, prompt and new ones."""
        return self.prompt + self.new

    def __str__(self) -> str:
        """Every setting that is not None, e.g. `batch 8, prompt 128, new 128`."""
        shown = {axis: getattr(self, axis) for axis in reversed(AXES)}
        if not self.adapters:
            del shown["adapters"]
        return ", ".join(f"{axis} {value}" for axis, value in shown.items() if value is not None)


AXES = tuple(field.name for field in fields(CellSettings))  # outermost first, as cells are ordered


def skip_reason(settings: CellSettings, context: int) -> str:
    """The reason to skip a cell of a grid with a model of `context` positions; "": none."""
    if settings.length > context:
        return f"{settings.length} tokens do not fit the model's context of {context}"
    if settings.adapters > settings.batch:
        return f"a batch of {settings.batch} cannot mix {settings.adapters} adapters"
    return ""


def varying(cells: Sequence[CellSettings]) -> list[str]:
    """The axes on which cells differ, outermost first."""
    return [axis for axis in AXES if len({getattr(cell, axis) for cell in cells}) > 1]


def shared(cells: Sequence[CellSettings]) -> dict[str, object]:
    """The settings that all cells share, without those left to the run."""
    if not cells:
        return {}
    differ = varying(cells)
    return {
        axis: value
        for axis, value in asdict(cells[0]).items()
        if axis not in differ and value is not None
    }


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """One value or a list per axis; null: the run's setting."""

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
    compare: InputPath

    def __post_init__(self) -> None:
        # outputs/latest will be this run; the previous one is meant.
        if self.compare and (path := Path(self.compare).expanduser()).is_symlink():
            object.__setattr__(self, "compare", str(path.resolve()))

    def errors(self) -> Iterator[Invalid]:
        """Validation errors beyond the types."""
        for axis in AXES:
            if getattr(self, axis) == ():
                yield invalid(f"bench.{axis}", f"bench.{axis}: got [], expected at least one value")

    def cells(self) -> Iterator[CellSettings]:
        """Every combination of the axes' values once; the batch varies fastest."""
        axes = (getattr(self, axis) for axis in AXES)
        values = (dict.fromkeys(one if isinstance(one, tuple) else (one,)) for one in axes)
        for combination in itertools.product(*values):
            yield CellSettings(**dict(zip(AXES, combination, strict=True)))


@dataclass(frozen=True, kw_only=True)
class CellOptions(ExportedOptions, AdapterSlotOptions):
    """The part of a run's config that cells use: how a model is loaded and computed with."""

    computes_here: ClassVar[bool] = True
    on_ranks: ClassVar[bool] = False
    takes_parallel: ClassVar[bool] = False
    batch_key: ClassVar[str] = "bench.batch"

    def of_cell(self, settings: CellSettings) -> CellOptions:
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

    def cell_errors(self) -> Iterator[Invalid]:
        """Validation errors of a cell. The settings of exported models are for those of
        backend=mslite."""
        yield from quantization_errors(self)
        if self.in_lite:
            yield from offline_errors(self)


def from_plain(kind: type[Plain], raw: Any) -> Plain:
    """A dataclass of the plain data that asdict gave. Raises ValueError for any other."""
    found: list[Invalid] = []
    options: Plain = read(raw, kind, "", found)
    if found:
        raise ValueError("; ".join(one.text for one in found))
    return options


@dataclass(frozen=True, kw_only=True)
class CellJob:
    """One cell of a run."""

    config: Mapping[str, Any]  # of CellOptions, as plain data
    plugins: tuple[str, ...]
    settings: CellSettings
    warmup: int  # repetitions that are not counted
    repeat: int

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> CellJob:
        settings = CellSettings(**raw["settings"])
        return cls(**{**raw, "plugins": tuple(raw["plugins"]), "settings": settings})

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
