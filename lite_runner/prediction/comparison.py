"""Two backends side by side: tokens, logits, speed, memory."""

from __future__ import annotations

from itertools import takewhile
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from lite_runner.output.comparison import ComparedSide, ComparedText, Comparison
from lite_runner.output.merge import RankResult
from lite_runner.output.report import RowResult
from lite_runner.prediction.kept_logits import KeptLogits

# A run: the name of its backend, its results and its logits.
Compared: TypeAlias = tuple[str, RankResult, KeptLogits]
END = -1  # in place of the end token, which a row does not name


def compare(
    mine: Compared,
    other: Compared,
    *,
    tolerance: float,
    returns: int,
) -> Comparison:
    """Two runs of the same prompts; `returns`: texts per prompt."""
    pairs = zip(mine[1].rows, other[1].rows, strict=True)
    texts = [
        _compare_text(
            (place // returns, place % returns), rows, (mine[2], other[2]), tolerance=tolerance
        )
        for place, rows in enumerate(pairs)
    ]
    sides = [_side(backend, result) for backend, result, _ in (mine, other)]
    same = not any(text.differs for text in texts)
    return Comparison(tolerance=tolerance, same=same, sides=sides, texts=texts)


def _compare_text(
    key: tuple[int, int],
    rows: tuple[RowResult, RowResult],
    logits: tuple[KeptLogits, KeptLogits],
    *,
    tolerance: float,
) -> ComparedText:
    """One text of both: logits count as long as the tokens before them are equal."""
    mine, other = (_tokens(row) for row in rows)
    tokens = max(len(mine), len(other))
    pairs = zip(mine, other, strict=False)
    equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    ours, theirs = (one.steps(*key) for one in logits)
    steps = min(len(ours), len(theirs), equal + 1)
    difference = gap = None
    if steps:
        difference = max(float(np.abs(ours[step] - theirs[step]).max()) for step in range(steps))
    if equal < tokens and steps > equal:
        gap = _gap(ours[equal], theirs[equal])
    near_tie = gap is not None and gap <= tolerance
    differs = (equal < tokens and not near_tie) or (
        difference is not None and not difference <= tolerance
    )
    return ComparedText(
        prompt=key[0],
        part=key[1],
        equal=equal,
        tokens=tokens,
        logit_difference=difference,
        gap=gap,
        differs=differs,
    )


def _gap(mine: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """How far the favourites of both are apart in the logits of the first."""
    return float(mine.max() - mine[int(other.argmax())])


def _tokens(row: RowResult) -> list[int]:
    return [*row.token_ids, END] if row.finish_reason == "stop" else list(row.token_ids)


def _side(backend: str, result: RankResult) -> ComparedSide:
    timing = result.timing()
    return ComparedSide(
        backend=backend,
        engine=result.engine,
        load_s=timing.load_s,
        compile_s=timing.compile_s,
        prefill_tok_s=timing.prefill_tok_s,
        decode_tok_s=timing.decode_tok_s,
        peak_rss_mib=result.peak_rss_mib,
    )
