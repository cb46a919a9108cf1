"""run_mode=eval: the perplexity of a text, window by window."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np

from lite_runner import progress
from lite_runner.architectures.spec import Decoder
from lite_runner.backends.base import Backend
from lite_runner.config.adapter_checks import adapter_faults
from lite_runner.config.checks import fits_model, strategy_faults
from lite_runner.config.fields import Fault, Range, fault, raise_faults
from lite_runner.config.generation import GenerationConfig
from lite_runner.config.options import AdapterOptions, ComputeOptions
from lite_runner.config.prompts import MAX_PROMPT_BYTES, decoded, is_file
from lite_runner.config.ranges import Count
from lite_runner.config.ranks import Ranks
from lite_runner.errors import ConfigError, RunnerError
from lite_runner.generation import Request, Scheduler, generate
from lite_runner.model import model_files
from lite_runner.output.report import Evaluation, Result, RunFolder, Timing
from lite_runner.plan import footprint
from lite_runner.plan.describe import described
from lite_runner.plan.job import Job
from lite_runner.plan.loading import load
from lite_runner.plan.memory import memory_levers, memory_need
from lite_runner.plan.operators import operators_of
from lite_runner.plan.plan import Plan
from lite_runner.sizing.need import readable
from lite_runner.system import environment

if TYPE_CHECKING:
    from numpy.typing import NDArray


# As long as one chunk of a prompt, so that it costs no more than shorter ones, and what other
# tools print perplexities for by default: figures can be compared.
DEFAULT_WINDOW = 512


@dataclass(frozen=True, kw_only=True)
class Config(ComputeOptions, AdapterOptions):
    """run_mode=eval"""

    computes_here: ClassVar[bool] = True

    eval_data: str
    eval_window: Annotated[int, Range(2)] | None  # of one token there is nothing to predict
    eval_stride: Count | None


@dataclass(frozen=True)
class Window:
    """Tokens start .. end of the text, of which `first` and those behind it count."""

    start: int
    first: int
    end: int


def windows(tokens: int, size: int, stride: int) -> Iterator[Window]:
    """Windows over a text of so many tokens: every token counts once, in the first window that has
    one before it. Without an overlap the first token of a window is context and never counts.

    A last window of a single token, which counts nothing, is left out.
    """
    counted = 0
    for start in range(0, tokens, stride):
        end = min(start + size, tokens)
        first = max(counted, start + 1)
        if first < end:
            yield Window(start, first, end)
        counted = end
        if end == tokens:
            return


def text_file(config: Config) -> Path:
    """The file that eval_data names."""
    return Path(config.eval_data).expanduser()


def window_of(config: Config, model: Decoder) -> tuple[int, int]:
    """Tokens in a window, and from one window's start to the next one's."""
    window = config.eval_window or min(model.seq_length, DEFAULT_WINDOW)
    return window, config.eval_stride or window


def read_text(config: Config) -> str:
    """The text of eval_data. Raises ConfigError where it cannot be read or is not UTF-8."""
    path = text_file(config)
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_PROMPT_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"eval_data: {path}: {error.strerror}") from None
    return decoded(raw, f"eval_data: {path}").removeprefix("\ufeff")


def faults(config: Config) -> Iterator[Fault]:
    """Validation errors of an evaluation."""
    if not config.eval_data:
        yield fault(
            "eval_data", "eval_data is empty; give a text file (no MindRecord): eval_data=TEXT.txt"
        )
    elif "\0" not in config.eval_data and not is_file(text_file(config)):
        yield fault("eval_data", f"eval_data: no file {config.eval_data}")
    if config.backend == "mslite":
        yield fault(
            ("backend", "run_mode"),
            "backend=mslite is not available with run_mode=eval: an exported graph gives the"
            " logits of the last token alone; expected backend=ms",
        )
    yield from adapter_faults(config, one=True)
    yield from strategy_faults(config)
    if (model := config.model_config()) is not None:
        yield from window_faults(config, model)


def window_faults(config: Config, model: Decoder) -> Iterator[Fault]:
    """Windows that do not fit the model, or each other."""
    window, stride = window_of(config, model)
    if window > model.seq_length:
        yield fault(
            ("eval_window", "model"),
            f"eval_window: got {window}, expected at most the model's context of"
            f" {model.seq_length} tokens",
        )
    if stride > window:
        yield fault(
            ("eval_stride", "eval_window"),
            f"eval_stride: got {stride}, expected at most the window of {window} tokens:"
            " those between two windows would be left out",
        )


def plan(config: Config) -> Plan:
    """Files, text as token ids and memory, all checked. With dry_run=true nothing is fetched:
    without a tokenizer the window is taken as full. Raises RunnerError."""
    began = time.perf_counter()
    device = environment.resolve_device(config.context.device_target, planned=config.dry_run)
    files = model_files.with_adapter(model_files.find(config), config)
    if config.model_config() is None:  # model=auto is checked only when it is known
        raise_faults([*fits_model(config, files.model), *window_faults(config, files.model)])
    text = read_text(config)
    size, stride = window_of(config, files.model)
    tokenizer = model_files.found_tokenizer(config, files)
    ids: Sequence[int] = ()
    if tokenizer is not None:
        ids = tokenizer.encode(text)
        if len(ids) < 2:
            raise ConfigError(
                f"eval_data: tokens of {config.eval_data}: got {len(ids)}, expected at least 2",
                "a longer text: its first token is only context",
            )
    length = min(size, len(ids)) if ids else size
    job = Job((), (ids,), GenerationConfig(), slots=1, length=length, scores=True)
    config = replace(config, backend="ms")  # auto: no exported graph scores
    ranks = Ranks()
    planned = Plan(
        config=config,
        device=device,
        backend=config.backend,
        why=operators_of(config, files, device, ranks),
        dtype=footprint.dtype_of_plan(config, files, device, ranks),
        files=files,
        job=job,
        memory=memory_need(config, files, job, device, ranks),
        lines={
            "reads": f"{config.eval_data}: {readable(len(text.encode()))}, in windows of {size}"
            f" tokens, {stride} from one to the next"
        },
        tokenizer=tokenizer,
    )
    if config.dry_run:
        return described(planned, lambda: memory_levers(config, files, job, device, ranks))
    return replace(planned, seconds=time.perf_counter() - began)


def run(plan: Plan, folder: RunFolder) -> None:
    """Print and write the perplexity. Raises RunnerError; KeyboardInterrupt after Ctrl-C, when
    what the windows before it gave has been written."""
    began = time.perf_counter()
    config, files, job = plan.config, plan.model, plan.work
    assert isinstance(config, Config)
    ids = np.array(job.tokens[0], np.int32)
    size, stride = window_of(config, files.model)
    backend = load(config, files, plan.device, job, need=plan.memory)
    load_s = plan.seconds + time.perf_counter() - began
    with closing(backend):
        evaluation = evaluate(backend, ids, size, stride)
    evaluation = replace(evaluation, quant=str(files.quantization))
    result = Result(
        run_mode=config.run_mode,
        model=config.model_name,
        backend=config.backend,
        engine=backend.info.engine,
        load_checkpoint=files.source,
        results=[],
        evaluation=evaluation,
        timing=Timing(load_s=load_s, compile_s=backend.compile_s),
    )
    folder.write_result(result)
    counted = "1 window" if evaluation.windows == 1 else f"{evaluation.windows} windows"
    progress.text(
        f"perplexity {evaluation.perplexity:.4f}: {evaluation.scored_tokens} of"
        f" {evaluation.tokens} tokens scored, {counted} of {size}\n"
    )
    progress.note(
        f"load {load_s:.1f} s, compile {backend.compile_s:.1f} s, {evaluation.tok_s:.0f} tokens/s;"
        f" results in {folder.path}"
    )
    if evaluation.interrupted:
        raise KeyboardInterrupt


def evaluate(backend: Backend, ids: NDArray[np.int32], size: int, stride: int) -> Evaluation:
    """The perplexity of a text in token ids [n], n >= 2.

    Ctrl-C ends it with the windows that are done, or is raised where there are none. Raises
    RunnerError where a likelihood is not a number.
    """
    total, scored, computed, done = 0.0, 0, 0, 0
    interrupted = False
    began, compiled = time.perf_counter(), backend.compile_s
    try:
        with progress.step("score", len(ids), "tokens") as step:
            for window in windows(len(ids), size, stride):
                found = log_likelihoods(backend, ids[window.start : window.end])
                counted = found[window.first - window.start - 1 :]
                if not np.isfinite(counted).all():
                    place = window.first + int(np.argmin(np.isfinite(counted)))
                    raise RunnerError(
                        f"the likelihood of token {place} is {counted[place - window.first]}",
                        "weights that overflow? model.model_config.compute_dtype=float32",
                    )
                total += float(counted.sum())
                scored += len(counted)
                computed += window.end - window.start
                done += 1
                step.advance(len(counted) + (window.first == window.start + 1))
    except KeyboardInterrupt:
        if not done:
            raise
        interrupted = True
    seconds = time.perf_counter() - began - (backend.compile_s - compiled)
    mean = -total / scored
    try:
        perplexity = math.exp(mean)
    except OverflowError:
        raise RunnerError(
            f"the perplexity is beyond any number: exp({mean:.0f})",
            "is load_checkpoint= the model that model= names, and the text one for it?",
        ) from None
    return Evaluation(
        perplexity=perplexity,
        tokens=len(ids),
        scored_tokens=scored,
        windows=done,
        window=size,
        stride=stride,
        seconds=seconds,
        tok_s=computed / seconds,
        interrupted=interrupted,
    )


def log_likelihoods(backend: Backend, ids: NDArray[np.int32]) -> NDArray[np.float64]:
    """Of each of ids[1:] given those before it [n - 1]."""
    scheduler = Scheduler(backend, prefix_cache=False)
    request = Request(ids, GenerationConfig(max_new_tokens=0, prompt_logprobs=0))
    outcome = generate(scheduler, [request])
    if outcome.interrupted:
        raise KeyboardInterrupt
    logprobs = outcome.completions[0].prompt_logprobs
    assert logprobs is not None
    return logprobs.chosen
