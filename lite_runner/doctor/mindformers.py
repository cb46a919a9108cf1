"""The Pythons that have MindFormers, and what it makes of a model."""

from __future__ import annotations

from lite_runner.backends.mindformers.release import MindFormersRelease
from lite_runner.backends.mindformers.releases import RELEASES, choose_release
from lite_runner.backends.workers.python import isolated_code, worker_environment
from lite_runner.doctor import child
from lite_runner.doctor.check import Finding
from lite_runner.doctor.model_checks import ModelOptions
from lite_runner.errors import EnvironmentFault
from lite_runner.model.locate import locate_cached

VERSION_S = 20.0  # seconds that a Python may take to tell versions
_VERSIONS = "from importlib.metadata import version as v; print(v('mindformers'), v('mindspore'))"


def pythons(*, needed: bool) -> Finding:
    """Of each release; `needed`: backend=mindformers was asked for."""
    found, remedy = [], ""
    for release in RELEASES.values():
        try:
            found.append(_of(release))
        except EnvironmentFault as error:
            if not error.message.startswith("no Python"):
                raise
            found.append(f"no {release.name}")
            remedy = remedy or error.hint
    lacking = bool(remedy)
    told = "; ".join(found) + ("" if needed or not lacking else " (for backend=mindformers alone)")
    return Finding("fail" if needed and lacking else "ok", told, remedy=remedy)


def model(config: ModelOptions) -> Finding:
    """The release that computes the model of `config`. Raises ConfigError where none does."""
    release = choose_release(
        locate_cached(config).model,
        config.model_name,
        wanted=config.mindformers_release,
        use_past=config.caches,
        beams=config.num_beams or 1,
    )
    return Finding("ok", f"MindFormers {release.name}, on mindspore {release.mindspore}")


def _of(release: MindFormersRelease) -> str:
    """What the Python of a release says. Raises EnvironmentFault where it has another one."""
    python = release.python.find()
    ended = child.run(isolated_code(python, _VERSIONS), VERSION_S, worker_environment())
    versions = ended.output.split()
    if ended.code or versions != [release.name, release.mindspore]:
        has = " on mindspore ".join(versions) if not ended.code else f"no MindFormers{ended.tail()}"
        raise EnvironmentFault(
            f"{python} has {has}, expected {release.name} on mindspore {release.mindspore}",
            release.python.remedy,
        )
    return f"{release.name} on mindspore {release.mindspore}, in a worker: {python}"
