"""compare_backend= of a prediction: tokens, logits, speed and memory of two backends.

The second run's process: python -m lite_runner.prediction.comparison < job.json
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lite_runner.config.generate_checks import ComparedOptions, PredictOptions, SloraOptions
from lite_runner.output.comparison import (
    ComparedSide,
    ComparedText,
    Comparison,
    report,
    run_other,
    start,
)
from lite_runner.output.report import RowResult, RunFolder
from lite_runner.plan.generating import plan_generation
from lite_runner.plan.plan import Plan
from lite_runner.prediction.complete import RankResult, complete_share, write_results
from lite_runner.system import own_process
from lite_runner.system.files import temporary_folder
from lite_runner.system.signals import CutShort
from lite_runner.text.tokenizer import Tokenizer

PROGRAM = "lite_runner.prediction.comparison"
END = -1  # in place of the end token, which a row does not name


class StoredLogits:
    """Logits of each step of each text, float32, in the files of a folder."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        """`folder` is made where it is missing."""
        self.folder, self._vocab_size = folder, vocab_size
        folder.mkdir(exist_ok=True)

    def add(
        self,
        prompt: int,
        part: int,
        logits: NDArray[np.float32],
        scores: NDArray[np.floating[Any]],
    ) -> None:
        """Append the `logits` [vocab] of a step of text `part` of a prompt: see OnLogits."""
        with self._path(prompt, part).open("ab") as file:
            file.write(np.ascontiguousarray(logits, np.float32).tobytes())

    def steps(self, prompt: int, part: int) -> NDArray[np.float32]:
        """Logits [steps, vocab] of a text, a view of the file; no steps where none were kept."""
        path = self._path(prompt, part)
        if not path.is_file():
            return np.zeros((0, self._vocab_size), np.float32)
        return np.memmap(path, np.float32, "r").reshape(-1, self._vocab_size)

    def _path(self, prompt: int, part: int) -> Path:
        return self.folder / f"{prompt}-{part}.f32"


# A run: the name of its backend, its results and its logits.
Compared: TypeAlias = tuple[str, RankResult, StoredLogits]


def run_and_compare(plan: Plan, tokenizer: Tokenizer, folder: RunFolder, began: float) -> None:
    """Complete the prompts with both backends, and write the results of the first with the
    comparison. Files of the other one are in compare/ of the run folder.

    `began`: as `complete_share` takes it. Raises RunnerError, also where they differ, and CutShort
    after Ctrl-C; results are written before.
    """
    config = plan.config
    assert isinstance(config, ComparedOptions)
    with temporary_folder("compare", folder.path) as work:
        kept = [StoredLogits(work / name, plan.decoder.vocab_size) for name in ("mine", "other")]
        mine = complete_share(plan, tokenizer, folder, began, on_logits=kept[0].add)
        comparison = None
        try:
            if not mine.interrupted:
                other = _other_backend(config, folder.path / "compare", kept[1])
                comparison = compare(
                    (config.backend, mine, kept[0]),
                    other,
                    tolerance=config.tolerance,
                    returns=plan.work.generation.num_return_sequences,
                )
        finally:
            write_results(plan, mine, tokenizer, folder, len(mine.rows), comparison)
    if comparison is None:
        raise CutShort
    report(comparison, config, folder.path)


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
    logits: tuple[StoredLogits, StoredLogits],
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
    """Distance of both argmaxes in the logits of the first."""
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


def _other_backend(config: ComparedOptions, folder: Path, logits: StoredLogits) -> Compared:
    """The run of compare_backend=. Raises RunnerError if it fails."""
    assert config.compare_backend is not None
    answer = run_other(PROGRAM, config, folder, logits=str(logits.folder))
    return config.compare_backend, RankResult.from_bytes(answer["result"]), logits


def answer(job: Mapping[str, Any]) -> dict[str, Any]:
    """The result of a job, whose logits are written to its folder. Raises RunnerError."""
    began = time.perf_counter()
    start(job)
    kind = PredictOptions if job["config"]["run_mode"] == "predict" else SloraOptions
    config = kind.from_dict(job["config"])
    plan = plan_generation(config)
    assert plan.tokenizer is not None
    folder = RunFolder(Path(job["folder"]))
    logits = StoredLogits(Path(job["logits"]), plan.decoder.vocab_size)
    result = complete_share(plan, plan.tokenizer, folder, began, on_logits=logits.add)
    return {"result": result.to_bytes().decode("ascii")}


if __name__ == "__main__":
    sys.exit(own_process.serve(answer))
