"""compare_backend=: the run once more with another backend, and the differences between the two.

The second run is in a process of its own (run_modes/__main__.py), so that its memory and speed are
its own. The logits or log-likelihoods of each run are kept in a folder until both are compared.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lite_runner import progress
from lite_runner.architectures.quantization import Quant
from lite_runner.config.schema import CompareOptions
from lite_runner.config.sections import ModelSource
from lite_runner.errors import RunnerError
from lite_runner.model import ModelFiles
from lite_runner.model.locate import locate
from lite_runner.output import RESULT, RunFolder
from lite_runner.output.completions import logits_file
from lite_runner.output.scoring import LIKELIHOODS, Window, windows
from lite_runner.plan import Plan
from lite_runner.plugins import registered
from lite_runner.records import dataclass
from lite_runner.system import own_process
from lite_runner.system.files import temporary_folder

PROGRAM = "lite_runner.run_modes"
END = -1  # in place of the end token, which a row does not name
SHOWN = 10  # windows in the log

Results: TypeAlias = Sequence[Mapping[str, Any]]  # result.json of both runs
Values: TypeAlias = Sequence[Path]  # folders of the values of both
# Figures of a backend in the log: heading, key, format.
Figures: TypeAlias = Sequence[tuple[str, str, str]]
_TIMES = (("load s", "load_s", ".1f"), ("compile s", "compile_s", ".1f"))
_MEMORY = ("MiB", "peak_rss_mib", ".0f")


@contextmanager
def compared(plan: Plan, folder: RunFolder) -> Iterator[None]:
    """Context of a run that writes a result. With compare_backend= the other backend runs after it,
    and the comparison is added to the result; the other's files are in compare/ of the folder.

    Raises RunnerError, also where the two differ.
    """
    config = plan.config
    if not isinstance(config, CompareOptions) or (asked := config.compared) is None:
        yield
        return
    other_config = asked.to_dict()
    if asked.backend == "native":
        other_config["quant"] = _quant_of_other(asked.source, plan.model)
    with temporary_folder("compare", folder.path) as work:
        folder.values = work / "mine"
        folder.values.mkdir()
        yield
        other = RunFolder(folder.path / "compare", work / "other")
        _run_other(other_config, other)
        comparison = _compare(plan, config.tolerance, folder, other)
    assert folder.result is not None
    folder.write_result(replace(folder.result, comparison=comparison))
    for line in comparison.table():
        progress.note(line)
    if not comparison.same:
        differing = sum(part.differs for part in comparison.parts)
        differ = comparison.differ.format(config.backend, config.tolerance)
        raise RunnerError(
            f"compare_backend={config.compare_backend}: {differing} of"
            f" {len(comparison.parts)} {differ}",
            f"the table and {folder.path / RESULT} say where",
        )


def _quant_of_other(source: ModelSource, files: ModelFiles) -> Quant | None:
    """The quant= of the other's `source`, the run's own having `files`: blocks of a GGUF file have
    inputs as fine as of a run that is compared, see ModelSource.compared. Raises RunnerError."""
    if source.quant is not None:
        return source.quant
    if files.exported is not None:  # the checkpoint that it was made from is not located yet
        files = locate(replace(source, compared=True))
    return files.quantization.quant if files.quantization.keeps_blocks else None


def _run_other(config: dict[str, Any], folder: RunFolder) -> None:
    """Run a config, as plain data, in another process. Raises RunnerError where that fails."""
    assert folder.values is not None
    folder.path.mkdir()
    folder.values.mkdir()
    name = config["backend"]
    if "output_format" in config:  # MindFormers' writes the texts to the current folder
        config["output_format"] = "text"
    job = {
        "config": config,
        "plugins": registered(),
        "folder": str(folder.path),
        "values": str(folder.values),
    }
    with progress.step(f"compare with {name}"):
        answer = own_process.ask(PROGRAM, job)
    if "error" in answer:
        raise RunnerError(f"compare_backend={name}: {answer['error']}")


def _compare(
    plan: Plan, tolerance: float, mine: RunFolder, other: RunFolder
) -> TextComparison | ScoreComparison:
    assert mine.values is not None and other.values is not None
    results = [json.loads((one.path / RESULT).read_bytes()) for one in (mine, other)]
    values = mine.values, other.values
    if "evaluation" in results[0]:
        return compare_scores(results, values, tolerance=tolerance)
    returns = plan.work.generation.num_return_sequences
    vocab_size = plan.decoder.vocab_size
    return compare_texts(
        results, values, tolerance=tolerance, returns=returns, vocab_size=vocab_size
    )


@dataclass(frozen=True, kw_only=True)
class ComparedText:
    """One text of both backends."""

    prompt: int
    part: int  # of the prompt's texts
    equal: int  # tokens before the first that differs; an end token counts
    tokens: int  # of the longer text
    # Largest absolute difference of logits, up to the first token that differs; None without
    # logits.
    logit_difference: float | None
    gap: float | None  # between both choices where they differ, in the first backend's logits
    differs: bool  # beyond the tolerance

    @property
    def verdict(self) -> str:
        """One word for the table."""
        if self.differs:
            return "DIFFERS"
        return "same" if self.equal == self.tokens else "same, except for a near tie"


@dataclass(frozen=True, kw_only=True)
class TextComparison:
    """Two backends with the same prompts, of which the first is the run's."""

    tolerance: float
    same: bool
    sides: Sequence[Mapping[str, Any]]  # speed and memory; None where not measured
    texts: Sequence[ComparedText]
    differ: ClassVar[str] = "texts differ from backend={} by more than compare_tolerance={:g}"

    @property
    def parts(self) -> Sequence[ComparedText]:
        return self.texts

    def table(self) -> list[str]:
        columns = ("prompt", "equal tokens", "logits differ by", "gap there", "")
        texts = [
            (
                str(one.prompt) if not one.part else f"{one.prompt}.{one.part}",
                f"{one.equal} of {one.tokens}",
                _figure(one.logit_difference, ".2g"),
                _figure(one.gap, ".2g"),
                one.verdict,
            )
            for one in self.texts
        ]
        rates = (("prefill tok/s", "prefill_tok_s", ".1f"), ("decode tok/s", "decode_tok_s", ".1f"))
        sides = _sides(self.sides, (*_TIMES, *rates, _MEMORY))
        return [*sides, *aligned([columns, *texts])]


def compare_texts(
    results: Results, values: Values, *, tolerance: float, returns: int, vocab_size: int
) -> TextComparison:
    """Two runs of the same prompts; `returns`: texts per prompt."""
    texts = []
    for place, rows in enumerate(zip(*(one["results"] for one in results), strict=True)):
        prompt, part = divmod(place, returns)
        tokens = [_tokens(row) for row in rows]
        logits = [_logits(logits_file(one, prompt, part), vocab_size) for one in values]
        texts.append(_compared_text(prompt, part, tokens, logits, tolerance=tolerance))
    times = ("load_s", "compile_s", "prefill_tok_s", "decode_tok_s")
    sides = [
        {
            **_engine(one),
            **{name: one["timing"][name] for name in times},
            "peak_rss_mib": one["peak_rss_mib"],
        }
        for one in results
    ]
    same = not any(text.differs for text in texts)
    return TextComparison(tolerance=tolerance, same=same, sides=sides, texts=texts)


def _compared_text(
    prompt: int,
    part: int,
    rows: Sequence[Sequence[int]],
    logits: Sequence[NDArray[np.float32]],
    *,
    tolerance: float,
) -> ComparedText:
    """One text of both: logits count as long as the tokens before them are equal."""
    my_logits, other_logits = logits
    tokens = max(map(len, rows))
    pairs = zip(*rows, strict=False)
    equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    steps = min(len(my_logits), len(other_logits), equal + 1)
    difference = gap = None
    if steps:
        difference = max(
            float(np.abs(my_logits[step] - other_logits[step]).max()) for step in range(steps)
        )
    if equal < tokens and steps > equal:
        here = my_logits[equal]
        gap = float(here.max() - here[int(other_logits[equal].argmax())])
    near_tie = gap is not None and gap <= tolerance
    differs = (equal < tokens and not near_tie) or (
        difference is not None and not difference <= tolerance
    )
    return ComparedText(
        prompt=prompt,
        part=part,
        equal=equal,
        tokens=tokens,
        logit_difference=difference,
        gap=gap,
        differs=differs,
    )


def _tokens(row: Mapping[str, Any]) -> list[int]:
    return [*row["token_ids"], END] if row["finish_reason"] == "stop" else row["token_ids"]


def _logits(path: Path, vocab_size: int) -> NDArray[np.float32]:
    """The logits [steps, vocab] in a file, a view of it; no steps where none were kept."""
    if not path.is_file():
        return np.zeros((0, vocab_size), np.float32)
    return np.memmap(path, np.float32, "r").reshape(-1, vocab_size)


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
    sides: Sequence[Mapping[str, Any]]  # speed, memory and perplexity
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
        first, second = (f"nll {one['backend']}" for one in self.sides)
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
        scores = (("nll", "nll", ".5f"), ("perplexity", "perplexity", ".4f"))
        sides = _sides(self.sides, (*_TIMES, ("tok/s", "tok_s", ".1f"), _MEMORY, *scores))
        lines = [*sides, *aligned([columns, *rows])]
        if len(self.windows) > SHOWN:
            lines.append(
                f"the {SHOWN} of {len(self.windows)} windows that differ most; result.json has all"
            )
        return lines


def compare_scores(results: Results, values: Values, *, tolerance: float) -> ScoreComparison:
    """Two runs that scored the same text."""
    mine, other = (np.fromfile(folder / LIKELIHOODS) for folder in values)
    found, at = [], 0
    text = results[0]["evaluation"]
    for window in windows(text["tokens"], text["window"], text["stride"]):
        here = slice(at, at + window.end - window.first)
        found.append(_compared_window(window, mine[here], other[here], tolerance))
        at = here.stop
    sides = []
    for one in results:
        scored = one["evaluation"]
        side = {
            **_engine(one),
            **{name: one["timing"][name] for name in ("load_s", "compile_s")},
            "tok_s": scored["tok_s"],
            "peak_rss_mib": one["peak_rss_mib"],
            "nll": math.log(scored["perplexity"]),
            "perplexity": scored["perplexity"],
        }
        sides.append(side)
    same = not any(window.differs for window in found)
    return ScoreComparison(tolerance=tolerance, same=same, sides=sides, windows=found)


def _compared_window(
    window: Window, mine: NDArray[np.float64], other: NDArray[np.float64], tolerance: float
) -> ComparedWindow:
    difference = np.abs(mine - other)
    largest = float(difference.max())
    return ComparedWindow(
        first=window.first,
        tokens=len(mine),
        nll=[-float(mine.mean()), -float(other.mean())],
        difference=largest,
        token=window.first + int(difference.argmax()),
        differs=not largest <= tolerance,
    )


def _engine(result: Mapping[str, Any]) -> dict[str, str]:
    return {name: result[name] for name in ("backend", "engine")}


def _sides(sides: Sequence[Mapping[str, Any]], figures: Figures) -> list[str]:
    """The table of both backends."""
    heads = ("backend", "engine", *(head for head, _, _ in figures))
    rows = [
        (side["backend"], side["engine"], *(_figure(side[key], form) for _, key, form in figures))
        for side in sides
    ]
    return aligned([heads, *rows])


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table, its columns as wide as their longest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
