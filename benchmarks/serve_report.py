"""The tables and the chart of benchmarks/serve.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from serve_load import SHARES, Case, Figures

from lite_runner.bench.charts import Drawing, Line, Panel, draw
from lite_runner.bench.report import Spread, number

Found = Sequence[tuple[Case, Figures]]
BEGIN, END = "<!-- made by benchmarks/serve.py -->", "<!-- to here -->"
ALT = "tokens/s, time to the first token and time per token over the rate of requests"
PREFIXES = {"own": "prompts of their own", "shared": "half of each prompt the same"}


def tables(found: Found) -> str:
    """In Markdown: one for each number of adapters and kind of prompt."""
    shares = ", ".join(f"p{share}" for share in SHARES)
    times = [f"{what}, ms: {shares}" for what in ("first token", "per token")]
    head = ("requests/s", "server", "tokens/s", *times)
    parts = []
    for group in dict.fromkeys((case.adapters, case.prefix) for case, _ in found):
        lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
        for case, each in found:
            if (case.adapters, case.prefix) == group:
                failed = f" ({each.failed} failed)" if each.failed else ""
                row = [f"{case.rate:g}", case.server, f"{each.tokens_s:.0f}{failed}"]
                row += [" / ".join(map(number, ms)) or "-" for ms in (each.first_ms, each.token_ms)]
                lines.append(f"| {' | '.join(row)} |")
        parts.append("\n".join([f"{_title(*group)}:", "", *lines]))
    return "\n\n".join(parts)


def chart(found: Found) -> Drawing:
    """Over the rate of requests; a row of panels for each kind of prompt."""
    panels = []
    for prefix in dict.fromkeys(case.prefix for case, _ in found):
        some = [(case, each) for case, each in found if case.prefix == prefix]
        speed, first, token = ({} for _ in range(3))  # type: dict[str, list[tuple[float, Spread]]]
        for case, each in some:
            name = f"{case.server}{_with(case.adapters)}"
            speed.setdefault(name, []).append((case.rate, Spread.of([each.tokens_s])))
            if each.first_ms and each.token_ms:
                first.setdefault(name, []).append((case.rate, Spread.of([each.first_ms[1]])))
                token.setdefault(name, []).append((case.rate, Spread.of([each.token_ms[1]])))
        for lines, title, unit in (
            (speed, PREFIXES[prefix], "tokens/s"),
            (first, "first token", f"p{SHARES[1]}, ms"),
            (token, "per token", f"p{SHARES[1]}, ms"),
        ):
            drawn = [Line(name, points) for name, points in lines.items()]
            # Milliseconds of servers that keep up and of those that do not.
            panels.append(Panel(title, "requests/s", unit, drawn, log="ms" in unit))
    return draw(panels)


def written_into(page: Path, found: Found, drawn: Path | None) -> None:
    """Replace what stands between the marks of a page by the tables, and the chart that was `drawn`
    beside it."""
    text = tables(found)
    if drawn is not None:
        text = f"![{ALT}]({drawn.with_suffix('.svg').name})\n\n{text}"
    whole = page.read_text(encoding="utf-8")
    before, begin, rest = whole.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{page}: has no place for the tables: {BEGIN} and {END}")
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}", encoding="utf-8")


def _title(adapters: int, prefix: str) -> str:
    return f"The base model{_with(adapters)}, {PREFIXES[prefix]}"


def _with(adapters: int) -> str:
    return f" with {adapters} adapter{'s' * (adapters > 1)}" if adapters else ""
