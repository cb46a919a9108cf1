"""run_mode=eval: the perplexity of a text, or the scores of tasks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, ClassVar

from lite_runner import progress
from lite_runner.architectures.spec import Decoder
from lite_runner.config import Invalid, invalid, raise_errors
from lite_runner.config.backend_checks import (
    COMPARE,
    mindformers_model_errors,
    pair_errors,
    without_mindformers,
)
from lite_runner.config.checks import adapter_errors, fits_model, offline_errors, strategy_errors
from lite_runner.config.compose import portable
from lite_runner.config.generation import GenerationConfig, beyond_context
from lite_runner.config.prompt import no_likelihood
from lite_runner.config.prompts import MAX_PROMPT_BYTES, decoded, is_file
from lite_runner.config.schema import (
    AdapterOptions,
    CompareOptions,
    ExportedOptions,
    MindFormersOptions,
)
from lite_runner.errors import ConfigError
from lite_runner.evaluation.harness import (
    DEFAULT_BATCH,
    EvalOptions,
    TaskRun,
    check_same_model,
    evaluate,
    read_samples,
    read_tasks,
)
from lite_runner.evaluation.prompts import Sample
from lite_runner.generation import Engine
from lite_runner.model import explained_nonfinite
from lite_runner.model.adapters import with_adapter
from lite_runner.model.locate import locate_for_plan, tokenizer_for_plan
from lite_runner.output import Result, RunFolder, Timing, peak_rss_mib
from lite_runner.output.comparison import compared
from lite_runner.output.scoring import score
from lite_runner.plan import Job, Plan, with_ends
from lite_runner.plan.resources import check_before_fetching, open_planned
from lite_runner.records import Count, InputPath, Range, dataclass
from lite_runner.run_modes._plan import planned
from lite_runner.system import environment
from lite_runner.system.files import readable
from lite_runner.system.signals import CutShort

# One prefill chunk, and the default of other tools: perplexities are comparable.
DEFAULT_WINDOW = 512


@dataclass(frozen=True, kw_only=True)
class Config(AdapterOptions, ExportedOptions, MindFormersOptions, CompareOptions):
    """run_mode=eval"""

    computes_here: ClassVar[bool] = True
    on_ranks: ClassVar[bool] = False
    takes_parallel: ClassVar[bool] = False
    length_key: ClassVar[str] = "eval_window"
    batch_key: ClassVar[str] = "eval.batch"

    eval_data: InputPath
    eval_window: Annotated[int, Range(2)] | None  # of one token there is nothing to predict
    eval_stride: Count | None
    eval: EvalOptions

    @property
    def caches(self) -> bool:
        return False  # a window is scored at once

    @property
    def text_file(self) -> Path:
        """The file that eval_data names."""
        return Path(self.eval_data).expanduser()

    def window_of(self, model: Decoder) -> tuple[int, int]:
        """Tokens of a window, and from the start of one window to that of the next."""
        window = self.eval_window or min(model.seq_length, DEFAULT_WINDOW)
        return window, self.eval_stride or window


def window_errors(config: Config, model: Decoder) -> Iterator[Invalid]:
    """Windows that do not fit the model, or each other; and a model without likelihoods."""
    if model.prefix is not None:
        reason, hint = no_likelihood("run_mode=eval")
        yield invalid(("run_mode", "model"), f"{reason}; {hint}")
    window, stride = config.window_of(model)
    if window > model.seq_length:
        yield beyond_context("eval_window", window, model)
    if stride > window:
        yield invalid(
            ("eval_stride", "eval_window"),
            f"eval_stride: got {stride}, expected at most the window of {window} tokens:"
            " those between two windows would be left out",
        )


def check_model(config: Config, model: Decoder) -> None:
    """Raises ConfigError for settings that do not fit the model."""
    raise_errors([*fits_model(config, model), *window_errors(config, model)])


def read_text(path: Path) -> str:
    """The text of eval_data. Raises ConfigError where it cannot be read or is not UTF-8."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_PROMPT_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"eval_data: {path}: {error.strerror}") from None
    return decoded(raw, f"eval_data: {path}").removeprefix("\ufeff")


def _task_errors(config: Config) -> Iterator[Invalid]:
    """Validation errors of a run over tasks."""
    given = ("eval_data", "eval_window", "eval_stride", COMPARE)
    for key in (key for key in given if vars(config)[key]):
        other = "; two runs are compared by eval.compare=RUN" if key == COMPARE else ""
        yield invalid((key, "eval.tasks"), f"{key} cannot be combined with eval.tasks{other}")
    if config.in_mindformers:
        yield invalid(
            ("backend", "eval.tasks"),
            "backend=mindformers scores texts alone (eval_data); expected native or ms with"
            " eval.tasks",
        )


def errors(config: Config) -> Iterator[Invalid]:
    """Validation errors of an evaluation."""
    if config.eval.names:
        yield from _task_errors(config)
    elif not config.eval_data:
        yield invalid(
            "eval_data",
            "eval_data is empty; give a text file (no MindRecord): eval_data=TEXT.txt, or tasks:"
            " eval.tasks=[NAME,...]",
        )
    elif "\0" not in config.eval_data and not is_file(config.text_file):
        yield invalid("eval_data", f"eval_data: no file {config.eval_data}")
    if config.in_lite:
        yield invalid(
            ("backend", "run_mode"),
            "backend=mslite is not available with run_mode=eval: an exported graph gives the"
            " logits of the last token alone; expected backend=native or backend=ms",
        )
    yield from offline_errors(config)
    yield from mindformers_model_errors(config)
    if (release := config.mindformers_release) is not None and not config.names_mindformers:
        yield without_mindformers(release)
    yield from adapter_errors(config, one=True)
    yield from strategy_errors(config)
    yield from _compare_errors(config)
    if (model := config.model_config()) is not None:
        yield from window_errors(config, model)


def _compare_errors(config: Config) -> Iterator[Invalid]:
    yield from pair_errors(config)
    if (compared := config.compared) is None:
        return
    if compared.in_lite:
        yield invalid(
            (COMPARE, "backend"),
            f"{COMPARE}=mslite: an exported graph gives the logits of the last token alone;"
            " expected native or ms",
        )
    if compared.in_mindformers:
        for one in mindformers_model_errors(compared):
            yield invalid((COMPARE, *one.keys), f"{COMPARE}={compared.backend}: {one.text}")


def plan(config: Config) -> Plan:
    """Files, token ids and memory, all validated. With dry_run=true nothing is fetched, and without
    a tokenizer the text fills a window. Raises RunnerError."""
    if config.eval.names:
        return _plan_tasks(config)
    began = time.perf_counter()
    device = environment.resolve_device(config.context.device_target, planned=config.dry_run)
    text = read_text(config.text_file)
    if (fetched := check_before_fetching(config.settings)) is not None:
        check_model(config, with_adapter(fetched, config.adapters).model)
    files = with_adapter(locate_for_plan(config.source), config.adapters)
    if config.model_config() is None:  # model=auto: its sizes are known only now
        check_model(config, files.model)
    size, stride = config.window_of(files.model)
    tokenizer = tokenizer_for_plan(config.tokenizer, files, dry_run=config.dry_run)
    ids: Sequence[int] = ()
    if tokenizer is not None:
        ids = tokenizer.encode(text)
        if len(ids) < 2:
            raise ConfigError(
                f"eval_data: tokens of {config.eval_data}: got {len(ids)}, expected at least 2",
                "a longer text: its first token is only context",
            )
    length = min(size, len(ids)) if ids else size
    job = Job((), (ids,), GenerationConfig(), slots=1, length=length, all_logits=True)
    reads = f"{config.eval_data}: {readable(len(text.encode()))}, in windows of {size} tokens"
    lines = {"reads": f"{reads}, {stride} from one to the next"}
    return planned(config, files, job, device, tokenizer, began=began, lines=lines)


@dataclass(frozen=True, kw_only=True)
class TaskPlan(Plan):
    """A resolved run over tasks."""

    samples: Sequence[Sample] = ()


def _plan_tasks(config: Config) -> Plan:
    """As `plan`, of a run over tasks; without a tokenizer each sequence fills the context."""
    began = time.perf_counter()
    device = environment.resolve_device(config.context.device_target, planned=config.dry_run)
    tasks = read_tasks(config.eval.names)
    check_before_fetching(config.settings)
    files = with_adapter(locate_for_plan(config.source), config.adapters)
    check_model(config, files.model)
    tokenizer = tokenizer_for_plan(config.tokenizer, files, dry_run=config.dry_run)
    samples: Sequence[Sample] = ()
    context = length = files.model.seq_length
    if tokenizer is not None:
        samples = read_samples(config.eval, tasks, tokenizer, context)
        length = max(sample.length for sample in samples)
    most = config.eval.batch or DEFAULT_BATCH
    slots = range(1 if config.eval.batch is None else most, most + 1)
    generation = with_ends(GenerationConfig(), None, files.model, tokenizer)
    job = Job((), (), generation, slots=most, length=length, all_logits=True)
    lines = {"tasks": f"{', '.join(one.task for one in tasks)}: {len(samples)} samples"}
    found = planned(*(config, files, job, device, tokenizer), began=began, lines=lines, slots=slots)
    return TaskPlan(**vars(found), samples=samples)


def _run_tasks(plan: TaskPlan, folder: RunFolder, began: float) -> None:
    """Print and write the scores of tasks. Raises as `run`."""
    config, files, tokenizer = plan.config, plan.model, plan.tokenizer
    assert isinstance(config, Config) and tokenizer is not None
    if config.eval.resume:
        check_same_model(Path(config.eval.resume).expanduser(), portable(config))
    job = plan.work
    with closing(Engine(open_planned(plan))) as engine, explained_nonfinite(files):
        load_s = plan.seconds + time.perf_counter() - began
        ends = job.generation.eos_token_id
        task_run = TaskRun(plan.samples, tokenizer, ends, folder.path)
        report = evaluate(engine, task_run, config.eval, folder, job.slots)
        result = Result.of(
            plan,
            files.source,
            engine=engine.engine,
            tasks=asdict(report),
            timing=Timing(load_s=load_s, compile_s=engine.compile_s),
            peak_rss_mib=peak_rss_mib(),
        )
    folder.write_result(result)
    from lite_runner.bench import charts

    if charts.available() and (chart := charts.scores_chart(report, plan.config.model_name)):
        folder.write_bytes("eval.png", chart.png)
        folder.write_bytes("eval.svg", chart.svg)
    progress.text("\n".join(report.table()) + "\n")
    progress.note(
        f"load {load_s:.1f} s, {report.seconds:.1f} s for {report.tokens} tokens,"
        f" {report.cached_tokens} more from the prefix cache; results in {folder.path}"
    )
    if report.interrupted:
        raise CutShort


def run(plan: Plan, folder: RunFolder) -> None:
    """Print and write the perplexity, or the scores. Raises RunnerError, also where the backends of
    a comparison differ; KeyboardInterrupt after Ctrl-C, when what there is has been written."""
    began = time.perf_counter()
    config = plan.config
    assert isinstance(config, Config)
    if isinstance(plan, TaskPlan):
        _run_tasks(plan, folder, began)
        return
    size, stride = config.window_of(plan.model.model)
    with compared(plan, folder):
        result = score(plan, size, stride, folder, began)
        folder.write_result(result)
        found, timing = result.evaluation, result.timing
        assert found is not None
        counted = "1 window" if found.windows == 1 else f"{found.windows} windows"
        progress.text(
            f"perplexity {found.perplexity:.4f}: {found.scored_tokens} of {found.tokens} tokens"
            f" scored, {counted} of {found.window}\n"
        )
        progress.note(
            f"load {timing.load_s:.1f} s, compile {timing.compile_s:.1f} s,"
            f" {found.tok_s:.0f} tokens/s; results in {folder.path}"
        )
        if found.interrupted:
            raise KeyboardInterrupt
