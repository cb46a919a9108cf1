"""run_mode=serve: an HTTP server of OpenAI's protocol."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from json import dumps
from pathlib import Path
from typing import Any

from lite_runner import progress
from lite_runner.config import Invalid, bytes_of, invalid, show
from lite_runner.config.argv import CommandLine, Setting
from lite_runner.config.checks import session_errors
from lite_runner.config.generation import sampled
from lite_runner.config.model_dir import yamls_in
from lite_runner.errors import ConfigError
from lite_runner.output import Result, RunFolder
from lite_runner.plan import Plan
from lite_runner.run_modes._plan import plan_session
from lite_runner.serving.listening import check_certificate, listen
from lite_runner.serving.options import ServeOptions as Config
from lite_runner.serving.options import ServePlan
from lite_runner.system import environment
from lite_runner.system.files import readable
from lite_runner.system.memory import bound
from lite_runner.system.secret import named_keys, read_key
from lite_runner.system.yaml_file import read_yaml

__all__ = ["Config", "errors", "plan", "run"]


_MOST_RUNNING = 8  # sequences, with serve.max_running=auto
# Settings that belong to a request.
_OF_REQUESTS = {
    "num_beams": "n samples are drawn; there is no beam search",
    "length_penalty": "there is no beam search",
    "num_return_sequences": "a request gives n",
    "logprobs": "a request gives it",
    "prompt_logprobs": "a request gives it",
    "adapter_id": "a request names its adapter as model",
    "max_length": "serve.max_length bounds prompt and completion together",
}
# Of the address, whatever answers there; of a model are its names, sizes and limits.
_OF_SERVER = (
    *("engine", "replicas", "models", "load_timeout", "batch", "batch_output", "host", "port"),
    *("api_key", "tls_cert", "tls_key", "allowed_hosts", "cors_origins", "load_adapters"),
    *("drain_delay", "drain_timeout", "log_format"),
)
# Keys that say which model it is, and those without effect here.
_OF_MODEL = ("model", "trainer", "processor", "load_checkpoint", "pretrained_model_dir", "infer")
_IDLE = ("parallel", "parallel_config")


def errors(config: Config) -> Iterator[Invalid]:
    """Validation errors of a server."""
    for key, why in _OF_REQUESTS.items():
        if (value := getattr(config, key)) is not None:
            yield invalid(key, f"{key}={show(value)} has no effect with run_mode=serve: {why}")
    if config.serve.load_adapters and not config.adapter_root:
        yield invalid(
            ("serve.load_adapters", "adapter_root"),
            "serve.load_adapters=true needs adapter_root=, below which those are that clients load",
        )
    for key in ("watch_adapters", "load_adapters") if config.in_lite else ():
        if getattr(config.serve, key):
            yield invalid(
                (f"serve.{key}", "backend"),
                f"serve.{key} has no effect with backend=mslite, whose models are exported ones",
            )
    yield from session_errors(config)


def plan(config: Config) -> Plan:
    """Packages, files, adapters, backend and memory; a batch is read before anything is fetched,
    and of several models one that is not asked for is never."""
    if config.serve.models:
        environment.check_packages("serve")
        return Plan(config=config, lines=_lines(models_of(config), dry_run=config.dry_run))
    if not config.serve.batch:
        if not config.dry_run:
            # Checked before anything is fetched.
            listen(config.serve.host, config.serve.port).close()
        return _plan_server(config)
    environment.check_packages("serve")
    from lite_runner.serving.batches import read_batch

    writes = f"{config.serve.batch_target}, {read_batch(config.serve):,} answers"
    plan = _plan_server(config)
    return replace(plan, lines={**plan.lines, "writes": writes})


def _plan_server(config: Config) -> ServePlan:
    """Packages, files, adapters, backend and memory, all validated. Raises RunnerError."""
    environment.check_packages("serve")
    if config.serve.engine == "ray":
        environment.check_packages("ray")
    if config.serve.memory is not None:
        bound(bytes_of(config.serve.memory))
    running, length = config.serve.max_running, config.serve.max_length
    named_keys(read_key("serve.api_key", config.serve.api_key))
    check_certificate(config.serve)
    plan = plan_session(
        config,
        slots=range(1, _MOST_RUNNING + 1) if running == "auto" else [running],
        length=length,
        least=2,  # so that one long request does not block others
        all_logits=not config.in_lite,
    )
    adapters = plan.work.adapters.adapters if plan.work.adapters else ()
    for adapter in adapters:
        if adapter.name in config.served_names:
            raise ConfigError(
                f"adapter {adapter.name} has the model's name, so requests could not select it",
                f"serve.model_name=NAME gives the model another one than {adapter.name}",
            )
    # OpenAI's default, whatever the model's.
    defaults = replace(plan.work.generation, do_sample=sampled(vars(config)) is not False)
    found = vars(plan) | {"job": replace(plan.work, generation=defaults)}
    return ServePlan(**found, serve=config.serve, names=config.served_names)


def planned(raw: Mapping[str, Any]) -> ServePlan:
    """The plan of a server in a process of its own, from a config as plain data. Raises
    RunnerError."""
    config = Config.from_dict(raw)
    progress.configure(config.verbosity, config.log_format)
    return _plan_server(config)


def models_of(config: Config) -> dict[str, Config]:
    """The configs of the models of serve.models by their names: the keys of the server, with a
    model's own over them. Raises ConfigError with the errors of all."""
    errors: list[str] = []
    found: dict[str, Config] = {}
    for item in config.serve.models:
        for given in _yamls(item):
            try:
                one = _model(config, given)
            except ConfigError as error:
                errors.append(f"serve.models: {given}: {error.message}")
                continue
            if one.served_names[0] in found:
                errors.append(f"serve.models: {one.served_names[0]} is named twice")
            found[one.served_names[0]] = one
    if errors:
        raise ConfigError.of(errors)
    return found


def _yamls(item: str) -> list[str]:
    """The yaml files of a folder of such; any other item as it is."""
    folder = Path(item).expanduser()
    if not folder.is_dir() or (folder / "config.json").exists():
        return [item]
    return [str(path) for path in yamls_in(folder)] or [item]


def _model(config: Config, given: str) -> Config:
    """The config of a model by its name, checkpoint or yaml. Raises ConfigError."""
    from lite_runner.run_modes import resolve

    raw = config.to_dict()
    for key in (*_OF_MODEL, *_IDLE):
        raw.pop(key, None)
    path, settings = Path(given).expanduser(), [Setting("model", given)]
    if path.suffix in (".yaml", ".yml"):
        settings = list(_settings(read_yaml(path, given)))
        for key in (f"serve.{name}" for name in _OF_SERVER):
            if key in {setting.key for setting in settings}:
                raise ConfigError(
                    f"{key} is a setting of the server, not of one model: give it on the command"
                    " line"
                )
        raw["serve"]["model_name"] = path.stem
    raw["serve"]["models"] = []
    found, _ = resolve(CommandLine(config=raw, settings=settings))
    assert isinstance(found, Config)
    return replace(found, serve=replace(found.serve.behind, cors_origins=()))


def _settings(raw: Mapping[str, Any], section: str = "") -> Iterator[Setting]:
    """The keys of a yaml as they would be typed."""
    for name, value in raw.items():
        if isinstance(value, Mapping):
            yield from _settings(value, f"{section}{name}.")
        else:
            yield Setting(f"{section}{name}", value if isinstance(value, str) else dumps(value))


def _lines(models: Mapping[str, Config], *, dry_run: bool) -> dict[str, str]:
    lines = {"models": ", ".join(models)}
    for name, config in models.items() if dry_run else ():
        need = _plan_server(config).memory
        lines[name] = (
            f"needs {readable(need.total)} ({need.parts()})" if need else "needs no weights"
        )
    return lines


def run(plan: Plan, folder: RunFolder) -> None:
    """Serve until SIGTERM or Ctrl-C, or answer a batch. Raises RunnerError, EnvironmentFault where
    a package of the server is missing or the port is taken."""
    config = plan.config
    assert isinstance(config, Config)
    if config.serve.models:
        from lite_runner.serving.router import serve_models

        configs = {name: one.to_dict() for name, one in models_of(config).items()}
        serve_models(config.serve, configs, planned)
        return
    assert isinstance(plan, ServePlan)
    if config.serve.batch:
        from lite_runner.serving.batches import run_batch

        began = time.perf_counter()
        engine = run_batch(plan)
        folder.write_result(Result.of_files(plan, plan.model.source, began, engine=engine))
        return
    # Imports the packages of the extras `serve` and `ray`.
    if config.serve.engine == "ray":
        # Read when Ray is imported: it reports its use elsewhere, and shows similar lines once. Its
        # workers run at a niceness of 15: on a busy machine a replica has a thirtieth of its share.
        for name in ("RAY_USAGE_STATS_ENABLED", "RAY_DEDUP_LOGS", "RAY_worker_niceness"):
            os.environ.setdefault(name, "0")
        from lite_runner.serving.cluster import serve_on_ray

        serve_on_ray(plan, planned, replace(config, serve=config.serve.behind).to_dict())
    else:
        from lite_runner.serving.server import serve

        serve(plan)
