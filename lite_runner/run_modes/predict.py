"""run_mode=predict and slora: prompts in, completions out, streamed as they come."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from lite_runner import environment, model_files, progress
from lite_runner.adapters import open_wanted
from lite_runner.backends.base import Backend
from lite_runner.config.cluster import ranks_of
from lite_runner.config.ge import FILE_NAME, ge_config, render
from lite_runner.config.plan import plan
from lite_runner.config.ranks import Ranks
from lite_runner.config.requests import read_requests
from lite_runner.config.scaling import ranks_plan
from lite_runner.config.schema import RunConfig
from lite_runner.generation import Completion, generate
from lite_runner.report import AdapterReport, AdapterUse, Result, RowResult, RunFolder
from lite_runner.session import (
    Job,
    adapter_bytes,
    load,
    pool_of,
    prepare,
    sequence_length,
    share,
    slots_for,
    with_backend,
)
from lite_runner.shares import Share, gather, seed_of_all, wait_for_all
from lite_runner.text.tokenizer import Tokenizer
from lite_runner.text.transcript import Transcript

if TYPE_CHECKING:
    from lite_runner.backends.adapter_pool import AdapterPool

SPEED_SHOWN_S = 0.5


def run(config: RunConfig, folder: RunFolder, ranks: Ranks | None = None) -> None:
    """Generate, print and write the results. Raises RunnerError; KeyboardInterrupt after Ctrl-C,
    when what there is has been written.

    Of several `ranks`, which have met and each call this, rank 0 alone writes the results.
    """
    ranks = ranks or Ranks()
    began = time.perf_counter()
    device = environment.resolve_device(config.context.device_target)
    config = seed_of_all(config, ranks)
    prompts, names = read_requests(config)
    if config.adapter_path and not any(names):
        progress.note(f"adapter_path={config.adapter_path}: adapter_id= names none, the base runs")
    files = model_files.locate(config)
    tokenizer = model_files.tokenizer_of(config, files)
    job = prepare(config, files, tokenizer, prompts, names)
    config = with_backend(with_ge_file(config, folder), files, job)
    job = share(config, job, ranks)
    mine, engine, interrupted = Share(), "", False
    if job.tokens:
        backend = load(config, files, device, job, tokenizer, ranks)
        load_s = time.perf_counter() - began
        backend.prepare()
        wait_for_all(ranks)
        with closing(backend):
            mine, interrupted = _complete(config, backend, tokenizer, job, load_s)
        engine = backend.engine
    else:  # there are fewer prompts than copies of the model
        wait_for_all(ranks)
    if interrupted and ranks.size > 1:
        raise KeyboardInterrupt  # the other ranks may not have heard of it: no waiting for them
    whole = gather(mine, ranks)
    if ranks.rank > 0:
        return
    for row in whole.rows[len(mine.rows) :]:
        progress.text(row.text + "\n")
    result = Result(
        run_mode=config.run_mode,
        model=config.model_name,
        backend=config.backend,
        engine=engine,
        world_size=ranks.size,
        load_checkpoint=files.source,
        seed=job.generation.seed if job.generation.do_sample else None,
        results=whole.rows,
        adapters=whole.adapters,
        timing=whole.timing(),
        peak_rss_mib=whole.peak_rss_mib,
    )
    folder.write_result(result, texts_per_prompt=job.generation.num_return_sequences)
    progress.note(summary(result, folder))
    if interrupted:
        raise KeyboardInterrupt


def _complete(
    config: RunConfig, backend: Backend, tokenizer: Tokenizer, job: Job, load_s: float
) -> tuple[Share, bool]:
    """The completions of a job, shown as they come; and whether Ctrl-C cut them short.

    The backend is prepared.
    """
    prepare_s = backend.compile_s
    total = len(job.tokens) * job.generation.num_return_sequences
    counted = progress.step("generate", total, "texts") if total > 1 else nullcontext()
    pool = pool_of(backend, job)
    with counted as step:
        printer = Printer(tokenizer, job, config.stream, step)
        outcome = generate(
            backend,
            job.tokens,
            job.generation,
            adapters=None if job.adapters is None else job.adapters.of_prompts,
            pool=pool,
            first_index=job.first,
            on_token=printer.on_token,
            on_finish=printer.on_finish,
        )
    rows = [
        RowResult(
            prompt=job.prompts[completion.prompt_index - job.first],
            text=text,
            token_ids=completion.token_ids,
            prompt_tokens=len(job.tokens[completion.prompt_index - job.first]),
            generated_tokens=len(completion.token_ids),
            finish_reason=completion.finish_reason,
            adapter=job.adapter_name(completion.prompt_index),
        )
        for completion, text in zip(
            outcome.completions, printer.texts(outcome.completions), strict=True
        )
    ]
    # Compile time is not counted in any rate: what fell into decoding is taken out here.
    outcome.timing.decode_s -= backend.compile_s - prepare_s
    done = Share(
        rows=rows,
        generation=outcome.timing,
        load_s=load_s,
        compile_s=backend.compile_s,
        prepare_s=prepare_s,
        adapters=adapter_report(job, rows, pool),
    )
    return done, outcome.interrupted


def adapter_report(
    job: Job, rows: Sequence[RowResult], pool: AdapterPool | None
) -> AdapterReport | None:
    """What was done with each adapter; None for a run without."""
    if job.adapters is None:
        return None
    names = [None, *(adapter.name for adapter in job.adapters.adapters)]
    modules = [0, *(len(adapter.pairs) for adapter in job.adapters.adapters)]
    used = {}
    for number, name in enumerate(names):
        mine = [row for row in rows if row.adapter == name]
        used[name or "base"] = AdapterUse(
            modules=modules[number],
            prompts=job.adapters.of_prompts.count(number),
            prompt_tokens=sum(row.prompt_tokens for row in mine),
            generated_tokens=sum(row.generated_tokens for row in mine),
            seconds=pool.seconds[number] if pool is not None else 0.0,
        )
    if pool is None:
        return AdapterReport(0, 0, 0, used)
    return AdapterReport(pool.places, pool.nbytes, pool.loads, used)


def with_ge_file(config: RunConfig, folder: RunFolder) -> RunConfig:
    """GE options of the config written as config.ini into the run folder, and read from there."""
    ge = ge_config(config)
    if ge is None or not ge.sections:
        return config
    path = folder.write_text(FILE_NAME, render(ge.sections))
    return replace(config, infer=replace(config.infer, ge_config_path=str(path), ge_options=None))


def planned(config: RunConfig) -> list[str]:
    """The lines of dry_run=true. Nothing is fetched, so prompts are counted by their bytes: no
    token of theirs is shorter. Of adapters the headers are read."""
    device = environment.resolve_device(config.context.device_target)
    # Without prompts it is the plan for a short one.
    prompts, names = read_requests(replace(config, predict_data=config.predict_data or " "))
    files = model_files.planned(config)
    model = files.model
    generation = config.generation(model)
    longest = max(len(prompt.encode()) for prompt in prompts)
    length = min(model.seq_length, sequence_length(longest, generation, model.seq_length))
    slots = slots_for(config, generation, len(prompts))
    adapters = open_wanted(config, model, names)
    job = Job(prompts, [()] * len(prompts), generation, slots, length, adapters=adapters)
    ranks = ranks_of(config)
    mine = share(config, job, ranks)
    pool = adapter_bytes(config, model, mine, device, ranks)
    here = 0 if config.use_parallel else pool  # of several ranks the lines below tell
    lines = plan(
        config,
        model,
        device=device,
        slots=slots,
        length=length,
        adapters=here,
        checkpoint=files.whereabouts(),
    )
    if config.use_parallel:
        lines += ranks_plan(
            config, model, device=device, slots=mine.slots, length=length, adapters=pool
        )
    return lines


class Printer:
    """The text of every sequence: decoded, cut at a stop text, and shown.

    A single one streams; of several, each is shown when it and all before it are done.
    """

    def __init__(
        self, tokenizer: Tokenizer, job: Job, stream: bool, step: progress.Step | None
    ) -> None:
        self._step = step
        prompts = range(job.first, job.first + len(job.tokens))
        keys = itertools.product(prompts, range(job.generation.num_return_sequences))
        self._transcripts = {key: Transcript(tokenizer, job.generation.stop) for key in keys}
        self._waiting = deque(self._transcripts)
        self._finished: set[tuple[int, int]] = set()
        self._beams = job.generation.num_beams > 1  # their tokens are sure only at the end
        self._in_turn = stream and not self._beams
        self._live = self._in_turn and len(self._transcripts) == 1
        self._speed = Speedometer()

    def on_token(self, prompt: int, part: int, token: int) -> bool:
        """Take a token; True where a stop text is complete."""
        transcript = self._transcripts[prompt, part]
        self._stream(transcript.put(token))
        self._speed.count()
        return transcript.stopped

    def on_finish(self, prompt: int, part: int) -> None:
        """No token of this sequence follows."""
        if self._step is not None:
            self._step.advance()
        if self._beams:
            return
        self._stream(self._transcripts[prompt, part].finish())
        self._finished.add((prompt, part))
        if self._in_turn:
            self._show()

    def texts(self, completions: Sequence[Completion]) -> list[str]:
        """The text of each completion; what has not been shown is shown now."""
        texts = []
        for completion in completions:
            key = (completion.prompt_index, completion.return_index)
            transcript = self._transcripts[key]
            if self._beams:
                for token in completion.token_ids:
                    transcript.put(token)
            self._stream(transcript.finish())
            self._finished.add(key)
            texts.append(transcript.text)
        self._show()
        return texts

    def _stream(self, text: str) -> None:
        if self._live:
            progress.text(text)

    def _show(self) -> None:
        while self._waiting and self._waiting[0] in self._finished:
            text = self._transcripts[self._waiting.popleft()].text
            progress.text("\n" if self._live else text + "\n")


class Speedometer:
    """Tokens a second since the first one, in the live line."""

    def __init__(self) -> None:
        self._tokens = 0
        self._began = self._shown_at = 0.0

    def count(self) -> None:
        """One token more."""
        now = time.monotonic()
        if not self._tokens:
            self._began = self._shown_at = now
        self._tokens += 1
        if now - self._shown_at >= SPEED_SHOWN_S:
            self._shown_at = now
            rate = (self._tokens - 1) / (now - self._began)
            progress.status(f"generate: {self._tokens} tokens, {rate:.1f} tokens/s")


def summary(result: Result, folder: RunFolder) -> str:
    """What the run did, in a line."""
    timing = result.timing
    tokens = sum(row.generated_tokens for row in result.results)
    made = "1 token" if tokens == 1 else f"{tokens} tokens"
    parts = [made, f"load {timing.load_s:.1f} s", f"compile {timing.compile_s:.1f} s"]
    if timing.prefill_tok_s:
        parts.append(f"prefill {timing.prefill_tok_s:.0f} tokens/s")
    if timing.decode_tok_s:
        parts.append(f"decode {timing.decode_tok_s:.1f} tokens/s")
    return f"{', '.join(parts)}; results in {folder.path}"
