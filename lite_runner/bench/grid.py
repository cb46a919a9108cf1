"""The cells of a benchmark: every combination of the values that its axes have."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from typing import Literal

from lite_runner.config.quantization import Quant
from lite_runner.records import dataclass

BackendName = Literal["ms", "mslite"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured in one cell. null stands for what the run itself says."""

    backend: BackendName | None
    quant: Quant | None
    threads: int | None  # of the CPU
    adapters: int  # distinct ones in the batch, in turn; 0: the base model
    prompt: int  # tokens of each row
    new: int  # tokens generated for each row, at least 2
    batch: int  # rows

    @property
    def length(self) -> int:
        """Tokens of a row, prompt and new ones."""
        return self.prompt + self.new

    def __str__(self) -> str:
        """Every setting that is not left to the run, e.g. `batch 8, prompt 128, new 128`."""
        shown = {axis: getattr(self, axis) for axis in reversed(AXES)}
        if not self.adapters:
            del shown["adapters"]
        return ", ".join(f"{axis} {value}" for axis, value in shown.items() if value is not None)


AXES = tuple(field.name for field in fields(Settings))  # outermost first, as cells are ordered
SIZES = ("batch", "prompt", "new")  # those that are always shown


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The values of each axis."""

    backend: Sequence[BackendName | None] = (None,)
    quant: Sequence[Quant | None] = (None,)
    threads: Sequence[int | None] = (None,)
    adapters: Sequence[int] = (0,)
    prompt: Sequence[int]
    new: Sequence[int]
    batch: Sequence[int]

    def cells(self) -> Iterator[Settings]:
        """Every combination once; the batch varies fastest."""
        values = (dict.fromkeys(getattr(self, axis)) for axis in AXES)
        for combination in itertools.product(*values):
            yield Settings(**dict(zip(AXES, combination, strict=True)))


def why_left_out(settings: Settings, context: int) -> str:
    """Why a cell of a grid is not measured with a model of `context` positions; "": it is."""
    if settings.length > context:
        return f"{settings.length} tokens do not fit the model's context of {context}"
    if settings.adapters > settings.batch:
        return f"a batch of {settings.batch} cannot mix {settings.adapters} adapters"
    return ""


def varying(cells: Sequence[Settings]) -> list[str]:
    """The axes on which cells differ, outermost first."""
    return [axis for axis in AXES if len({getattr(cell, axis) for cell in cells}) > 1]


def shared(cells: Sequence[Settings]) -> dict[str, object]:
    """What all cells have in common, less what they leave to the run."""
    if not cells:
        return {}
    differ = varying(cells)
    return {
        axis: value
        for axis, value in asdict(cells[0]).items()
        if axis not in differ and value is not None
    }
