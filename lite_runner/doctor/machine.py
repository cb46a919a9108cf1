"""The checks of this machine: packages, processor, memory, disks, cache, programs, ranks."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Literal

import psutil  # type: ignore[import-untyped]

from lite_runner import native, progress
from lite_runner.backends.lite.engines import lite
from lite_runner.backends.lite.engines.lite_release import LITE
from lite_runner.backends.mindformers.releases import RELEASES, MindFormersRelease
from lite_runner.backends.workers.python import isolated_code, worker_environment
from lite_runner.doctor import probe, two_ranks
from lite_runner.doctor.check import Check, Finding, as_json, as_text, counts, examine, passed
from lite_runner.errors import EnvironmentFault
from lite_runner.native.fingerprint import compiler
from lite_runner.output import PROBE_BYTES
from lite_runner.sizing import PROCESS, Memory, shortage
from lite_runner.system import environment, memory
from lite_runner.system.environment import Requirement
from lite_runner.system.files import cache_dir, folder_size, readable
from lite_runner.system.user_cache import (
    EXPORTS,
    GRAPHS,
    PACKED,
    PREFIXES,
    default_limit,
    limited_folders,
)
from lite_runner.weights.hubs import HUBS
from lite_runner.weights.source import PACKAGES

ASCEND_S = 180.0  # seconds until a device must have answered; the first use of one takes its time
SMALL_DISK = 10**9  # bytes; less is little for a checkpoint
IMPORT_S = 120.0  # seconds that importing MindSpore, or Lite, may take; from a cold disk it is slow
LOAD_S = 20.0  # for what is small
VERSION_S = 20.0  # seconds that a Python may take to tell versions
_LITE_VERSION = "import mindspore_lite as lite; print(lite.__version__)"
_VERSIONS = "from importlib.metadata import version as v; print(v('mindformers'), v('mindspore'))"
Format = Literal["text", "json"]


def machine_checks(
    output_dir: Path, cache_limit: str | None = None, *, needs_mindformers: bool = False
) -> Iterator[Check]:
    """Of the machine, for runs that write below `output_dir`. Nothing is written there."""
    cache, has_mindspore = cache_dir(), environment.installed(environment.MINDSPORE) is not None
    yield from requirement_checks()
    if has_mindspore:
        yield Check("import mindspore", mindspore)
    yield Check("processor", cpu)
    yield Check("ascend", ascend)
    yield Check("operators", operators)
    yield Check("compiler", cxx)
    yield Check("lite", mindspore_lite)
    yield Check("mindformers", partial(mindformers, needed=needs_mindformers))
    yield Check("memory", main_memory)
    yield Check("output_dir", partial(output_disk, output_dir))
    yield Check("cache", partial(cache_disk, cache))
    yield Check("compiled graphs", partial(cached, cache / GRAPHS))
    yield Check("exports", partial(cached, cache / EXPORTS))
    yield Check("packed layers", partial(cached, cache / PACKED))
    yield Check("prefixes", partial(cached, cache / PREFIXES))
    yield Check("cache_limit", partial(cache_size, cache_limit))
    folders = (PACKAGES, *dict.fromkeys(hub.folder for hub in HUBS.values()))
    yield Check("downloads", partial(cached, *(cache / name for name in folders)))
    yield Check("port", two_ranks.port)
    if has_mindspore:
        yield Check("msrun", two_ranks.gather)


def run(checks: Iterable[Check], form: Format) -> bool:
    """Look at everything and tell it on standard output, as text while it goes on. Whether nothing
    fails."""
    findings = []
    for name, finding in examine(checks):
        findings.append((name, finding))
        if form == "text":
            progress.text(as_text(name, finding))
    only = [finding for _, finding in findings]
    progress.text(counts(only) if form == "text" else as_json(findings))
    return passed(only)


def requirement_checks() -> Iterator[Check]:
    """One of the interpreter, and one of each package."""
    yield Check("python", python_version)
    if environment.namesake():
        yield Check("lite_runner", namesake)
    for one in environment.required():
        yield Check(one.name, partial(package, one))
    if not environment.required():
        yield Check("packages", unknown)


def python_version() -> Finding:
    """The interpreter that runs this."""
    version, wanted = platform.python_version(), environment.required_python()
    found = f"{version} ({sys.executable})"
    if wanted.allows(version):
        return Finding("ok", found, wanted.bounds)
    return Finding(
        "fail", found, wanted.bounds, "python3.11 -m venv .venv, or in a checkout: make run"
    )


def namesake() -> Finding:
    """Another project's package, in whose files ours may be lost."""
    return Finding("warn", environment.namesake(), remedy=environment.without_namesake())


def package(wanted: Requirement) -> Finding:
    """An installed package, looked up and not imported."""
    version = environment.installed(wanted.name)
    if version is not None and wanted.allows(version):
        return Finding("ok", version, wanted.bounds)
    remedy = environment.install_line(environment.unmet())
    missing = version or "not installed"
    if (wanted.name, version) == (environment.MINDSPORE, None):
        missing += ": backend=native alone computes, on one rank, and nothing is exported"
        return Finding("warn", missing, wanted.bounds, environment.mindspore_line())
    return Finding("fail", missing, wanted.bounds or "any version", remedy)


def unknown() -> Finding:
    """The finding if no metadata names requirements."""
    found = "lite-runner itself is not installed here, so what it requires is not known"
    return Finding("warn", found, remedy=f"{sys.executable} -m pip install . (in its checkout)")


def cpu() -> Finding:
    """The processor: the cores that this process may use, and its features."""
    count = f"{environment.cores()} of {os.cpu_count()} cores"
    if (quota := environment.cpu_quota()) is not None:
        count += f" (CPU quota of the cgroup: {quota:g})"
    features = (
        " ".join(environment.processor_features()) or "no vector instructions that matter here"
    )
    return Finding("ok", f"{environment.processor()}, {count}, {features}")


def ascend() -> Finding:
    count = environment.ascend_devices()
    if not count:
        return Finding("ok", "none: runs on the CPU")
    return Finding("ok", f"{count} x {probe.ask('ascend', ASCEND_S)}")


def main_memory() -> Finding:
    """Memory for a process, of the machine, the container (cgroup) and by ulimit -v, against what
    MindSpore alone takes."""
    if (lacking := shortage(Memory(0, 0, process=PROCESS))) is not None:
        remedy = "ulimit -v unlimited, a larger limit of the container, or fewer other processes"
        return Finding("fail", f"MindSpore alone {lacking}", remedy=remedy)
    free, whole = memory.free_memory(), int(psutil.virtual_memory().total)
    found = f"{readable(free)} free for this process, of the machine's {readable(whole)}"
    left = memory.free_addresses()
    limit = "" if left is None else f"; ulimit -v leaves {readable(left)} of address space"
    return Finding("ok", found + limit)


def output_disk(output_dir: Path) -> Finding:
    """A run can make its folder below `output_dir`; nothing is made."""
    base = output_dir.expanduser().absolute()
    finding = _disk(base, "output_dir=FOLDER, one that can be written")
    latest = base / "latest"
    if finding.status != "fail" and latest.is_dir() and not latest.is_symlink():
        found = f"{latest}: a folder stands where the link to the newest run is to be"
        return Finding("fail", found, remedy=f"mv {latest} {latest}-old")
    return finding


def cache_disk(cache_dir: Path) -> Finding:
    """Check that the cache can be written; reading it needs no more."""
    finding = _disk(
        cache_dir.absolute(), "export LITE_RUNNER_CACHE=FOLDER, one that can be written"
    )
    return Finding(
        "warn" if finding.status == "fail" else finding.status, finding.found, remedy=finding.remedy
    )


def _disk(folder: Path, remedy: str) -> Finding:
    try:
        place = _standing(folder)
        with tempfile.TemporaryFile(dir=place) as file:  # permission and space show only then
            file.write(bytes(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
        free = shutil.disk_usage(place).free
    except OSError as error:
        found = f"{folder}: cannot be written: {error.strerror or error}"
        return Finding("fail", found, remedy=remedy)
    found = f"{folder}: {readable(free)} free"
    if free < SMALL_DISK:
        return Finding("warn", found, readable(SMALL_DISK), f"free some space, or {remedy}")
    return Finding("ok", found)


def _standing(folder: Path) -> Path:
    """The folder, or the nearest above it that exists: there it would be made."""
    for place in (folder, *folder.parents):
        if place.is_symlink() and not place.exists():
            raise OSError(f"{place} is a link to {place.readlink()}, which does not exist")
        if place.exists():
            if not place.is_dir():
                raise OSError(f"{place} is a file")
            return place
    raise EnvironmentFault(f"{folder}: not even / exists")


def cache_size(limit: str | None) -> Finding:
    """The share of context.cache_limit that the cache's entries take."""
    used = readable(sum(map(folder_size, limited_folders())))
    most = limit or f"{readable(default_limit())}, a quarter of the free disk,"
    what = "packed layers, prefixes, compiled graphs and exports"
    return Finding("ok", f"{used} of {most} for {what}")


def cached(*folders: Path) -> Finding:
    """The size of the cache's folders. Emptying them costs time, nothing else."""
    there = [folder for folder in folders if os.access(folder, os.R_OK | os.X_OK)]
    size = sum(map(folder_size, there))
    if not size:
        return Finding("ok", "empty")
    remedy = f"to empty it: rm -r {shlex.join(map(str, there))}"
    return Finding("ok", f"{readable(size)} in {', '.join(map(str, there))}", remedy=remedy)


def mindspore() -> Finding:
    """MindSpore imports and computes on the CPU."""
    return Finding("ok", probe.ask("mindspore", IMPORT_S))


def operators() -> Finding:
    """The native kernels fit their sources and load. Runs do without them, slower and without
    quantized weights."""
    if (error := native.unusable()) is not None:
        return Finding("warn", f"they {error.why}: MindSpore's own serve", remedy=error.remedy)
    instructions = probe.ask("operators", LOAD_S)
    if instructions == "portable" and platform.machine() == "x86_64":
        found = "portable instructions: this processor has no avx2, they are slow"
        return Finding("warn", found, "avx2 or avx512", "run on a processor with avx2")
    return Finding("ok", f"built from the sources beside them, {instructions}")


def cxx() -> Finding:
    """The compiler that would build our operators; only an installation needs it."""
    try:
        command = compiler()
    except OSError as error:
        needed = native.unusable() is not None
        remedy = "install g++ or clang++, e.g. apt-get install g++; or set CXX"
        return Finding("warn" if needed else "ok", str(error), remedy=remedy if needed else "")
    ended = probe.run([*command, "--version"], LOAD_S)
    if ended.code:
        return Finding("warn", f"{command[0]} does not run{ended.tail()}", remedy="set CXX")
    return Finding("ok", f"{command[0]}: {next(iter(ended.output.splitlines()), '')}")


def mindspore_lite() -> Finding:
    """MindSpore Lite, in this Python or in one of its own. Exported models run without it too."""
    if lite.available():
        return Finding("ok", f"{probe.ask('lite', IMPORT_S)}, in this Python")
    try:
        python = LITE.find()
    except EnvironmentFault as error:
        found = f"{error.message}; exported models run in MindSpore (engine=graph-cell)"
        return Finding("warn", found, remedy=error.hint)
    ended = probe.run(isolated_code(python, _LITE_VERSION), IMPORT_S, worker_environment())
    if ended.code:
        return Finding("fail", f"{python} has no MindSpore Lite{ended.tail()}", remedy="make lite")
    return Finding("ok", f"MindSpore Lite {ended.output.strip()}, in a worker: {python}")


def mindformers(*, needed: bool) -> Finding:
    """Of each release; `needed`: backend=mindformers was asked for."""
    found, remedy = [], ""
    for release in RELEASES.values():
        try:
            found.append(_release_in_python(release))
        except EnvironmentFault as error:
            if not error.message.startswith("no Python"):
                raise
            found.append(f"no {release.name}")
            remedy = remedy or error.hint
    lacking = bool(remedy)
    text = "; ".join(found) + ("" if needed or not lacking else " (for backend=mindformers alone)")
    return Finding("fail" if needed and lacking else "ok", text, remedy=remedy)


def _release_in_python(release: MindFormersRelease) -> str:
    """The versions in a release's Python. Raises EnvironmentFault where they are others."""
    python = release.python.find()
    ended = probe.run(isolated_code(python, _VERSIONS), VERSION_S, worker_environment())
    versions = ended.output.split()
    if ended.code or versions != [release.name, release.mindspore]:
        has = " on mindspore ".join(versions) if not ended.code else f"no MindFormers{ended.tail()}"
        raise EnvironmentFault(
            f"{python} has {has}, expected {release.name} on mindspore {release.mindspore}",
            release.python.remedy,
        )
    return f"{release.name} on mindspore {release.mindspore}, in a worker: {python}"
