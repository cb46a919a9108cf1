"""run_mode=predict: prompts in, completions out, streamed as they come."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import replace

from lite_runner import environment, model_files, progress
from lite_runner.config.ge import ge_config, render
from lite_runner.config.plan import plan
from lite_runner.config.prompts import read_prompts
from lite_runner.config.schema import RunConfig
from lite_runner.generation import Completion, GenerationTiming, generate
from lite_runner.report import Result, RowResult, RunFolder, Timing
from lite_runner.session import Job, load, prepare, sequence_length, slots_for, with_backend
from lite_runner.text.tokenizer import Tokenizer
from lite_runner.text.transcript import Transcript


def run(config: RunConfig, folder: RunFolder) -> None:
    """Generate, print and write the results. Raises RunnerError; KeyboardInterrupt after Ctrl-C,
    when what there is has been written."""
    began = time.perf_counter()
    device = environment.resolve_device(config.context.device_target)
    prompts = read_prompts(config)
    files = model_files.locate(config)
    tokenizer = model_files.tokenizer_of(config, files)
    job = prepare(config, files, tokenizer, prompts)
    config = with_backend(with_ge_file(config, folder), files, job)
    backend = load(config, files, device, job, tokenizer)
    load_s = time.perf_counter() - began
    backend.prepare()
    prepare_s = backend.compile_s
    total = len(prompts) * job.generation.num_return_sequences
    counted = progress.step("generate", total, "texts") if total > 1 else nullcontext()
    with counted as step, closing(backend):
        printer = Printer(tokenizer, job, config.stream, step)
        outcome = generate(
            backend,
            job.tokens,
            job.generation,
            on_token=printer.on_token,
            on_finish=printer.on_finish,
        )
    rows = [
        RowResult(
            prompt=prompts[completion.prompt_index],
            text=text,
            token_ids=completion.token_ids,
            prompt_tokens=len(job.tokens[completion.prompt_index]),
            generated_tokens=len(completion.token_ids),
            finish_reason=completion.finish_reason,
        )
        for completion, text in zip(
            outcome.completions, printer.texts(outcome.completions), strict=True
        )
    ]
    timing = timing_of(outcome.timing, load_s, prepare_s, backend.compile_s - prepare_s)
    result = Result(
        run_mode=config.run_mode,
        model=config.model_name,
        backend=config.backend,
        engine=backend.engine,
        load_checkpoint=files.source,
        results=rows,
        timing=timing,
    )
    folder.write_result(result, texts_per_prompt=job.generation.num_return_sequences)
    progress.note(summary(result, folder))
    if outcome.interrupted:
        raise KeyboardInterrupt


def with_ge_file(config: RunConfig, folder: RunFolder) -> RunConfig:
    """GE options of the config written as config.ini into the run folder, and read from there."""
    ge = ge_config(config)
    if ge is None or not ge.sections:
        return config
    path = folder.write_text("config.ini", render(ge.sections))
    return replace(config, infer=replace(config.infer, ge_config_path=str(path), ge_options=None))


def dry_run(config: RunConfig) -> None:
    """Print the plan. Nothing is fetched, so prompts are counted by their bytes: no token of
    theirs is shorter."""
    device = environment.resolve_device(config.context.device_target)
    prompts = read_prompts(config)
    model = config.model_config() or model_files.locate(config).model
    generation = config.generation(model)
    longest = max((len(prompt.encode()) for prompt in prompts), default=1)
    length = min(model.seq_length, sequence_length(longest, generation, model.seq_length))
    slots = slots_for(config, generation, max(1, len(prompts)))
    lines = plan(config, model, device=device, slots=slots, length=length)
    progress.text("\n".join(lines) + "\n")


class Printer:
    """The text of every sequence: decoded, cut at a stop text, and shown.

    A single one streams; of several, each is shown when it and all before it are done.
    """

    def __init__(
        self, tokenizer: Tokenizer, job: Job, stream: bool, step: progress.Step | None
    ) -> None:
        self._step = step
        keys = itertools.product(
            range(len(job.prompts)), range(job.generation.num_return_sequences)
        )
        self._transcripts = {key: Transcript(tokenizer, job.generation.stop) for key in keys}
        self._waiting = deque(self._transcripts)
        self._finished: set[tuple[int, int]] = set()
        self._beams = job.generation.num_beams > 1  # their tokens are sure only at the end
        self._in_turn = stream and not self._beams
        self._live = self._in_turn and len(self._transcripts) == 1

    def on_token(self, prompt: int, part: int, token: int) -> bool:
        """Take a token; True where a stop text is complete."""
        transcript = self._transcripts[prompt, part]
        self._stream(transcript.put(token))
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


def timing_of(
    measured: GenerationTiming, load_s: float, prepare_s: float, compile_in_decode_s: float
) -> Timing:
    """Compile time is not counted in any rate: what fell into decoding is taken out here."""
    decode_s = measured.decode_s - compile_in_decode_s
    first = measured.time_to_first_token_s
    return Timing(
        load_s=load_s,
        compile_s=prepare_s + compile_in_decode_s,
        prefill_s=measured.prefill_s,
        decode_s=decode_s,
        prefill_tok_s=measured.prefill_tok_s,
        decode_tok_s=measured.decode_tokens / decode_s if decode_s > 0 else None,
        time_to_first_token_s=None if first is None else load_s + prepare_s + first,
    )


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
