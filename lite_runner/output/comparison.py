"""What result.json says of two backends, and the table in the log."""

from __future__ import annotations

from collections.abc import Sequence

from lite_runner.records import dataclass


@dataclass(frozen=True, kw_only=True)
class ComparedSide:
    """How fast a backend was, and how large; None where not measured."""

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
