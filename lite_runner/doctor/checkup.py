"""All checks of this machine, in the order in which they are told."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Literal

from lite_runner import progress
from lite_runner.doctor import caches, computing, hardware, mindformers, requirements, two_ranks
from lite_runner.doctor.check import Check, as_json, as_text, counts, examine, passed
from lite_runner.system.user_cache import cache_dir
from lite_runner.weights.source import EXPORTS, GRAPHS, HUB, PACKAGES

Format = Literal["text", "json"]


def machine_checks(
    output_dir: Path, cache_limit: str | None, *, needs_mindformers: bool = False
) -> Iterator[Check]:
    """Of the machine, for runs that write below `output_dir`. Nothing is written there."""
    cache = cache_dir()
    yield from requirements.checks()
    yield Check("import mindspore", computing.mindspore)
    yield Check("processor", hardware.cpu)
    yield Check("ascend", hardware.ascend)
    yield Check("operators", computing.operators)
    yield Check("compiler", computing.cxx)
    yield Check("lite", computing.mindspore_lite)
    yield Check("mindformers", partial(mindformers.pythons, needed=needs_mindformers))
    yield Check("memory", hardware.main_memory)
    yield Check("output_dir", partial(hardware.output_disk, output_dir))
    yield Check("cache", partial(hardware.cache_disk, cache))
    yield Check("compiled graphs", partial(caches.kept, cache / GRAPHS))
    yield Check("exports", partial(caches.kept, cache / EXPORTS))
    if cache_limit is not None:
        yield Check("cache_limit", partial(caches.against, cache_limit))
    yield Check("downloads", partial(caches.kept, cache / HUB, cache / PACKAGES))
    yield Check("port", two_ranks.port)
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
