"""What result.json says of two backends that scored a text, and the table in the log."""

from __future__ import annotations

from collections.abc import Sequence

from lite_runner.output.comparison import aligned
from lite_runner.records import dataclass

SHOWN = 10  # windows in the log


@dataclass(frozen=True, kw_only=True)
class ComparedScorer:
    """What a backend made of the text, how fast it was and how large."""

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
