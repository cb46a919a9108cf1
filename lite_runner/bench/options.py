"""The section `bench` of a run's config."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from lite_runner.bench.grid import AXES, BackendName, Grid
from lite_runner.config.fields import Fault, Range, fault
from lite_runner.config.quantization import Quant
from lite_runner.config.ranges import Count, Index

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
