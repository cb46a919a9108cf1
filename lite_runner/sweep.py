"""--multirun: jobs through Hydra's launchers and sweepers, then a table and a chart of them.

A launcher (`hydra/launcher=joblib`, `submitit_slurm`, ...) decides where the jobs run. Without a
sweeper the jobs are all combinations of values, validated before the first one runs; a sweeper such
as `hydra/sweeper=optuna` chooses them one after another by `sweep_metric`.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hydra import version
from hydra._internal.callbacks import Callbacks
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.core.utils import JobRuntime, setup_globals
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import HydraContext, RunMode
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from lite_runner.bench import charts
from lite_runner.bench.report import Spread, markdown, number
from lite_runner.config import Note, accepts, annotation_of, leaves, raise_errors
from lite_runner.config.argv import (
    CommandLine,
    ConfigFile,
    Setting,
    is_of_hydra,
    override,
    value_of,
)
from lite_runner.config.compose import user_folders
from lite_runner.config.config_file import OF_HYDRA, read_config, take_hydra
from lite_runner.config.grammar import is_sweep, swept_values
from lite_runner.config.groups import GROUPS, option_files, options_named_in, options_of, own_groups
from lite_runner.config.prompts import STANDARD_INPUT
from lite_runner.config.schema import RunConfig
from lite_runner.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_TERMINATED,
    ConfigError,
    EnvironmentFault,
    RunnerError,
    escaped,
    shown,
)
from lite_runner.output import RESULT, RunFolder
from lite_runner.records import dataclass
from lite_runner.run_modes import resolve, schemas
from lite_runner.system import environment
from lite_runner.system.files import parse_json
from lite_runner.system.signals import Terminated
from lite_runner.system.yaml_file import read_yaml

_PARAMS = "hydra.sweeper.params"
JOB = "job.json"  # in the folder of each job
_OF_A_JOB = {"job", "overrides", "exit_code", "began", "figures"}
RUN = "run"  # beside it: a link to the job's run folder
# Figures of result.json that the table shows where a job has them, and the chart draws.
FIGURES = {
    "evaluation.perplexity": "perplexity",
    "timing.prefill_tok_s": "prefill, tokens/s",
    "timing.decode_tok_s": "decode, tokens/s",
    "peak_rss_mib": "peak, MiB",
}
# Hydra's logs go to standard output, between the texts; with other launchers to standard error.
_SILENT: dict[str, Any] = {"version": 1, "incremental": True, "root": {}}
_QUOTED = re.compile(r"(['\"])([^'\"]*)\1")
_ABSENT = re.compile(r"Could not find '(hydra/\w+)/([\w.-]+)'")

Run = Callable[[CommandLine, Path], int]  # a job and where to link its run folder -> exit code


class JobFailed(RunnerError):
    """A job of a sweep ended with another exit code than 0."""


@dataclass(frozen=True)
class SweptJob:
    """Hydra's task function: one job with the overrides that its sweeper chose."""

    line: CommandLine  # shared by all jobs
    total: int | None  # jobs; None where the sweeper decides
    run: Run

    def __call__(self, _config: DictConfig) -> float | None:
        hydra = HydraConfig.get()
        words, index = list(hydra.overrides.task), hydra.job.num
        if self.line.last("verbosity") != "0":
            of = "" if self.total is None else f" of {self.total}"
            title = shown(f"job {index + 1}{of}: {' '.join(words)}").rstrip(": ")
            print(title, file=sys.stderr, flush=True)
        chosen = [override(word) for word in words]
        keys = {setting.key for setting in chosen}
        settings = [s for s in self.line.settings if s.key not in keys]
        folder, began = Path(hydra.runtime.output_dir), time.time()
        line = replace(self.line, settings=[*settings, *chosen])
        code = self.run(line, folder / RUN)
        figures = _figures(folder / RUN / RESULT)
        job = {
            "job": index,
            "overrides": words,
            "exit_code": code,
            "seconds": round(time.time() - began, 3),
            "began": began,
            "run": os.path.realpath(folder / RUN) if (folder / RUN).exists() else None,
            "figures": figures,
        }
        (folder / JOB).write_text(json.dumps(job, indent=2) + "\n", encoding="utf-8")
        if code == EXIT_INTERRUPTED:
            raise KeyboardInterrupt
        if code == EXIT_TERMINATED:
            raise Terminated
        if code:
            raise JobFailed(f"exit code {code}")
        return _metric(figures, self.line.metric)


class _Loader(ConfigLoaderImpl):
    """Hydra's own settings, composed by Hydra; the keys of a job are composed by the job."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = folders
        path = create_config_search_path(None)
        for folder in folders:  # hydra/launcher/NAME.yaml of the user's own
            path.prepend("lite-runner", f"file://{folder}")
        super().__init__(path)

    def load_sweep_config(
        self, master_config: DictConfig, sweep_overrides: list[str]
    ) -> DictConfig:
        config = copy.deepcopy(master_config)
        OmegaConf.set_readonly(config.hydra, False)
        with open_dict(config):
            config.hydra.overrides.task = list(sweep_overrides)
            config.hydra.job.override_dirname = ",".join(sweep_overrides)
        return config

    def get_group_options(
        self,
        group_name: str,
        results_filter: ObjectType | None = ObjectType.CONFIG,
        config_name: str | None = None,
        overrides: list[str] | None = None,
    ) -> list[str]:
        return options_of(group_name, self.folders)


def run_sweep(line: CommandLine, run: Run) -> int:
    """Run all jobs of a command line; returns their worst exit code. Raises RunnerError."""
    typed = [setting for setting in line.settings if is_of_hydra(setting)]
    # The later of two settings of a key counts, as in a single run.
    last = {setting.key: setting for setting in line.settings if not is_of_hydra(setting)}
    line = replace(line, settings=[*last.values()])
    config, loader, sweeps = _hydra(line, typed)
    line = _with_params(line, config, sweeps)
    jobs = None if sweeps else jobs_of(line)
    configs = [config for _, config, _ in jobs or ()]
    writes = jobs is None or any(c.leaves_folder and not c.dry_run for c in configs)
    with TemporaryDirectory() as temporary:
        keys = [setting.key for setting in typed]
        context = _opened(config, loader, keys, _folder(line, configs) if writes else temporary)
        folder, began = Path(config.hydra.sweep.dir), time.time()
        task = SweptJob(line, None if jobs is None else len(jobs), run)
        context.callbacks.on_multirun_start(config=config, config_name=None)
        try:
            if jobs is None:
                _sweep(line, task, config, context)
            else:
                _launch([list(map(_word, chosen)) for chosen, _, _ in jobs], task, config, context)
        finally:
            context.callbacks.on_multirun_end(config=config, config_name=None)
            done = _jobs_since(folder, began)
            if writes and done:
                _summarize(done, folder, line)
        if jobs is not None and len(done) < len(jobs):
            raise RunnerError(
                f"--multirun: {len(jobs) - len(done)} of {len(jobs)} jobs returned no result",
                f"what they and their launcher wrote is below {folder}",
            )
        return max((job["exit_code"] for job in done), default=EXIT_FAILED)


def _word(setting: Setting) -> str:
    return f"{setting.prefix}{setting.key}={setting.value}"


def _folder(line: CommandLine, configs: Sequence[RunConfig]) -> str:
    """A new run folder for the sweep itself."""
    output = configs[0].output_dir if configs else line.last("output_dir") or "./outputs"
    mode = configs[0].run_mode if configs else line.last("run_mode") or "predict"
    return str(RunFolder.create(output, "sweep", mode).path)


def _hydra(line: CommandLine, typed: Sequence[Setting]) -> tuple[DictConfig, _Loader, bool]:
    """Hydra's own config, of the files of --config and as typed, and whether a sweeper chooses the
    jobs. Raises RunnerError."""
    version.setbase("1.3")
    setup_globals()
    JobRuntime.instance().set("name", "run_lite")
    file = read_config(line.config_files, None, schemas())
    folders = user_folders(line, file)
    for setting in line.settings:  # +experiment=NAME goes over the files
        if setting.prefix == "+" and setting.key in own_groups(folders):
            for path in option_files(setting.key, str(setting.value), folders):
                take_hydra(file, str(path), read_yaml(path))
                named = options_named_in(path).items()
                file.hydra_choices.update((g, name) for g, name in named if g in OF_HYDRA)
    raise_errors(file.errors)
    params, rest = _params(typed)
    keys = {setting.key for setting in rest}
    chosen = [f"{group}={name}" for group, name in file.hydra_choices.items() if group not in keys]
    usual = ["hydra.output_subdir=null", "hydra.mode=MULTIRUN", "hydra.sweep.dir=''"]
    words = [*usual, *chosen, *map(_word, rest)]
    loader = _Loader(folders)
    with _hydra_errors():
        config = loader.load_configuration(None, words, RunMode.MULTIRUN)
        own = config.hydra
        for section in ("launcher", "sweeper", "sweep"):
            above = dict(file.hydra.get(section, {}))
            if section == "sweeper":
                params = {**(own.sweeper.get("params") or {}), **above.pop("params", {}), **params}
            if f"hydra/{section}" not in keys:  # else they are of another launcher or sweeper
                left = {k: v for k, v in above.items() if f"hydra.{section}.{k}" not in keys}
                own[section] = OmegaConf.merge(own[section], left)
        with open_dict(own):
            own.callbacks = OmegaConf.merge(own.callbacks, _callbacks(file))
            if params:
                own.sweeper.params = {name: str(value) for name, value in params.items()}
        sweeper = any(word.startswith("hydra/sweeper") for word in words)
        return config, loader, sweeper or own.sweeper.get("max_batch_size") is not None


def _params(settings: Sequence[Setting]) -> tuple[dict[str, str], list[Setting]]:
    """hydra.sweeper.params as typed, whole or key by key, and the other settings."""
    params: dict[str, str] = {}
    for setting in settings:
        _, found, key = setting.key.partition(_PARAMS)
        if not found or not isinstance(setting.value, str):
            continue
        if key:
            quoted = _QUOTED.fullmatch(setting.value)
            params[key.removeprefix(".")] = quoted[2] if quoted else setting.value
            continue
        try:
            value = value_of(setting.value, dict[str, str])
        except ValueError as error:
            raise ConfigError(f"{setting}: {error}") from None
        if not isinstance(value, dict):
            raise ConfigError(f"{setting}: expected a mapping, as {_PARAMS}={{seed: '1,2'}}")
        params |= {str(name): str(one) for name, one in value.items()}
    return params, [setting for setting in settings if not setting.key.startswith(_PARAMS)]


def _callbacks(file: ConfigFile) -> dict[str, Any]:
    """The callbacks of a file, each of which is a class of that kind."""
    callbacks = dict(file.hydra.get("callbacks", {}))
    for name, callback in callbacks.items():
        target = callback.get("_target_") if isinstance(callback, Mapping) else None
        try:
            found = get_object(str(target))
        except Exception as error:  # whatever an import raises
            raise ConfigError(f"hydra.callbacks.{name}: {' '.join(str(error).split())}") from None
        if not (isinstance(found, type) and issubclass(found, Callback)):
            raise ConfigError(f"hydra.callbacks.{name}: {target} is not one of Hydra's callbacks")
    return callbacks


def _with_params(line: CommandLine, config: DictConfig, sweeps: bool) -> CommandLine:
    """A line with the keys that the sweeper varies; typed ones override them."""
    params = config.hydra.sweeper.get("params") or {}
    typed = {setting.key for setting in line.settings}
    left = {key: value for key, value in params.items() if key.lstrip("+~") not in typed}
    if sweeps and params:
        config.hydra.sweeper.params = left
    if sweeps:
        return line
    varied = [override(f"{key}={value}") for key, value in left.items()]
    return replace(line, settings=[*varied, *line.settings])


def _opened(config: DictConfig, loader: _Loader, typed: Sequence[str], folder: str) -> HydraContext:
    """Hydra with the folder and the logs of a sweep. Raises RunnerError."""
    own = config.hydra
    with _hydra_errors(), open_dict(own):
        own.sweep.dir = str(Path(own.sweep.dir or folder).absolute())
        if not any("job_logging" in key for key in typed):
            own.job_logging = _SILENT
        if not any("hydra_logging" in key for key in typed):
            if own.launcher._target_.endswith(".BasicLauncher"):
                own.hydra_logging = _SILENT
            else:
                own.hydra_logging.handlers.console.stream = "ext://sys.stderr"
        HydraConfig.instance().set_config(config)
        return HydraContext(loader, Callbacks(config))


@contextmanager
def _hydra_errors() -> Iterator[None]:
    """Hydra's errors as ours."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        message = " ".join(str(error.__cause__ or error).split())
        if absent := _ABSENT.search(message):
            raise EnvironmentFault(
                f"{absent[1]}={absent[2]}: no such plugin of Hydra is installed",
                environment.install_line(environment.required("cluster")),
            ) from None
        raise ConfigError(f"--multirun: {message}") from None


def _launch(
    jobs: Sequence[Sequence[str]], task: SweptJob, config: DictConfig, context: HydraContext
) -> None:
    """Run jobs that are known beforehand."""
    launcher = Plugins.instance().instantiate_launcher(
        hydra_context=context, task_function=task, config=config
    )
    with _importable():
        for done in launcher.launch(jobs, initial_job_idx=0):
            failure = vars(done).get("_return_value")
            if isinstance(failure, Exception) and not isinstance(failure, JobFailed):
                raise failure


def _sweep(line: CommandLine, task: SweptJob, config: DictConfig, context: HydraContext) -> None:
    sweeper = Plugins.instance().instantiate_sweeper(
        hydra_context=context, task_function=task, config=config
    )
    with _importable(), suppress(JobFailed):
        try:
            sweeper.sweep(arguments=[_word(setting) for setting in swept_settings(line)])
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(f"--multirun: {' '.join(str(error).split())}") from None


@contextmanager
def _importable() -> Iterator[None]:
    """Lets the processes that a launcher starts import this package from a checkout."""
    before, own = os.environ.get("PYTHONPATH"), str(Path(__file__).parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join([own, *([before] if before else [])])
    try:
        yield
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before


def _metric(figures: Mapping[str, float], name: str) -> float | None:
    """The figure that a sweeper optimizes. Raises ConfigError where result.json has none such."""
    if not name:
        return next((figures[key] for key in FIGURES if key in figures), None)
    if name not in figures:
        listed = ", ".join(figures) or "none"
        raise ConfigError(f"sweep_metric={name}: no figure of {RESULT}; expected one of {listed}")
    return figures[name]


def _figures(result: Path) -> dict[str, float]:
    """The numbers of a result.json by dotted key; none where the run wrote none."""
    try:
        content = parse_json(result.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    rows = content.pop("results", ())
    found = dict(_numbers("", content))
    if tokens := sum(row.get("generated_tokens", 0) for row in rows):
        found["generated_tokens"] = tokens
    return found


def _numbers(key: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _numbers(f"{key}.{name}" if key else str(name), inner)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield key, value


def _jobs_since(folder: Path, began: float) -> list[dict[str, Any]]:
    """The results of the jobs of this sweep, in their order."""
    found = []
    for path in folder.rglob(JOB):
        # The folder may be the user's own, with files of this name that are none of ours.
        with suppress(OSError, ValueError):
            job = parse_json(path.read_text(encoding="utf-8"))
            if isinstance(job, dict) and job.keys() >= _OF_A_JOB and job["began"] >= began:
                found.append(job)
    return sorted(found, key=lambda job: int(job["job"]))


def _summarize(jobs: Sequence[Mapping[str, Any]], folder: Path, line: CommandLine) -> None:
    """Print a table of the jobs, and write it and a chart to the sweep's folder."""
    named = {line.metric: line.metric} if line.metric not in ("", *FIGURES) else {}
    shown_figures = {
        key: name
        for key, name in (named | FIGURES).items()
        if any(key in job["figures"] for job in jobs)
    }
    chosen = [dict(word.lstrip("+").split("=", 1) for word in job["overrides"]) for job in jobs]
    keys = list(dict.fromkeys(key for values in chosen for key in values))
    header = ["job", *keys, "exit code", *shown_figures.values()]
    rows = [
        [
            str(job["job"] + 1),
            *(values.get(key, "") for key in keys),
            str(job["exit_code"]),
            *(
                number(job["figures"][key]) if key in job["figures"] else ""
                for key in shown_figures
            ),
        ]
        for job, values in zip(jobs, chosen, strict=True)
    ]
    head, *cells = [[escaped(cell).replace("|", "\\|") for cell in row] for row in (header, *rows)]
    table = markdown(head, cells, left=len(head))
    (folder / "sweep.md").write_text(table + "\n", encoding="utf-8")
    (folder / "sweep.json").write_text(json.dumps(jobs, indent=2) + "\n", encoding="utf-8")
    if len(jobs) > 1 and shown_figures and keys and charts.available():
        chart = charts.draw(_panels(jobs, chosen, keys, shown_figures), folder.name)
        (folder / "sweep.svg").write_bytes(chart.svg)
        (folder / "sweep.png").write_bytes(chart.png)
    if line.last("verbosity") != "0":
        print(f"{table}\nsweep: {folder}", file=sys.stderr)


def _panels(
    jobs: Sequence[Mapping[str, Any]],
    chosen: Sequence[Mapping[str, str]],
    keys: Sequence[str],
    figures: Mapping[str, str],
) -> list[charts.Panel]:
    """A panel for each figure over the first swept key; a line for each choice of the others."""
    axis, *others = keys
    panels = []
    for key, name in figures.items():
        points: dict[str, dict[float | str, list[float]]] = {}
        for job, values in zip(jobs, chosen, strict=True):
            if key in job["figures"]:
                label = ", ".join(f"{other}={values.get(other, '')}" for other in others)
                line = points.setdefault(label or name, {})
                line.setdefault(_place(values.get(axis, "")), []).append(job["figures"][key])
        lines = [
            charts.Line(label, [(x, Spread.of(found)) for x, found in line.items()])
            for label, line in points.items()
        ]
        panels.append(charts.Panel(name, axis, name, lines))
    return panels


def _place(text: str) -> float | str:
    try:
        value = float(text)
    except ValueError:
        return text
    return value if math.isfinite(value) else text


MAX_JOBS = 1_000


def jobs_of(line: CommandLine) -> list[tuple[list[Setting], RunConfig, list[Note]]]:
    """(chosen values of swept keys, config, notes) of each job, all checked before any runs.

    A text is never swept: a comma in a prompt is a comma. Raises ConfigError with the errors
    of every job.
    """
    line = replace(line, settings=[s for s in line.settings if not is_of_hydra(s)])
    folders = user_folders(line, read_config(line.config_files, None, schemas()))
    axes = [_swept(setting.key, setting.value, folders) for setting in line.settings]
    count = 1
    for axis in axes:
        count *= len(axis)
    if not 0 < count <= MAX_JOBS:
        got = f"more than {MAX_JOBS}" if count else "no"
        raise ConfigError(f"-m: got {got} jobs, expected 1 to {MAX_JOBS}")
    jobs, errors = [], []
    for values in itertools.product(*axes):
        settings = [
            replace(setting, value=value)
            for setting, value in zip(line.settings, values, strict=True)
        ]
        swept = [s for s, axis in zip(settings, axes, strict=True) if len(axis) > 1]
        label = " ".join(map(str, swept))
        try:
            job = replace(line, settings=settings)
            config, notes = resolve(job)
        except ConfigError as error:
            errors.append(f"{label}: {error.message}" if label else error.message)
        else:
            reads = getattr(config, "predict_data", None)
            if reads == STANDARD_INPUT:
                errors.append("predict_data=-: standard input cannot be read by a job of -m")
            jobs.append((swept, config, notes))
    if errors:
        raise ConfigError.of(list(dict.fromkeys(errors)))
    return jobs


def swept_settings(line: CommandLine) -> list[Setting]:
    """The settings of a line that list or describe several values; a text never does."""
    folders = user_folders(line, read_config(line.config_files, None, schemas()))
    return [
        setting
        for setting in line.settings
        if isinstance(setting.value, str)
        and _may_be_swept(setting.key, folders)
        and is_sweep(setting.value)
    ]


def _may_be_swept(key: str, folders: Sequence[Path]) -> bool:
    if key in (*GROUPS, *own_groups(folders)):
        return True
    modes = schemas().run_modes_with(key)
    schema = schemas().config_of(modes[0]) if modes else RunConfig
    annotation = annotation_of(key, leaves(schema))
    return annotation is not None and not accepts(annotation, str)


def _swept(key: str, value: str | list[str], folders: Sequence[Path]) -> list[str | list[str]]:
    if isinstance(value, list) or not _may_be_swept(key, folders):
        return [value]
    group = key in (*GROUPS, *own_groups(folders))
    try:
        return [*swept_values(value, options_of(key, folders) if group else [], MAX_JOBS + 1)]
    except ValueError as error:
        raise ConfigError(f"{key}={value}: {error}") from None
