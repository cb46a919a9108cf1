"""Completions of a plan's prompts: computed and printed by each replica, merged, written to files.

Texts are streamed, one after another, or JSON lines. On a terminal a title line names the prompt of
each of several.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from lite_runner import progress
from lite_runner.backends import Completer
from lite_runner.config.generation import GenerationConfig
from lite_runner.config.prompt import BASE
from lite_runner.config.sections import Ranks
from lite_runner.errors import EnvironmentFault
from lite_runner.generation import (
    Completion,
    Engine,
    Generation,
    GenerationTiming,
    Generator,
    logprobs_of,
    prompt_logprobs_of,
)
from lite_runner.model import explained_nonfinite
from lite_runner.output import (
    ANSWERS,
    AdapterReport,
    AdapterUse,
    Result,
    RowResult,
    RunFolder,
    Timing,
    peak_rss_mib,
)
from lite_runner.plan import Job, Plan
from lite_runner.plan.resources import open_run
from lite_runner.records import dataclass
from lite_runner.system.signals import CutShort
from lite_runner.text.spelling import StopChecker
from lite_runner.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from lite_runner.backends.adapter_slots import AdapterSlots

SPEED_INTERVAL_S = 0.5
# Between writes of streamed text: each may cost as much as choosing a token.
WRITE_INTERVAL_S = 0.05
TITLE_CHARS = 72  # of a prompt in a title line

Format = Literal["text", "jsonl", "mindformers"]


def show(row: RowResult, place: int, of_all: int, form: Format, returns: int = 1) -> None:
    """Print the text at index `place` of `of_all` texts of a run, `returns` per prompt.

    MindFormers' format has all texts of a prompt in one, and is printed once a run is over.
    """
    if form == "mindformers":
        return
    if form == "jsonl":
        line: dict[str, Any] = {
            "id": place // returns if row.id is None else row.id,
            "prompt": row.prompt,
            "text": row.text,
            "finish_reason": row.finish_reason,
            "tokens": row.generated_tokens,
            "adapter": row.adapter,
        }
        for name in ("logprobs", "prompt_logprobs"):
            if (found := getattr(row, name)) is not None:
                line[name] = found
        progress.text(json.dumps(line, ensure_ascii=False) + "\n")
        return
    if of_all > 1:
        gap = "\n" if place else ""
        progress.title(f"{gap}[{place + 1}/{of_all}] {_title(row)}")
    progress.text(row.text + "\n")


def _title(row: RowResult) -> str:
    prompt = " ".join(row.prompt.split())
    short = prompt if len(prompt) <= TITLE_CHARS else prompt[: TITLE_CHARS - 3] + "..."
    name = "" if row.id is None else f"{row.id}: "
    return f"{name}{short}" + (f" (adapter {row.adapter})" if row.adapter else "")


class Printer:
    """Decodes the sequences of a job, cuts them at stop strings, and prints them.

    A single text is streamed; of several, each is printed when it and all before it are finished.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        job: Job,
        *,
        of_all: int,
        stream: bool,
        form: Format,
        step: progress.Step | None,
    ) -> None:
        """`of_all`: texts of the whole run, of which `job` may be a replica's share."""
        self._job, self._of_all, self._form, self._step = job, of_all, form, step
        self._returns = job.generation.num_return_sequences
        self._checkers = {
            (prompt, part): StopChecker(tokenizer, options.stop)
            for prompt, options in enumerate(job.options, job.first_index)
            for part in range(self._returns)
        }
        self._waiting = deque(self._checkers)
        self._rows: dict[tuple[int, int], RowResult] = {}
        self._beams = job.generation.num_beams > 1  # their tokens may change until the end
        self._in_turn = stream and not self._beams
        self._live = self._in_turn and of_all == 1 and form == "text"
        self._unwritten, self._written_at = "", 0.0  # of streamed text
        self._speed = Speedometer()

    def on_token(self, prompt: int, part: int, token: int) -> bool:
        """Add a token; True where a stop string is complete."""
        checker = self._checkers[prompt, part]
        self._stream(checker.put(token))
        self._speed.count()
        return checker.stopped

    def on_finish(self, completion: Completion) -> None:
        if self._step is not None:
            self._step.advance()
        if self._beams:
            return
        self._finish(completion)
        if self._in_turn:
            self._show()

    def rows(self, completions: Sequence[Completion]) -> list[RowResult]:
        """The result of each completion; those not printed yet are printed."""
        for completion in completions:
            key = (completion.prompt_index, completion.return_index)
            if key in self._rows:
                continue
            if self._beams:
                for token in completion.token_ids:
                    self._checkers[key].put(token)
            self._finish(completion)
        self._show()
        return [self._rows[one.prompt_index, one.return_index] for one in completions]

    def flush(self) -> None:
        """Write the rest of streamed text."""
        progress.text(self._unwritten)
        self._unwritten, self._written_at = "", time.monotonic()

    def _finish(self, completion: Completion) -> None:
        key = (completion.prompt_index, completion.return_index)
        self._stream(self._checkers[key].finish())
        self.flush()
        self._rows[key] = row_of(self._job, completion, self._checkers[key].text)

    def _stream(self, text: str) -> None:
        if not self._live:
            return
        self._unwritten += text
        if self._unwritten and time.monotonic() - self._written_at >= WRITE_INTERVAL_S:
            self.flush()

    def _show(self) -> None:
        while self._waiting and self._waiting[0] in self._rows:
            prompt, part = key = self._waiting.popleft()
            if self._live:
                progress.text("\n")
            else:
                place = prompt * self._returns + part
                show(self._rows[key], place, self._of_all, self._form, self._returns)


def row_of(job: Job, completion: Completion, text: str) -> RowResult:
    place = completion.prompt_index - job.first_index
    request = job.requests[place]
    return RowResult(
        prompt=request.text,
        text=text,
        token_ids=completion.token_ids,
        prompt_tokens=len(job.tokens[place]),
        generated_tokens=len(completion.token_ids),
        finish_reason=completion.finish_reason,
        adapter=job.adapter_name(completion.prompt_index),
        id=request.id,
        messages=request.chat("") if request.messages else None,
        cached_tokens=completion.cached_tokens,
        logprobs=logprobs_of(completion),
        prompt_logprobs=prompt_logprobs_of(completion, job.tokens[place]),
    )


class Speedometer:
    """Shows tokens per second since the first token, in the status line."""

    def __init__(self) -> None:
        self._tokens = 0
        self._began = self._shown_at = 0.0

    def count(self) -> None:
        now = time.monotonic()
        if not self._tokens:
            self._began = self._shown_at = now
        self._tokens += 1
        if now - self._shown_at >= SPEED_INTERVAL_S:
            self._shown_at = now
            rate = (self._tokens - 1) / (now - self._began)
            progress.status(f"generate: {self._tokens} tokens, {rate:.1f} tokens/s")


def advice(rows: Sequence[RowResult], job: Job, *, chat: bool, tokenizer: Tokenizer) -> list[str]:
    """Hints about completions that a length limit cut, or that need chat=true."""
    lines = []
    returns = job.generation.num_return_sequences
    each = job.options
    cut = [
        _limit(row, each[place // returns])
        for place, row in enumerate(rows)
        if row.finish_reason == "length"
    ]
    if cut:
        which = "the text was" if len(rows) == 1 else f"{len(cut)} of {len(rows)} texts were"
        limits = ", ".join(dict.fromkeys(cut))
        lines.append(f"{which} cut at {limits}: a larger max_new_tokens= continues it")
    at_once = any(
        row.finish_reason == "stop" and not row.text.strip() and not row.messages for row in rows
    )
    if at_once and tokenizer.has_chat_template and not chat:
        lines.append("the model ended a text at once, and has a chat template: try chat=true")
    return lines


def _limit(row: RowResult, options: GenerationConfig) -> str:
    if row.generated_tokens == options.max_new_tokens:
        return f"max_new_tokens={options.max_new_tokens}"
    length = row.prompt_tokens + row.generated_tokens
    return f"{length} tokens, the prompt's {row.prompt_tokens} included"


def summary(result: Result, folder: RunFolder) -> str:
    timing = result.timing
    tokens = sum(row.generated_tokens for row in result.results)
    count = "1 token" if tokens == 1 else f"{tokens} tokens"
    parts = [count, f"load {timing.load_s:.1f} s", f"compile {timing.compile_s:.1f} s"]
    if timing.prefill_tok_s:
        parts.append(f"prefill {timing.prefill_tok_s:.0f} tokens/s")
    if timing.decode_tok_s:
        parts.append(f"decode {timing.decode_tok_s:.1f} tokens/s")
    return f"{', '.join(parts)}; results in {folder.path}"


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """The results of one replica. Seconds of the steps exclude compiling."""

    rows: Sequence[RowResult] = ()  # in the order of the prompts
    engine: str = ""
    generation: GenerationTiming = field(default_factory=GenerationTiming)
    load_s: float = 0.0
    compile_s: float = 0.0
    prepare_s: float = 0.0  # the part of compile_s before the first token
    adapters: AdapterReport | None = None
    peak_rss_mib: float = field(default_factory=peak_rss_mib)  # of all ranks of the replica
    interrupted: bool = False  # by Ctrl-C

    def timing(self) -> Timing:
        """Times and rates of these rows."""
        measured, first = self.generation, self.generation.time_to_first_token_s
        return Timing(
            load_s=self.load_s,
            compile_s=self.compile_s,
            prefill_s=measured.prefill_s,
            decode_s=measured.decode_s,
            prefill_tok_s=measured.prefill_tok_s,
            decode_tok_s=measured.decode_tok_s,
            time_to_first_token_s=None if first is None else self.load_s + self.prepare_s + first,
            drafted_tokens=measured.drafted_tokens,
            accepted_tokens=measured.accepted_tokens,
            preemptions=measured.preemptions,
        )

    def to_bytes(self) -> bytes:
        """As ASCII JSON, which holds any text."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> RankResult:
        raw = json.loads(data)
        rows = [RowResult(**row) for row in raw.pop("rows")]
        generation = GenerationTiming(**raw.pop("generation"))
        adapters = raw.pop("adapters")
        if adapters is not None:
            used = {name: AdapterUse(**use) for name, use in adapters.pop("used").items()}
            adapters = AdapterReport(used=used, **adapters)
        return cls(rows=rows, generation=generation, adapters=adapters, **raw)


def wait_for_all(ranks: Ranks) -> None:
    """Barrier, so that waiting for other ranks is not measured as work."""
    if ranks.size > 1:
        from lite_runner.backends import collectives

        collectives.gather(b"")


def gather(mine: RankResult, ranks: Ranks) -> RankResult:
    """All-gather the results and merge them, on every rank."""
    if ranks.size == 1:
        return mine
    from lite_runner.backends import collectives

    every = [RankResult.from_bytes(data) for data in collectives.gather(mine.to_bytes())]
    return merge(every, ranks.tensor)


def merge(results: Sequence[RankResult], ranks_per_replica: int) -> RankResult:
    """The results of all ranks as one. The ranks of a replica have the same rows; replicas run
    concurrently. The time to the first token is the first replica's."""
    replicas = results[::ranks_per_replica]
    first = replicas[0]
    return RankResult(
        rows=[row for one in replicas for row in one.rows],
        engine=first.engine,
        generation=GenerationTiming(
            prefill_s=max(one.generation.prefill_s for one in replicas),
            decode_s=max(one.generation.decode_s for one in replicas),
            time_to_first_token_s=first.generation.time_to_first_token_s,
            prefill_tokens=sum(one.generation.prefill_tokens for one in replicas),
            decode_tokens=sum(one.generation.decode_tokens for one in replicas),
            drafted_tokens=sum(one.generation.drafted_tokens for one in replicas),
            accepted_tokens=sum(one.generation.accepted_tokens for one in replicas),
            preemptions=sum(one.generation.preemptions for one in replicas),
        ),
        load_s=max(one.load_s for one in replicas),
        compile_s=max(one.compile_s for one in replicas),
        prepare_s=max(one.prepare_s for one in replicas),
        adapters=_adapters([one.adapters for one in replicas], ranks_per_replica),
        peak_rss_mib=round(sum(one.peak_rss_mib for one in results), 1),
        interrupted=any(one.interrupted for one in replicas),
    )


def _adapters(
    reports: Sequence[AdapterReport | None], ranks_per_replica: int
) -> AdapterReport | None:
    """The merged adapter report; a replica without prompts has none."""
    present = [report for report in reports if report is not None]
    if not present:
        return None
    used: dict[str, AdapterUse] = {}
    for report in present:
        for name, use in report.used.items():
            before = used.get(name, AdapterUse(use.modules))
            used[name] = AdapterUse(
                use.modules,
                before.prompts + use.prompts,
                before.prompt_tokens + use.prompt_tokens,
                before.generated_tokens + use.generated_tokens,
                before.seconds + use.seconds,
            )
    return AdapterReport(
        places=max(report.places for report in present),
        pool_bytes=sum(report.pool_bytes for report in present) * ranks_per_replica,
        loads=sum(report.loads for report in present),
        used=used,
    )


@dataclass(frozen=True)
class Display:
    """How completions are shown."""

    stream: bool
    form: Format
    chat: bool  # prompts are messages


def complete(
    plan: Plan,
    folder: RunFolder,
    display: Display,
    began: float,
    interrupted: Callable[[], bool] | None = None,
) -> None:
    """Complete the prompts of a plan, print and write the results; rank 0 those of all ranks.

    See `complete_share`. Raises RunnerError, and CutShort where it was interrupted.
    """
    tokenizer = plan.tokenizer
    assert tokenizer is not None, "missing in a dry run alone"
    mine = complete_share(plan, tokenizer, folder, display, began, interrupted)
    whole = gather(mine, plan.ranks)
    if plan.ranks.rank == 0:
        write_results(plan, whole, tokenizer, folder, display, shown=len(mine.rows))
    if whole.interrupted:
        raise CutShort


def complete_share(
    plan: Plan,
    tokenizer: Tokenizer,
    folder: RunFolder,
    display: Display,
    began: float,
    interrupted: Callable[[], bool] | None = None,
) -> RankResult:
    """The completions of this replica's share of the prompts, shown as they come; their logits are
    kept in folder.values, if there is one.

    `began`: the time (time.perf_counter()) from which loading counts. `interrupted` is called
    before each step. Raises RunnerError.
    """
    ranks = plan.ranks
    job = plan.work.share(ranks)
    if not job.tokens:  # there are fewer prompts than replicas
        wait_for_all(ranks)
        return RankResult()
    on_logits = None if folder.values is None else partial(_keep_logits, folder.values)
    counted = progress.step("generate", job.texts, "texts") if job.texts > 1 else nullcontext()
    with closing(_open_generator(plan, job, folder)) as generator:
        load_s = plan.seconds + time.perf_counter() - began
        generator.prepare()
        wait_for_all(ranks)
        prepare_s = generator.compile_s
        with explained_nonfinite(plan.model, ranks), counted as step:
            printer = Printer(
                tokenizer,
                job,
                of_all=plan.work.texts,
                stream=display.stream,
                form=display.form,
                step=step,
            )
            try:
                outcome = generator.generate(
                    job.scheduler_requests(keep_logits=on_logits is not None),
                    first_index=job.first_index,
                    on_token=printer.on_token,
                    on_finish=printer.on_finish,
                    on_logits=on_logits,
                    interrupted=interrupted,
                )
            finally:
                printer.flush()
        rows = printer.rows(outcome.completions)
        return RankResult(
            rows=rows,
            engine=generator.engine,
            generation=outcome.timing,
            load_s=load_s,
            compile_s=generator.compile_s,
            prepare_s=prepare_s,
            adapters=adapter_report(job, rows, outcome, generator.adapters),
            interrupted=outcome.interrupted,
        )


def logits_file(folder: Path, prompt: int, part: int) -> Path:
    """The file of the logits [steps, vocab] of text `part` of a prompt, float32."""
    return folder / f"{prompt}-{part}.f32"


def _keep_logits(
    folder: Path,
    prompt: int,
    part: int,
    logits: NDArray[np.float32],
    scores: NDArray[np.floating[Any]],
) -> None:
    """Append the logits [vocab] of a step. See OnLogits."""
    with logits_file(folder, prompt, part).open("ab") as file:
        file.write(np.ascontiguousarray(logits, np.float32).tobytes())


def _open_generator(plan: Plan, job: Job, folder: RunFolder) -> Generator:
    """The generator of a plan with its weights, for this replica's `job`. Raises RunnerError."""
    opened, settings = open_run(plan, job, folder.path), plan.settings
    if isinstance(opened, Completer):
        from lite_runner.output.completer import CompleterGenerator

        return CompleterGenerator(opened)
    cached = settings.prefix_cache != "none"
    return Engine(opened, prefix_cache=cached, speculate=settings.looks_up)


def adapter_report(
    job: Job, rows: Sequence[RowResult], outcome: Generation, slots: AdapterSlots | None
) -> AdapterReport | None:
    """Prompts, tokens and seconds of each adapter; None for a run without adapters."""
    if job.adapters is None:
        return None
    used = {}
    wanted = [job.adapters.name(place) for place in range(len(job.tokens))]
    for adapter in (None, *job.adapters.adapters):
        name = None if adapter is None else adapter.name
        mine = [row for row in rows if row.adapter == name]
        used[name or BASE] = AdapterUse(
            modules=0 if adapter is None else len(adapter.pairs),
            prompts=wanted.count(name),
            prompt_tokens=sum(row.prompt_tokens for row in mine),
            generated_tokens=sum(row.generated_tokens for row in mine),
            seconds=outcome.adapter_s.get(name, 0.0),
        )
    if slots is None:
        return AdapterReport(0, 0, 0, used)
    return AdapterReport(slots.slots, slots.nbytes, slots.loads, used)


def write_results(
    plan: Plan,
    whole: RankResult,
    tokenizer: Tokenizer,
    folder: RunFolder,
    display: Display,
    shown: int,
) -> None:
    """Print the rows after the first `shown`, and write the results of all replicas."""
    job = plan.work
    returns = job.generation.num_return_sequences
    for place, row in enumerate(whole.rows[shown:], shown):
        show(row, place, job.texts, display.form, returns)
    sampled = any(one.do_sample for one in job.options)
    result = Result.of(
        plan,
        plan.model.source,
        engine=whole.engine,
        world_size=plan.ranks.size,
        seed=job.generation.seed if sampled else None,
        results=whole.rows,
        adapters=whole.adapters,
        timing=whole.timing(),
        peak_rss_mib=whole.peak_rss_mib,
    )
    answers = result.answers(returns, chat=display.chat)
    folder.write_text(ANSWERS, str(answers))
    folder.write_result(result)
    if display.form == "mindformers":
        _show_as_mindformers(answers, folder)
    for line in advice(whole.rows, job, chat=display.chat, tokenizer=tokenizer):
        progress.note(line)
    progress.note(summary(result, folder))


def _show_as_mindformers(answers: Sequence[Mapping[str, Sequence[str]]], folder: RunFolder) -> None:
    """Print a line per prompt, and write the texts to the current folder, over those of an earlier
    run."""
    for answer in answers:
        progress.text(f"{answer}\n")
    try:
        RunFolder(Path()).write_text(ANSWERS, str(answers))
    except EnvironmentFault as error:
        progress.note(f"{error.message}; the texts are in {folder.path / ANSWERS}")
    else:
        progress.note(f"wrote ./{ANSWERS}")
