"""Cache of compiled graphs across runs.

MindSpore's cache key omits the input shapes, so it can serve a wrong graph: here every distinct
graph has its own folder, named by a hash of everything it depends on.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import mindspore as ms
from mindspore import nn
from mindspore.graph import api as graph_api

from lite_runner import progress
from lite_runner.errors import EnvironmentFault
from lite_runner.system import user_cache
from lite_runner.system.environment import code_digest
from lite_runner.system.files import cache_dir, make_folder, sha256_of
from lite_runner.system.signals import deferred

SEAL = ".sha256"

_claimed = False  # the first backend of this process has the cache; see GraphCache


class GraphCache:
    """The cache folder of one backend's graphs.

    MindSpore keeps the first folder for the whole process, and numbers the graphs in it by compile
    order. So only the first backend of a process uses the cache (a run has one), and its compile
    order must be fixed: only graphs of the first purpose are cached.
    """

    def __init__(self, network: Mapping[str, object]) -> None:
        """`network`: everything the graphs depend on besides the code, JSON-serializable."""
        global _claimed
        described = {
            **network,
            "mindspore": ms.__version__,
            "code": code_digest(),
            # MindSpore discards entries of other programs.
            "program": str(_program()),
        }
        self._described = described
        self._active = not _claimed and _program().is_file()
        _claimed = True
        self._purpose = ""  # of the cached graphs
        self._folder = Path()
        self._next = 0

    def compile(self, graph: nn.Cell, *inputs: object, name: str, purpose: str) -> bool:
        """Compile a graph, shown as `name`, or load it from the cache; whether it was a hit."""
        with self.entry(purpose) as cached:
            step = (
                nullcontext() if cached else progress.step(f"compile the {name}", phase="compile")
            )
            with step, deferred():  # an interrupt would leave a dump
                graph.compile(*inputs)
        return cached

    @contextmanager
    def entry(self, purpose: str = "generate") -> Iterator[bool]:
        """Context in which to compile one graph; yields whether it is a cache hit."""
        if self._active and not self._purpose:
            self._purpose = purpose
            key = json.dumps(self._described | {"purpose": purpose}, sort_keys=True)
            name = hashlib.sha256(key.encode()).hexdigest()[:32]
            self._folder = cache_dir() / user_cache.GRAPHS / name
            self._active = _is_writable(self._folder) and user_cache.use(self._folder)
        if not self._active or purpose != self._purpose:
            yield False
            return
        # Under msrun MindSpore prefixes the names with its role.
        name = f"{os.environ.get('MS_ROLE', '')}compile_cache_{self._next}.mindir"
        graph = self._folder / "rank_0" / "graph_cache" / name
        self._next += 1
        cached = _is_whole(graph)
        ms.set_context(enable_compile_cache=True, compile_cache_path=str(self._folder))
        try:
            yield cached
            if not cached:
                _seal(graph)
        finally:
            ms.set_context(enable_compile_cache=False)


def _is_whole(graph: Path) -> bool:
    """True if a cached graph is intact; MindSpore would not notice a changed constant."""
    try:
        if graph.with_suffix(SEAL).read_bytes() == sha256_of(graph).encode():
            return True
        graph.unlink()
    except OSError:
        pass
    return False


def _seal(graph: Path) -> None:
    with suppress(OSError):  # an entry without a checksum is compiled again
        graph.with_suffix(SEAL).write_text(sha256_of(graph))


def _program() -> Path:
    """The file that MindSpore took for the main program at import; it is part of its key, so
    without one (`python -c`) there is no cache."""
    return Path(getattr(graph_api, "entry_script_path", None) or "/")


def _is_writable(folder: Path) -> bool:
    """True if the folder is writable; else the run does not use the cache."""
    try:
        make_folder(folder)
    except EnvironmentFault:
        return False
    return os.access(folder, os.W_OK)
