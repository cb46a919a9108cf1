"""Printing completions: streamed, one after another, or as JSON lines.

On a terminal a title line names the prompt of each of several texts.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Literal

from lite_runner import progress
from lite_runner.config.generation import GenerationConfig
from lite_runner.generation import Completion, logprobs_of, prompt_logprobs_of
from lite_runner.output.report import Result, RowResult, RunFolder
from lite_runner.plan.plan import Job
from lite_runner.text.streaming import Transcript
from lite_runner.text.tokenizer import Tokenizer

SPEED_INTERVAL_S = 0.5
WRITE_INTERVAL_S = 0.05  # a write of streamed text may cost as much as choosing a token
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
        self._transcripts = {
            (prompt, part): Transcript(tokenizer, options.stop)
            for prompt, options in enumerate(job.options, job.first_index)
            for part in range(self._returns)
        }
        self._waiting = deque(self._transcripts)
        self._rows: dict[tuple[int, int], RowResult] = {}
        self._beams = job.generation.num_beams > 1  # their tokens may change until the end
        self._in_turn = stream and not self._beams
        self._live = self._in_turn and of_all == 1 and form == "text"
        self._unwritten, self._written_at = "", 0.0  # of streamed text
        self._speed = Speedometer()

    def on_token(self, prompt: int, part: int, token: int) -> bool:
        """Add a token; True where a stop string is complete."""
        transcript = self._transcripts[prompt, part]
        self._stream(transcript.put(token))
        self._speed.count()
        return transcript.stopped

    def on_finish(self, completion: Completion) -> None:
        """Finish a sequence."""
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
                    self._transcripts[key].put(token)
            self._finish(completion)
        self._show()
        return [self._rows[one.prompt_index, one.return_index] for one in completions]

    def flush(self) -> None:
        """Write what is left of streamed text."""
        progress.text(self._unwritten)
        self._unwritten, self._written_at = "", time.monotonic()

    def _finish(self, completion: Completion) -> None:
        key = (completion.prompt_index, completion.return_index)
        self._stream(self._transcripts[key].finish())
        self.flush()
        self._rows[key] = row_of(self._job, completion, self._transcripts[key].text)

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
    """A completion as a row of result.json."""
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
        """Count a token."""
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
        lines.append(f"{which} cut at {limits}: a larger max_new_tokens= goes on")
    at_once = any(
        row.finish_reason == "stop" and not row.text.strip() and not row.messages for row in rows
    )
    if at_once and tokenizer.has_chat_template and not chat:
        lines.append(
            "the model ended a text at once, and has a chat template: chat=true asks it as a user"
        )
    return lines


def _limit(row: RowResult, options: GenerationConfig) -> str:
    if row.generated_tokens == options.max_new_tokens:
        return f"max_new_tokens={options.max_new_tokens}"
    length = row.prompt_tokens + row.generated_tokens
    return f"{length} tokens, the prompt's {row.prompt_tokens} included"


def summary(result: Result, folder: RunFolder) -> str:
    """A one-line summary of a run."""
    timing = result.timing
    tokens = sum(row.generated_tokens for row in result.results)
    made = "1 token" if tokens == 1 else f"{tokens} tokens"
    parts = [made, f"load {timing.load_s:.1f} s", f"compile {timing.compile_s:.1f} s"]
    if timing.prefill_tok_s:
        parts.append(f"prefill {timing.prefill_tok_s:.0f} tokens/s")
    if timing.decode_tok_s:
        parts.append(f"decode {timing.decode_tok_s:.1f} tokens/s")
    return f"{', '.join(parts)}; results in {folder.path}"
