"""compare_backend=: the second run, and what result.json and the log say of both.

The second run is in a process of its own, so that its memory and speed are its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from lite_runner import progress
from lite_runner.config.schema import CompareOptions
from lite_runner.errors import RunnerError
from lite_runner.plan.backend import other_config
from lite_runner.plugins import register_plugins, registered
from lite_runner.records import dataclass
from lite_runner.system import own_process

SHOWN = 10  # windows in the log


def run_other(program: str, config: CompareOptions, folder: Path, **more: str) -> dict[str, Any]:
    """The answer of the module `program`, which calls `start`, to the job of compare_backend=; its
    files are in `folder`, which is made. `more` goes into the job. Raises RunnerError where it
    fails."""
    folder.mkdir()
    job = {
        "config": other_config(config).to_dict(),
        "plugins": registered(),
        "folder": str(folder),
        **more,
    }
    with progress.step(f"compare with {config.compare_backend}"):
        answer = own_process.ask(program, job)
    if "error" in answer:
        raise RunnerError(f"compare_backend={config.compare_backend}: {answer['error']}")
    return answer


def start(job: Mapping[str, Any]) -> None:
    """Make this process ready for the job of another one. Raises RunnerError."""
    progress.configure(verbosity=0)
    register_plugins(job["plugins"])


@dataclass(frozen=True, kw_only=True)
class ComparedSide:
    """Speed and memory of a backend; None where not measured."""

    backend: str
    engine: str
    load_s: float | None
    compile_s: float | None
    prefill_tok_s: float | None
    decode_tok_s: float | None
    peak_rss_mib: float


@dataclass(frozen=True, kw_only=True)
class ComparedText:
    """One text of both backends."""

    prompt: int
    part: int  # of the prompt's texts
    equal: int  # tokens before the first that differs; an end token counts
    tokens: int  # of the longer text
    # Largest absolute difference of logits, up to the first token that differs; None: none to be
    # had.
    logit_difference: float | None
    gap: float | None  # between both choices where they differ, in the first backend's logits
    differs: bool  # beyond the tolerance


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two backends with the same prompts, of which the first is the run's."""

    tolerance: float
    same: bool
    sides: Sequence[ComparedSide]
    texts: Sequence[ComparedText]
    differ: ClassVar[str] = "texts differ from backend={} by more than compare_tolerance={:g}"

    @property
    def parts(self) -> Sequence[ComparedText]:
        return self.texts

    def table(self) -> list[str]:
        """As lines of text."""
        heads = ("backend", "engine", "load s", "compile s", "prefill tok/s", "decode tok/s", "MiB")
        sides = [
            (
                one.backend,
                one.engine,
                *map(_figure, (one.load_s, one.compile_s, one.prefill_tok_s, one.decode_tok_s)),
                f"{one.peak_rss_mib:.0f}",
            )
            for one in self.sides
        ]
        columns = ("prompt", "equal tokens", "logits differ by", "gap there", "")
        texts = [
            (
                str(one.prompt) if not one.part else f"{one.prompt}.{one.part}",
                f"{one.equal} of {one.tokens}",
                "-" if one.logit_difference is None else f"{one.logit_difference:.2g}",
                "-" if one.gap is None else f"{one.gap:.2g}",
                _verdict(one),
            )
            for one in self.texts
        ]
        return [*aligned([heads, *sides]), *aligned([columns, *texts])]


def _verdict(text: ComparedText) -> str:
    if text.differs:
        return "DIFFERS"
    return "same" if text.equal == text.tokens else "same, but for a near tie"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table, its columns as wide as their longest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


@dataclass(frozen=True, kw_only=True)
class ComparedScorer:
    """A backend's perplexity of the text, its speed and memory."""

    backend: str
    engine: str
    load_s: float
    compile_s: float
    tok_s: float
    peak_rss_mib: float
    nll: float  # mean negative natural log-likelihood of the scored tokens
    perplexity: float


@dataclass(frozen=True, kw_only=True)
class ComparedWindow:
    """One window of both backends."""

    first: int  # place of its first scored token
    tokens: int  # that are scored
    nll: Sequence[float]  # the mean, of both
    difference: float  # largest absolute one of a token's log-likelihood
    token: int  # its place
    differs: bool  # beyond the tolerance


@dataclass(frozen=True, kw_only=True)
class ScoreComparison:
    """Two backends with the same text, of which the first is the run's."""

    tolerance: float
    same: bool
    sides: Sequence[ComparedScorer]
    windows: Sequence[ComparedWindow]
    differ: ClassVar[str] = (
        "windows differ from backend={} by more than compare_tolerance={:g}"
        " in a token's log-likelihood"
    )

    @property
    def parts(self) -> Sequence[ComparedWindow]:
        return self.windows

    def table(self) -> list[str]:
        """As lines of text: of many windows those that differ most."""
        heads = (
            *("backend", "engine", "load s", "compile s", "tok/s", "MiB"),
            *("nll", "perplexity"),
        )
        sides = [
            (
                one.backend,
                one.engine,
                *(f"{figure:.1f}" for figure in (one.load_s, one.compile_s, one.tok_s)),
                f"{one.peak_rss_mib:.0f}",
                f"{one.nll:.5f}",
                f"{one.perplexity:.4f}",
            )
            for one in self.sides
        ]
        first, second = (f"nll {one.backend}" for one in self.sides)
        columns = ("tokens", first, second, "log-likelihoods differ by", "at token", "")
        most = sorted(self.windows, key=lambda one: one.difference, reverse=True)[:SHOWN]
        rows = [
            (
                f"{one.first} to {one.first + one.tokens - 1}",
                *(f"{nll:.5f}" for nll in one.nll),
                f"{one.difference:.2g}",
                str(one.token),
                "DIFFERS" if one.differs else "same",
            )
            for one in sorted(most, key=lambda one: one.first)
        ]
        lines = [*aligned([heads, *sides]), *aligned([columns, *rows])]
        if len(self.windows) > SHOWN:
            lines.append(
                f"the {SHOWN} of {len(self.windows)} windows that differ most; result.json has all"
            )
        return lines


AnyComparison: TypeAlias = Comparison | ScoreComparison


def report(comparison: AnyComparison, config: CompareOptions, folder: Path) -> None:
    """Log the table of a run. Raises RunnerError where the backends differ."""
    for line in comparison.table():
        progress.note(line)
    if not comparison.same:
        differing = sum(part.differs for part in comparison.parts)
        differ = comparison.differ.format(config.backend, config.tolerance)
        raise RunnerError(
            f"compare_backend={config.compare_backend}: {differing} of"
            f" {len(comparison.parts)} {differ}",
            f"the table and {folder / 'result.json'} say where",
        )
