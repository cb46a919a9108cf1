"""Evaluation tasks: yaml files in lm_eval's form, the built-in ones in the folder beside this file.

A task is read where it needs no code: `!function`, process_docs and the like are errors that name
the key. Of lm_eval's keys, `include` lays one file over another; `subsets` is ours: the parts of a
data set such as MMLU, each with the title that its description calls it by.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from lite_runner.config import Invalid, did_you_mean, nearest, read
from lite_runner.errors import ConfigError
from lite_runner.records import Count, Index, Range, dataclass
from lite_runner.system.yaml_file import Tagged, read_yaml

FOLDER = Path(__file__).with_name("tasks")
MAX_INCLUDES = 8

# Keys that describe a task, or do not affect the figures computed here.
_NO_EFFECT = (
    *("tag", "task_alias", "metadata", "should_decontaminate", "unsafe_code"),
    "doc_to_decontamination_query",
)
# Unsupported keys, with the reason.
_REFUSED = {
    **dict.fromkeys(("process_docs", "process_results", "custom_dataset"), "runs code"),
    "use_prompt": "takes promptsource",
    **dict.fromkeys(("doc_to_image", "doc_to_audio"), "is for models that see or hear"),
    **dict.fromkeys(("group", "aggregate_metric_list"), "is a group: name its tasks in eval.tasks"),
}

OutputType = Literal["multiple_choice", "loglikelihood", "generate_until"]
MetricName = Literal[
    "acc",
    "acc_norm",
    "acc_bytes",
    "exact_match",
    "f1",
    "perplexity",
    "token_perplexity",
    "em_f1",
    "adgen",
]
METRICS: dict[str, tuple[str, ...]] = {
    "multiple_choice": ("acc", "acc_norm", "acc_bytes", "exact_match"),
    "loglikelihood": ("acc", "perplexity", "token_perplexity"),
    "generate_until": ("exact_match", "f1", "em_f1", "adgen"),
}
_DEFAULT_METRICS: dict[str, tuple[MetricName, ...]] = {
    "multiple_choice": ("acc", "acc_norm"),
    "loglikelihood": ("perplexity", "acc"),
    "generate_until": ("exact_match",),
}


@dataclass(frozen=True)
class Metric:
    """A metric of a task; the flags are of exact_match, and of f1 what they are there."""

    metric: MetricName
    aggregation: Literal["mean", "perplexity"] | None = None
    higher_is_better: bool | None = None
    ignore_case: bool = False
    ignore_punctuation: bool = False
    ignore_numbers: bool = False
    regexes_to_ignore: tuple[str, ...] = ()


@dataclass(frozen=True)
class FilterStep:
    """A step that extracts the answer from a response."""

    function: Literal["regex", "take_first", "remove_whitespace", "lowercase", "uppercase"]
    regex_pattern: str = r"#### (\-?[0-9\.\,]+)"
    group_select: int = 0
    fallback: str = "[invalid]"


@dataclass(frozen=True)
class Filter:
    """Steps that extract an answer; a task with several filters has figures for each."""

    name: str
    filter: tuple[FilterStep, ...]


@dataclass(frozen=True)
class Shots:
    """The choice of examples."""

    sampler: Literal["default", "first_n"] = "default"


@dataclass(frozen=True)
class GenerationKwargs:
    """Options of a greedy generation."""

    until: str | tuple[str, ...] | None = None
    max_gen_toks: Count = 256
    do_sample: Literal[False] = False
    temperature: Annotated[float, Range(0, 0)] = 0.0


@dataclass(frozen=True)
class Files:
    """The files of a data set by split, or those of its only one."""

    data_files: str | Mapping[str, str] | None = None


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task; the names are lm_eval's. Texts are Jinja templates over a document, or the name of a
    field of it."""

    task: str
    output_type: OutputType = "generate_until"
    dataset_path: str | None = None
    dataset_name: str | None = None
    dataset_kwargs: Files = Files()
    training_split: str | None = None
    validation_split: str | None = None
    test_split: str | None = None
    fewshot_split: str | None = None
    fewshot_config: Shots = Shots()
    num_fewshot: Index | None = None
    description: str = ""
    doc_to_text: str
    doc_to_target: str | int | tuple[str, ...] | None = None
    doc_to_choice: str | tuple[str, ...] | Mapping[str, str] | None = None
    gen_prefix: str | None = None
    target_delimiter: str = " "
    fewshot_delimiter: str = "\n\n"
    generation_kwargs: GenerationKwargs = GenerationKwargs()
    repeats: Literal[1] = 1
    filter_list: tuple[Filter, ...] = ()
    metric_list: tuple[Metric, ...] | None = None
    # Ours.
    subsets: Mapping[str, str] | None = None  # name in the data -> title
    csv_columns: tuple[str, ...] = ()  # columns of published files without a header
    scored_elsewhere: str | None = None  # program that scores the written texts
    folder: str = ""  # of the task's file; set by `read_task`

    @property
    def metrics(self) -> Sequence[Metric]:
        """The metrics of the task, or those of its type where it names none."""
        if self.metric_list is not None:
            return self.metric_list
        return [Metric(name) for name in _DEFAULT_METRICS[self.output_type]]

    @property
    def filters(self) -> Sequence[Filter]:
        return self.filter_list or (Filter("none", ()),)

    @property
    def until(self) -> tuple[str, ...]:
        """The stop strings of a generation."""
        given = self.generation_kwargs.until
        if given is None:
            return (self.fewshot_delimiter,)
        return (given,) if isinstance(given, str) else given

    @property
    def split(self) -> str:
        return self.test_split or self.validation_split or "test"

    @property
    def shots_split(self) -> str:
        """The split of the examples."""
        return self.fewshot_split or self.training_split or self.validation_split or self.split

    @property
    def shots_overlap(self) -> bool:
        """True if a document must not be its own example, by lm_eval's rule."""
        return self.fewshot_split == self.test_split

    def errors(self) -> Iterator[str]:
        """Validation errors of settings that contradict each other."""
        known = METRICS[self.output_type]
        for one in self.metrics:
            if one.metric not in known:
                yield (
                    f"metric_list: got {one.metric}, expected one of {', '.join(known)} with"
                    f" output_type={self.output_type}"
                )
            elif one.aggregation not in (None, _aggregation(one.metric)):
                yield f"metric_list: {one.metric}: aggregation={one.aggregation} is not supported"
        if self.output_type == "multiple_choice" and self.doc_to_choice is None:
            yield "doc_to_choice: missing; expected with output_type=multiple_choice"
        if self.doc_to_target is None and not self.scored_elsewhere:
            yield "doc_to_target: missing"


def _aggregation(metric: str) -> str:
    return "perplexity" if metric.endswith("perplexity") else "mean"


def built_in() -> list[str]:
    """The names of the built-in tasks."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def read_task(name: str) -> Task:
    """The task of a name, or of a yaml file. Raises ConfigError with all that is wrong with it."""
    path = Path(name).expanduser()
    if path.suffix not in (".yaml", ".yml"):
        known = built_in()
        if name not in known:
            near = did_you_mean(nearest(name, known))
            raise ConfigError(
                f"eval.tasks: no task {name}{near}; expected one of {', '.join(known)}, or a file"
                " TASK.yaml"
            )
        path = FOLDER / f"{name}.yaml"
    where = f"eval.tasks: {path}"
    raw = _with_includes(path, where, MAX_INCLUDES)
    problems = [
        f"{key}: {why}, which is not supported" for key, why in _REFUSED.items() if key in raw
    ]
    problems += [
        f"{key}: runs code ({value}), which is not supported"
        for key, value in _tagged(raw)
        if key.partition(".")[0] not in _REFUSED
    ]
    if not problems:
        given = {key: value for key, value in raw.items() if key not in _NO_EFFECT}
        given = {"task": path.stem, **given, "folder": str(path.parent)}
        errors: list[Invalid] = []
        task = read(_settled(given), Task, "", errors)
        problems = [error.text for error in errors] if errors else list(task.errors())
        if not problems:
            assert isinstance(task, Task)
            return task
    raise ConfigError.of([f"{where}: {text}" for text in problems])


def _with_includes(path: Path, where: str, depth: int) -> dict[str, Any]:
    """The mapping in a yaml file, over those that it includes."""
    if not depth:
        raise ConfigError(f"{where}: includes too many files")
    raw = read_yaml(path, where)
    given = raw.pop("include", None)
    includes = [given] if isinstance(given, str) else given or ()
    found: dict[str, Any] = {}
    for name in includes:
        found |= _with_includes(path.parent / str(name), f"{where}: include: {name}", depth - 1)
    return found | raw


def _settled(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The mapping without what lm_eval's files may say that changes nothing here: null, and the
    splits of streaming or trust of a hub's loader."""
    found = {key: value for key, value in raw.items() if value is not None}
    if isinstance(kwargs := found.get("dataset_kwargs"), Mapping):
        found["dataset_kwargs"] = {
            key: value for key, value in kwargs.items() if key != "trust_remote_code"
        }
    if isinstance(kwargs := found.get("generation_kwargs"), Mapping):
        found["generation_kwargs"] = {k: v for k, v in kwargs.items() if k != "top_p" or v != 1}
    return found


def _tagged(value: Any, key: str = "") -> Iterator[tuple[str, Tagged]]:
    """Values with a tag such as !function, by dotted key."""
    if isinstance(value, Tagged):
        yield key, value
    pairs: Sequence[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        pairs = list(value.items())
    elif isinstance(value, list):
        pairs = list(enumerate(value))
    for name, entry in pairs:
        yield from _tagged(entry, f"{key}.{name}" if key else str(name))
