"""Evaluation of a model over tasks: its options, plan, run, files and comparison with another run.

samples.jsonl of the run folder grows with each sample that is done, so that a run which was killed
is gone on with (eval.resume).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import numpy as np

from lite_runner import progress
from lite_runner.config import Invalid, invalid
from lite_runner.config.generation import GenerationConfig
from lite_runner.errors import ArtifactError, ConfigError, EnvironmentFault, NonFiniteError
from lite_runner.evaluation.metrics import (
    PERPLEXITIES,
    Difference,
    Likelihood,
    MetricResult,
    Scores,
    difference,
    figures,
    pooled,
    scored_choices,
    scored_text,
)
from lite_runner.evaluation.prompts import Sample, TaskOptions, samples_of
from lite_runner.evaluation.tasks import Task, read_task
from lite_runner.generation import Completion, Engine, Finished, Request, Token
from lite_runner.generation.sampling import log_likelihoods
from lite_runner.output import RunFolder
from lite_runner.output.comparison import aligned
from lite_runner.records import Count, Index, InputPath, dataclass
from lite_runner.system.files import parse_json
from lite_runner.system.yaml_file import read_yaml
from lite_runner.text.spelling import StopChecker
from lite_runner.text.tokenizer import Tokenizer

SAMPLES = "samples.jsonl"
DEFAULT_BATCH = 32
# Keys of config.yaml that may differ between a run and the one that it resumes.
_MAY_DIFFER = ("eval", "output_dir", "verbosity", "dry_run", "context", "seed", "parallel")


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """The section `eval` of a config."""

    tasks: str | tuple[str, ...] | None  # null: the perplexity of eval_data
    data: InputPath | None
    fewshot: Index | None  # null: as in the task
    limit: Count | None  # documents per task; null: all
    chat: bool
    system: str | None
    batch: Count | None  # null: DEFAULT_BATCH, or as many as fit the memory
    resume: InputPath | None
    compare: InputPath | None

    def __post_init__(self) -> None:
        if self.names:  # so that a run can be repeated from any folder
            object.__setattr__(self, "tasks", tuple(map(_as_file, self.names)))
        # outputs/latest will be this run; the previous one is meant.
        for key in ("resume", "compare"):
            given = getattr(self, key)
            if given and (path := Path(given).expanduser()).is_symlink():
                object.__setattr__(self, key, str(path.resolve()))

    @property
    def names(self) -> tuple[str, ...]:
        """The tasks, without repeats."""
        given = (self.tasks,) if isinstance(self.tasks, str) else self.tasks or ()
        return tuple(dict.fromkeys(given))

    def errors(self) -> Iterator[Invalid]:
        """Validation errors of keys without effect, and missing folders."""
        if not self.names:
            for key in ("data", "fewshot", "limit", "chat", "system", "batch", "resume", "compare"):
                if getattr(self, key):
                    yield invalid(
                        f"eval.{key}", f"eval.{key} has no effect without eval.tasks=[NAME,...]"
                    )
            return
        if self.data and not (path := Path(self.data).expanduser()).is_dir():
            if not path.is_file():
                yield invalid("eval.data", f"eval.data: no folder {self.data}, and no file")
            elif len(self.names) > 1:
                text = f"eval.data: {self.data} is one file; expected a folder with several tasks"
                yield invalid("eval.data", text)
        for key in ("resume", "compare"):
            given = getattr(self, key)
            if given and not (Path(given).expanduser() / SAMPLES).is_file():
                yield invalid(f"eval.{key}", f"eval.{key}: no run with {SAMPLES} in {given}")


def _as_file(name: str) -> str:
    """The absolute path of a task's file, or the name of a built-in task."""
    path = Path(name).expanduser()
    return str(path.absolute()) if path.suffix in (".yaml", ".yml") else name


def read_tasks(names: Sequence[str]) -> list[Task]:
    """The tasks of a run. Raises ConfigError with all errors of one."""
    tasks = [read_task(name) for name in names]
    if len({task.task for task in tasks}) < len(tasks):
        raise ConfigError("eval.tasks: two tasks have the same name; give one another `task:`")
    return tasks


def read_samples(
    options: EvalOptions, tasks: Sequence[Task], tokenizer: Tokenizer, context: int
) -> list[Sample]:
    """The samples of all tasks; `context`: tokens that the model takes. Raises RunnerError."""
    ends = tokenizer.eos_token_ids
    bos = tokenizer.bos_token_id
    shared = TaskOptions(
        data=Path(options.data).expanduser() if options.data else None,
        shots=options.fewshot,
        limit=options.limit,
        chat=options.chat,
        system=options.system or "",
        context=context,
        start=bos if bos is not None else ends[0] if ends else None,
    )
    if options.chat and tokenizer.chat_form is not None:
        raise ConfigError(f"eval.chat: {tokenizer.source} has no chat template but own tags")
    found: list[Sample] = []
    with progress.step("prompts", unit="samples") as step:
        for task in tasks:
            if options.chat and task.gen_prefix is not None:
                raise ConfigError(f"{task.task}: gen_prefix cannot be combined with eval.chat=true")
            for sample in samples_of(task, tokenizer, shared, only=len(tasks) == 1):
                found.append(sample)
                step.advance()
    if cut := sum(sample.cut for sample in found):
        progress.note(
            f"note: {cut} of {len(found)} prompts are longer than the model's context of {context}"
            " tokens, and cut on their left"
        )
    return found


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """The figures of a task in result.json."""

    task: str
    shots: int
    samples: int
    metrics: Sequence[MetricResult]
    parts: Mapping[str, Sequence[MetricResult]]  # for a task with parts
    scored_elsewhere: str | None  # program that scores the generated texts


@dataclass(frozen=True, kw_only=True)
class TaskReport:
    """The section of a run over tasks in result.json."""

    results: Sequence[TaskResult]
    differences: Sequence[Difference]  # of eval.compare
    seconds: float
    tokens: int  # computed
    cached_tokens: int  # taken from the prefix cache instead
    resumed: int  # samples resumed from another run
    interrupted: bool

    def table(self) -> list[str]:
        """The lines of a text table."""
        rows = [("task", "samples", "shots", "metric", "value", "stderr")]
        for one in self.results:
            head = (one.task, str(one.samples), str(one.shots))
            for each in one.metrics:
                error = "-" if each.stderr is None else f"{each.stderr:.4f}"
                rows.append((*head, each.metric, f"{each.value:.4f}", error))
                head = ("", "", "")
            if one.scored_elsewhere:
                rows.append((*head, f"to be scored by {one.scored_elsewhere}", "-", "-"))
        lines = aligned(rows)
        if self.differences:
            compared = [
                ("task", "metric", "this", "other", "better", "worse", "p", "difference, 95 %")
            ]
            compared += [
                (
                    one.task,
                    one.metric,
                    f"{one.value:.4f}",
                    f"{one.other:.4f}",
                    str(one.better),
                    str(one.worse),
                    f"{one.p:.3g}",
                    f"{one.low:+.4f} to {one.high:+.4f}",
                )
                for one in self.differences
            ]
            lines += ["", *aligned(compared)]
        return lines


class TaskRun:
    """The samples of a run and their results."""

    def __init__(
        self, samples: Sequence[Sample], tokenizer: Tokenizer, ends: Sequence[int], folder: Path
    ) -> None:
        """`ends`: tokens that end a generated text; `folder`: that of the run."""
        self.samples = samples
        self.scores: dict[int, Scores] = {}  # by index of the sample
        self.tokens = self.cached_tokens = self.resumed = 0
        self._tokenizer, self._ends, self._folder = tokenizer, tuple(ends), folder

    def resume(self, folder: Path) -> None:
        """Take over another run's results of the same samples."""
        done = {(one["task"], one["index"], one["key"]): one for one in read_lines(folder)}
        with self._open() as file:
            for place, sample in enumerate(self.samples):
                line = done.get((sample.name, sample.index, sample.key))
                if line is None:
                    continue
                if sample.prompt is not None:
                    scores = scored_text(sample, line["response"])
                else:
                    found = [Likelihood(*one) for one in line["likelihoods"]]
                    scores = scored_choices(sample, found)
                self.scores[place] = scores
                self._write(file, line)
                self.resumed += 1

    def compute(self, engine: Engine, slots: int) -> bool:
        """Compute the rest; True if Ctrl-C ended it early. Raises RunnerError."""
        left = [place for place in range(len(self.samples)) if place not in self.scores]
        jobs = (job for place in left for job in self._jobs(place))
        waiting = dict[int, _Job]()

        def feed() -> None:
            while len(waiting) < 2 * slots and (job := next(jobs, None)) is not None:
                waiting[engine.add(job.request)] = job

        total = len(self.samples)
        with (
            self._open() as file,
            progress.step("evaluate", total, "samples", done=total - len(left)) as step,
        ):
            try:
                feed()
                for events in engine.run():
                    for event in events:
                        job = waiting[event.id]
                        if isinstance(event, Token):
                            if not (
                                job.takes(event) and (ended := engine.finish(event.id, "stop"))
                            ):
                                continue
                            (event,) = ended
                        del waiting[event.id]
                        if event.error is not None:
                            raise event.error
                        self._count(event, job)
                        if (line := job.done(event.completion)) is not None:
                            self._write(file, line)
                            step.advance()
                    feed()
            except KeyboardInterrupt:
                return True
        return False

    def results(self) -> list[TaskResult]:
        """The figures of the tasks, over the results so far."""
        parts: dict[str, list[tuple[Sample, Mapping[str, float]]]] = {}
        for place, scores in sorted(self.scores.items()):
            sample = self.samples[place]
            parts.setdefault(sample.name, []).append((sample, scores.values))
        tasks: dict[str, dict[str, list[tuple[Sample, Mapping[str, float]]]]] = {}
        for name, pairs in parts.items():
            tasks.setdefault(pairs[0][0].task.task, {})[name] = pairs
        return [_result(name, each) for name, each in tasks.items()]

    def _open(self) -> TextIOWrapper:
        return (self._folder / SAMPLES).open("a", encoding="utf-8", errors="backslashreplace")

    def _write(self, file: TextIOWrapper, line: Mapping[str, Any]) -> None:
        try:
            file.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")
            file.flush()
        except OSError as error:
            raise EnvironmentFault(f"{self._folder / SAMPLES}: {error.strerror}") from error

    def _count(self, event: Finished, job: _Job) -> None:
        cached = event.completion.cached_tokens
        new = max(0, len(event.completion.drawn) - 1)  # the last token is only scored
        self.tokens += len(job.request.prompt) - cached + new
        self.cached_tokens += cached

    def _jobs(self, place: int) -> Iterator[_Job]:
        """The requests of a sample. Continuations that differ in their last token share one."""
        sample = self.samples[place]
        found: dict[int, Any] = {}

        def whole() -> dict[str, Any] | None:
            if sample.prompt is None and len(found) < len(sample.continuations):
                return None
            return self._line(place, found)

        if sample.prompt is not None:
            options = GenerationConfig(
                max_new_tokens=sample.task.generation_kwargs.max_gen_toks, eos_token_id=self._ends
            )
            checker = StopChecker(self._tokenizer, [text for text in sample.task.until if text])
            request = Request(sample.prompt, options, name=f"{sample.name} {sample.index}")
            yield _Job(request, checker=checker, found=found, whole=whole)
            return
        shared: dict[tuple[bytes, int], list[int]] = {}
        for index, one in enumerate(sample.continuations):
            shared.setdefault((one.ids[:-1].tobytes(), one.start), []).append(index)
        for indices in shared.values():
            first = sample.continuations[indices[0]]
            longer = len(first.ids) - first.start > 1
            options = GenerationConfig(max_new_tokens=0, prompt_logprobs=1 if longer else None)
            request = Request(
                first.ids[:-1],
                options,
                keep_logits=True,
                name=f"{sample.name} {sample.index}",
                scored_from=first.start if longer else 1,
            )
            lasts = {index: int(sample.continuations[index].ids[-1]) for index in indices}
            yield _Job(request, start=first.start, lasts=lasts, found=found, whole=whole)

    def _line(self, place: int, found: Mapping[int, Any]) -> dict[str, Any]:
        """The line of a sample in samples.jsonl; its scores are kept."""
        sample = self.samples[place]
        line: dict[str, Any] = {
            "task": sample.name,
            "index": sample.index,
            "key": sample.key,
            "content": sample.content,
            "document": sample.document,
            "question": sample.question,
            "choices": list(sample.choices),
            "target": sample.target,
        }
        if sample.prompt is not None:
            line["response"] = found[0]
            scores = scored_text(sample, found[0])
        else:
            every = [found[index] for index in range(len(sample.continuations))]
            line["likelihoods"] = [[one.logprob, one.greedy] for one in every]
            scores = scored_choices(sample, every)
        self.scores[place] = scores
        return {
            **line,
            "answers": dict(scores.answers),
            "scores": dict(scores.values),
            "correct": scores.correct,
        }


class _Job:
    """A request of a sample, and the handling of its events."""

    def __init__(
        self,
        request: Request,
        *,
        found: dict[int, Any],
        whole: Callable[[], dict[str, Any] | None],
        checker: StopChecker | None = None,
        start: int = 0,
        lasts: Mapping[int, int] | None = None,
    ) -> None:
        """`found`: the sample's results, which grows; `whole`: the sample's line once it has all.
        `checker`: of a generation; else from `start` on tokens are scored, and `lasts` are the
        last ones by the index of their continuation."""
        self.request = request
        self._found, self._whole, self._checker = found, whole, checker
        self._start, self._lasts = start, lasts or {}

    def takes(self, event: Token) -> bool:
        """Take a token of a generation; True if the text ends with it."""
        assert self._checker is not None
        if not event.is_end:
            self._checker.put(event.token)
        return self._checker.stopped

    def done(self, completion: Completion) -> dict[str, Any] | None:
        """The line of the sample, if this was its last request."""
        if self._checker is not None:
            self._checker.finish()
            self._found[0] = self._checker.text
        else:
            self._score(completion)
        return self._whole()

    def _score(self, completion: Completion) -> None:
        """The likelihoods of the continuations that share the request."""
        logits, scored = completion.logits, completion.prompt_logprobs
        assert logits is not None
        before, greedy = 0.0, True
        if scored is not None:
            before = float(scored.chosen.sum())
            greedy = bool((scored.top_ids[:, 0] == self.request.prompt[self._start :]).all())
        best = int(logits.argmax())
        for index, token in self._lasts.items():
            last, _, _ = log_likelihoods(logits[None], np.array([token], np.int32))
            logprob = before + float(last[0])
            if not np.isfinite(logprob):
                raise NonFiniteError(f"{self.request.name}: a likelihood is {logprob}")
            self._found[index] = Likelihood(logprob, greedy and best == token)


def _result(
    name: str, parts: Mapping[str, Sequence[tuple[Sample, Mapping[str, float]]]]
) -> TaskResult:
    found = {part: figures([values for _, values in pairs]) for part, pairs in parts.items()}
    sizes = {part: len(pairs) for part, pairs in parts.items()}
    (first, *_), task = next(iter(parts.values()))[0], next(iter(parts.values()))[0][0].task
    metrics = next(iter(found.values()))
    if task.subsets is not None:
        by_metric = zip(*found.values(), strict=True)
        metrics = [pooled(list(zip(each, sizes.values(), strict=True))) for each in by_metric]
    return TaskResult(
        task=name,
        shots=first.shots,
        samples=sum(sizes.values()),
        metrics=metrics,
        parts=found if task.subsets is not None else {},
        scored_elsewhere=task.scored_elsewhere,
    )


def read_lines(folder: Path) -> list[dict[str, Any]]:
    """The samples that a run has written; the last line of one that was killed may be half.

    Raises ArtifactError where it is not such a file.
    """
    path = folder / SAMPLES
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ArtifactError(f"{path}: {error.strerror}") from None
    found = []
    *lines, _ = text.split("\n")
    for number, line in enumerate(lines, 1):
        try:
            one = parse_json(line)
            if not {"task", "index", "key", "content", "scores"} <= one.keys():
                raise ValueError("no sample")
        except (ValueError, AttributeError) as error:
            raise ArtifactError(f"{path}: line {number}: {error}") from None
        found.append(one)
    return found


def check_same_model(folder: Path, config: Mapping[str, Any]) -> None:
    """Raises ConfigError where the run in a folder is of another model, or computes otherwise, than
    one with `config` (plain data)."""
    other = read_yaml(folder / "config.yaml", f"eval.resume: {folder / 'config.yaml'}")
    keys = [
        key
        for key, value in config.items()
        if key not in _MAY_DIFFER and key in other and other[key] not in (value, "auto")
    ]
    if keys:
        raise ConfigError(
            f"eval.resume: {folder} was computed with other values of {', '.join(keys)}",
            f"repeat its command: --config {folder / 'config.yaml'} eval.resume={folder}",
        )


def compared(samples: Sequence[Sample], run: TaskRun, folder: Path) -> list[Difference]:
    """The differences to the run in another folder, over the samples that both have done.

    Raises ConfigError where there are none.
    """
    other: dict[Any, dict[str, float]] = {
        (one["task"], one["index"], one["content"]): one["scores"] for one in read_lines(folder)
    }
    known = False
    pairs: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for place, scores in sorted(run.scores.items()):
        sample = samples[place]
        theirs = other.get((sample.name, sample.index, sample.content), {})
        known |= bool(theirs)
        for metric, value in scores.values.items():
            if metric not in PERPLEXITIES and metric in theirs:
                pairs.setdefault((sample.task.task, metric), []).append((value, theirs[metric]))
    if not known:
        raise ConfigError(f"eval.compare: {folder} has none of this run's samples")
    if not pairs:
        progress.note("eval.compare: perplexities are not compared sample by sample")
    return [
        difference(task, metric, *zip(*values, strict=True))
        for (task, metric), values in pairs.items()
    ]


def write_completions(run: TaskRun, folder: RunFolder) -> list[Path]:
    """Write generated texts in the format of the program that scores them: HumanEval's."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in read_lines(folder.path):
        if "task_id" in line["document"] and "response" in line:
            completion = {"task_id": line["document"]["task_id"], "completion": line["response"]}
            found.setdefault(line["task"], []).append(completion)
    elsewhere = {one.task for one in run.results() if one.scored_elsewhere}
    return [
        folder.write_text(
            f"{task}_completions.jsonl", "".join(json.dumps(one) + "\n" for one in completions)
        )
        for task, completions in found.items()
        if task in elsewhere
    ]


def evaluate(
    engine: Engine, run: TaskRun, options: EvalOptions, folder: RunFolder, slots: int
) -> TaskReport:
    """Compute the samples and report the results. Raises RunnerError."""
    if options.resume:
        run.resume(Path(options.resume).expanduser())
        progress.note(f"eval.resume: {run.resumed} of {len(run.samples)} samples taken over")
    began = time.perf_counter()
    interrupted = run.compute(engine, slots)
    seconds = time.perf_counter() - began
    differences: Sequence[Difference] = ()
    if options.compare and run.scores:
        differences = compared(run.samples, run, Path(options.compare).expanduser())
    for path in write_completions(run, folder):
        progress.note(f"wrote {path}; no code was run: score it in a sandbox with its evaluator")
    return TaskReport(
        results=run.results(),
        differences=differences,
        seconds=seconds,
        tokens=run.tokens,
        cached_tokens=run.cached_tokens,
        resumed=run.resumed,
        interrupted=interrupted,
    )
